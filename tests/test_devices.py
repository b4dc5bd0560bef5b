"""The machine: its devices, its memory, and the cache of compiled programs."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from flaxformer_min.kernels.backend import backend, compiling_for, compute_dtype
from flaxformer_min.system import compilation, devices
from flaxformer_min.system.devices import configure_cpu_devices


def test_the_devices_in_use_are_counted():
    assert devices.describe_devices().startswith("2 cpu devices")


@pytest.mark.parametrize("platforms", [None, "cpu"])
def test_a_gpu_that_jax_does_not_use_is_named_unless_it_was_hidden(monkeypatch, platforms):
    """With the way out."""
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path("/dev/nvidia0")])
    text = devices.describe_devices()
    assert ("/dev/nvidia0" in text) == (platforms is None)
    assert ("pip install 'flaxformer_min[cuda]'" in text) == (platforms is None)


def test_compiled_programs_are_cached_unless_the_user_chose_a_folder(monkeypatch, tmp_path):
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    compilation.enable_compilation_cache(tmp_path)
    assert updates == {}, "the tests have a cache of their own"
    monkeypatch.setattr(compilation, "jax", type("jax", (), {"config": Config(updates)}))
    compilation.enable_compilation_cache(tmp_path)
    assert updates["jax_compilation_cache_dir"] == str(tmp_path / "compiled")


def test_no_programs_are_cached_where_others_can_write_them(monkeypatch, tmp_path, caplog):
    """They are executed."""
    tmp_path.chmod(0o777)
    updates = {}
    monkeypatch.setattr(compilation, "jax", type("jax", (), {"config": Config(updates)}))
    compilation.enable_compilation_cache(tmp_path)
    assert updates == {"jax_enable_compilation_cache": False}
    assert f"others can write {tmp_path}" in caplog.text


@pytest.mark.parametrize(
    "chosen, kept_in",
    [
        ({}, "ours"),
        pytest.param({"JAX_ENABLE_COMPILATION_CACHE": "false"}, None, marks=pytest.mark.slow),
        pytest.param({"JAX_COMPILATION_CACHE_DIR": "theirs"}, "theirs", marks=pytest.mark.slow),
    ],
)
def test_the_variables_of_jax_choose_the_cache_of_compiled_programs(tmp_path, chosen, kept_in):
    """No option of ours is needed."""
    script = (
        "import jax; from flaxformer_min.system.compilation import enable_compilation_cache;"
        "enable_compilation_cache('ours');"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0);"
        "jax.jit(lambda x: x * 3 + 1)(2.0)"
    )
    of_the_tests = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(of_the_tests)}
    environment |= chosen | {"PYTHONPATH": str(Path(devices.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    kept = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*-cache")}
    assert kept == ({kept_in} if kept_in else set())


class Config:
    """jax.config where nothing was chosen."""

    jax_compilation_cache_dir = None

    def __init__(self, updates):
        self.update = updates.__setitem__


def test_a_compile_clock_counts_programs_while_it_runs():
    with compilation.CompileClock() as clock:
        jax.jit(lambda x: x * 3 + 1)(2.0)
    counted = clock.programs
    assert counted >= 1
    assert f"compiling {counted} programs" in str(clock)
    jax.jit(lambda x: x * 5 + 1)(2.0)
    assert clock.programs == counted


@pytest.mark.parametrize(
    "chosen, cores, devices",
    [
        ({}, 4, 3),
        ({}, 9, 6),
        ({}, 1, 1),
        ({"JAX_NUM_CPU_DEVICES": "5"}, 4, None),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=5"}, 4, None),
    ],
)
def test_the_cores_of_a_cpu_become_devices_that_share_rows_evenly(
    monkeypatch, chosen, cores, devices
):
    """Six rows; at most 8 devices. Devices that the user chose stay."""
    for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, text in chosen.items():
        monkeypatch.setenv(name, text)
    updates = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    configure_cpu_devices(6)
    assert updates == ({"jax_num_cpu_devices": devices} if devices else {})


@pytest.mark.slow
def test_a_process_of_its_own_has_these_devices():
    """Four cores, six rows."""
    script = (
        "import os, jax; from flaxformer_min.system.devices import configure_cpu_devices;"
        "os.sched_getaffinity = lambda process: range(4);"
        "configure_cpu_devices(6); print(jax.device_count())"
    )
    environment = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert int(done.stdout) == 3


SCRIPT = """
import mmap, resource, threading, ctypes
from flaxformer_min.system.memory import tune_malloc
tune_malloc()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
size = 100 << 20

def use():
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)

def in_a_thread():
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()

in_a_thread()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
in_a_thread()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults > size // mmap.PAGESIZE // 16)
"""


NEEDS_GLIBC = pytest.mark.skipif(
    not hasattr(os, "confstr_names") or "CS_GNU_LIBC_VERSION" not in os.confstr_names,
    reason="no glibc: tune_malloc does nothing",
)


@NEEDS_GLIBC
@pytest.mark.parametrize("chosen, cleared", [({}, False), ({"MALLOC_ARENA_MAX": "4"}, True)])
def test_memory_that_was_freed_is_not_cleared_again_unless_the_user_chose_otherwise(
    chosen, cleared
):
    """Of any thread: a page that the kernel hands out anew is a fault."""
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith("MALLOC_")
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment | chosen, capture_output=True, text=True
    )
    assert done.stdout == f"{cleared}\n", done.stderr


RETURNED = """
import ctypes, mmap, threading
from flaxformer_min.system.memory import returning_freed_memory, tune_malloc
tune_malloc(heaps=2)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def free_between_others():
    blocks = [libc.malloc(1 << 20) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in blocks[:-1]:
        libc.free(block)

def in_a_thread():
    thread = threading.Thread(target=free_between_others)
    thread.start()
    thread.join()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE / 2**20

in_a_thread()
before = resident()
with returning_freed_memory():
    inside = resident()
    in_a_thread()
    at_the_end = resident()
print(before - inside > 30, at_the_end - inside > 30, resident() - inside < 10)
"""


@NEEDS_GLIBC
def test_freed_memory_is_returned_before_and_after_what_takes_much_for_a_moment():
    """In the heap of another thread, below a block that is in use."""
    done = subprocess.run([sys.executable, "-c", RETURNED], capture_output=True, text=True)
    assert done.stdout == "True True True\n", done.stderr


@pytest.mark.parametrize(
    "platform, capability, name, dtype",
    [
        ("cpu", None, "cpu", "float32"),
        ("tpu", None, "tpu", "bfloat16"),
        ("gpu", "9.0", "cuda", "bfloat16"),
        ("gpu", "7.5", "cuda", "float32"),
        ("gpu", "gfx90a", "rocm", "float32"),
    ],
)
def test_automatic_settings_are_those_of_the_device_that_a_program_is_compiled_for(
    platform, capability, name, dtype
):
    """Tensor cores of NVIDIA have bfloat16 from Ampere on, compute capability 8.0."""
    with compiling_for([SimpleNamespace(platform=platform, compute_capability=capability)]):
        assert backend() == name
        assert compute_dtype("auto") == dtype
        assert compute_dtype("float32") == "float32"
    assert backend() == "cpu"

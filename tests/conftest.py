"""Two virtual devices, and every annotated shape checked, before jax or the package is imported."""

import ctypes
import gc
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiled as quickly as possible: most of the time of these tests is compilation.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know it
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# Programs compiled once a session, by whichever process of it; nothing of the user's is touched.
os.environ.setdefault("FLAXFORMER_TEST_CACHE", tempfile.mkdtemp(prefix="flaxformer_min-tests-"))
os.environ["XDG_CACHE_HOME"] = os.environ["FLAXFORMER_TEST_CACHE"]
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["FLAXFORMER_TEST_CACHE"] + "/compiled"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook(
    [
        "flaxformer_min." + name
        for name in ("tokens", "model", "training.loss", "training.step", "decoding")
    ],
    "beartype.beartype",
)


@pytest.fixture(autouse=True, scope="module")
def memory_is_given_back():
    """Compiled programs of one file are of little use to the next: together they take gigabytes."""
    yield
    if sys.platform == "linux" and resident_bytes() < MOST_BYTES:
        return
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":  # glibc keeps what compilation freed
        ctypes.CDLL(None).malloc_trim(0)


MOST_BYTES = 1_500_000_000


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def programs_are_shared():
    """Jobs of equal settings have one program: tracing it takes longer than their steps."""
    from training_jobs import shared_programs

    with shared_programs():
        yield


@pytest.fixture
def failed_transfers():
    """Orbax leaves coroutines behind where reading or writing fails; they end with the test."""
    yield
    gc.collect()

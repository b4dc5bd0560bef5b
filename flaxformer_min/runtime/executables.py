"""Compiled programs on disk that later processes load without tracing them again.

jax's own cache finds a program by its lowered code. Tracing and lowering a search takes longer, and
more memory, than loading it. Here a program is found by what its code depends on.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from flaxformer_min.runtime.files import write_atomically
from flaxformer_min.runtime.memory import returning_freed_memory

LOGGER = logging.getLogger("flaxformer_min")

CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux describes each core of the CPU, in a paragraph of its own."""

CPU_FIELDS = (
    *("vendor_id", "cpu family", "model", "flags"),  # x86
    *("CPU implementer", "CPU part", "Features"),  # Arm
)
"""Fields that decide how XLA compiles: the CPU's model and its instructions."""

UNRELATED = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
"""Options of jax that change no program."""

_COMPILING = threading.Lock()


def _source_digest() -> str | None:
    """Return a digest of the package's files; None if it has none, or one cannot be read."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    files = sorted(root.rglob("*.py"))
    try:
        for path in files:
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    except OSError:
        return None
    return digest.hexdigest() if files else None


SOURCE = _source_digest()
"""That of the code in memory: as it is imported, because files may change while a process runs."""


class ExecutableCache:
    """A folder of compiled programs for CPUs.

    A program is found again if neither its key, nor the files of this package, nor Python, jax and
    Flax, the options of jax and XLA, nor the CPU have changed. Functions of the package that are
    replaced in a running process are not noticed. As with jax's cache, whoever can write to the
    folder can run code in this process.
    """

    def __init__(self, folder: Path, devices: Sequence[jax.Device]):
        """Use this folder, which need not exist, for programs that run on these devices."""
        self.folder, self.devices = folder, devices

    def load(self, key: Any) -> jax.stages.Compiled | None:
        """Return the program of a key, which tells all that the program depends on; or None."""
        path = self._path(key)
        try:
            stored = path.read_bytes()
            with returning_freed_memory():
                name, *program = pickle.loads(zlib.decompress(stored))
                if name != path.name:
                    raise ValueError("it is another program, renamed")
                return deserialize_and_load(*program, execution_devices=self.devices)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with it, it will be replaced
            LOGGER.debug("%s cannot be loaded: %s", path, error)
            return None

    def compile(
        self, key: Any, lowered: jax.stages.Lowered, options: dict[str, Any]
    ) -> jax.stages.Compiled:
        """Compile a program, and keep it if its source is known and the folder can be written."""
        with _without_jax_cache():
            program = lowered.compile(options)
        if SOURCE is None or _source_digest() != SOURCE:
            return program
        try:
            path = self._path(key)
            content = zlib.compress(pickle.dumps((path.name, *serialize(program))))
            write_atomically(path, content, cached=True)
        except Exception as error:  # also of jax, if it cannot store a program of this kind
            LOGGER.debug("a compiled program is not kept: %s", error)
        return program

    def _path(self, key: Any) -> Path:
        options = {**jax.config.values, **dict.fromkeys(UNRELATED)}
        fingerprint = key, sorted(options.items()), _xla_flags(), SOURCE, _platform()
        return self.folder / f"{hashlib.sha256(repr(fingerprint).encode()).hexdigest()}.program"


def executables_folder() -> Path | None:
    """Return a folder in that of jax's cache; None if that is disabled, or not on a disk."""
    folder = jax.config.jax_compilation_cache_dir
    with _COMPILING:  # while a program is compiled, the cache is disabled
        enabled = jax.config.jax_enable_compilation_cache
    if not folder or "://" in folder or not enabled:
        return None
    return Path(folder) / "ready"


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Compile in the body, in one thread at a time.

    A program for a CPU that jax's cache returns could be stored and loaded once more, but would
    fail as it runs.
    """
    with _COMPILING:
        enabled = jax.config.jax_enable_compilation_cache
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", enabled)
            compilation_cache.reset_cache()


def _xla_flags() -> str:
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # the name of a file that has them
        with contextlib.suppress(OSError):
            return Path(flags).read_text()
    return flags


@functools.cache
def _platform() -> tuple[str, ...]:
    """Return the versions and the CPU that every program depends on."""
    versions = sys.version, jax.__version__, jaxlib.__version__, flax.__version__
    return *versions, platform.machine(), *_cpu()


def _cpu() -> list[str]:
    try:
        first_core = CPU_INFO.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in first_core if line.partition(":")[0].strip() in CPU_FIELDS]

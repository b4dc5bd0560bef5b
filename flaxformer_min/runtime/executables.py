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

LOGGER = logging.getLogger("flaxformer_min")

CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux describes each core of the CPU, in a paragraph of its own."""

CPU_FIELDS = (
    *("vendor_id", "cpu family", "model", "flags"),  # x86
    *("CPU implementer", "CPU part", "Features"),  # Arm
)
"""What XLA looks at: for which CPU to compile, and its instructions."""


class ExecutableCache:
    """Programs of one kind for a CPU, kept in a folder.

    A program is found again if neither `description`, nor the files of this package, nor jax and
    its options, nor the CPU have changed. Functions of the package that are replaced in a running
    process are not noticed. As with jax's cache, who may write in the folder may execute code here.
    """

    def __init__(self, folder: Path, description: str, devices: Sequence[jax.Device]):
        """Use this folder, which need not exist, for programs that run on these devices.

        description: all that the programs depend on, except what is named above and their keys.
        """
        self.folder, self.description, self.devices = folder, description, devices

    def load(self, key: Any) -> jax.stages.Compiled | None:
        """Return the program of a key; None if there is none."""
        path = self._path(key)
        try:
            program = pickle.loads(zlib.decompress(path.read_bytes()))
            return deserialize_and_load(*program, execution_devices=self.devices)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with it, it will be replaced
            LOGGER.debug("%s cannot be loaded: %s", path, error)
            return None

    def compile(
        self, key: Any, lowered: jax.stages.Lowered, options: dict[str, Any]
    ) -> jax.stages.Compiled:
        """Compile a program and keep it, if that is possible: the folder may not be writable."""
        path = self._path(key)
        with _without_jax_cache():
            program = lowered.compile(options)
        try:
            write_atomically(path, zlib.compress(pickle.dumps(serialize(program))))
        except Exception as error:  # also of jax, if it cannot store a program of this kind
            LOGGER.debug("a compiled program is not kept: %s", error)
        return program

    def _path(self, key: Any) -> Path:
        options = {**jax.config.values, "jax_compilation_cache_dir": None}
        flags = os.environ.get("XLA_FLAGS")
        all_of_it = key, self.description, sorted(options.items()), flags, _platform()
        return self.folder / f"{hashlib.sha256(repr(all_of_it).encode()).hexdigest()}.program"


def executables_folder() -> Path | None:
    """Return a folder in that of jax's cache; None if that is disabled, or not on a disk."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return None
    return Path(folder) / "ready"


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Compile in the body: a program for a CPU that jax's cache returns cannot be stored again."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


@functools.cache
def _platform() -> tuple[str, ...]:
    """Return what is the same for all programs of this process."""
    versions = sys.version, jax.__version__, jaxlib.__version__, flax.__version__
    return *versions, _source_digest(), platform.machine(), *_cpu()


def _source_digest() -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _cpu() -> list[str]:
    try:
        first_core = CPU_INFO.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in first_core if line.partition(":")[0].strip() in CPU_FIELDS]

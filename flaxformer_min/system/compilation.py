"""The cache of compiled programs, and the time that compiling takes."""

import logging
from pathlib import Path
from typing import Any

import jax

from flaxformer_min.system.files import cache_folder, check_private

LOGGER = logging.getLogger("flaxformer_min")


def enable_compilation_cache(cache_dir: str | Path = "") -> None:
    """Cache compiled programs on disk for later starts, unless the user configured jax's cache.

    JAX_ENABLE_COMPILATION_CACHE=false disables it; JAX_COMPILATION_CACHE_DIR sets another folder.
    Programs are executed, so none are cached in a folder that others can write; that is logged as
    a warning. See `cache_folder`.
    """
    given = jax.config.jax_compilation_cache_dir
    try:
        if given is not None and "://" not in given:
            check_private(Path(given))
        folder = given or str(cache_folder(cache_dir) / "compiled")
    except ValueError as error:
        LOGGER.warning("Compiled programs are not cached: %s", error)
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if given is None:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def check_jit() -> None:
    """Raise ValueError if jax was told not to compile; programs are compiled ahead of time here."""
    if jax.config.jax_disable_jit:
        raise ValueError(
            "training and search need compiled programs; JAX_DISABLE_JIT (jax_disable_jit) forbids "
            "them. Unset it, and debug with jax.debug.print or jax.disable_jit() around a call of "
            "the model."
        )


class CompileClock:
    """Counts the programs that XLA compiles in this process, and the seconds, in a `with` block."""

    def __init__(self):
        """Begin with zero."""
        self.programs, self.seconds = 0, 0.0

    def __enter__(self) -> "CompileClock":
        """Start counting."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: Any) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.programs += 1
            self.seconds += seconds

    def __str__(self) -> str:
        """Return a summary."""
        return f"compiling {self.programs} programs took {self.seconds:.0f} s, partly in parallel"

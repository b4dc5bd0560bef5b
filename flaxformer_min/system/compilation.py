"""The cache of compiled programs, and the time that compiling takes."""

from pathlib import Path
from typing import Any

import jax


def enable_compilation_cache(folder: Path) -> None:
    """Cache compiled programs on disk for later starts, unless the user configured jax's cache.

    JAX_ENABLE_COMPILATION_CACHE=false disables it; JAX_COMPILATION_CACHE_DIR sets another folder.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


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

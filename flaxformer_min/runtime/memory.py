"""The memory of the process: what the C library keeps, and advice when a device has too little."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

KEEPING = ((-8, 1), (-4, 0), (-1, -1))
"""For glibc's mallopt: M_ARENA_MAX, one heap for all threads, for only the first can grow without
end; M_MMAP_MAX, no block outside of it; M_TRIM_THRESHOLD, which never shrinks."""


def tune_malloc() -> None:
    """Let the C library keep the memory that a program frees, for the next one to use.

    XLA asks for all the memory of a step anew, hundreds of megabytes. glibc would map and unmap
    them each time, and the kernel clear them page by page: on two cores a step of a small model
    then takes 1.4 times, a search 1.1 times as long. The process holds on to the most that it ever
    needed. To be called before jax computes anything. Does nothing where the user has settings of
    malloc, or on another C library.
    """
    chosen = os.environ.get("GLIBC_TUNABLES", "") + "".join(os.environ)
    if "glibc.malloc" in chosen or "MALLOC_" in chosen or not hasattr(os, "confstr"):
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            mallopt = ctypes.CDLL(None).mallopt
            for setting, value in KEEPING:
                mallopt(setting, value)


@contextlib.contextmanager
def with_oom_hint(advice: str) -> Iterator[None]:
    """Add advice to XLA's out-of-memory error."""
    try:
        yield
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"the device has too little memory ({reason}). {advice}") from error

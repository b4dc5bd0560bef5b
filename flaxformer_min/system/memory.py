"""Memory: the tuning of malloc, and advice when a device runs out of memory."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator

M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD = -8, -4, -1
"""Settings of glibc's mallopt: the most heaps, the most blocks outside of them, and how much freed
memory a heap returns to the system."""


def tune_malloc(heaps: int = 1) -> None:
    """Let glibc keep freed memory for reuse, instead of returning it to the system.

    XLA allocates the memory of each step anew, hundreds of megabytes. By default, glibc maps and
    unmaps it each time, and the kernel clears every page: on two cores, a step of a small model
    takes 1.4 times and a search 1.1 times as long. With this, a process keeps the most memory that
    it ever needed. Call it before jax computes anything. Has no effect if the user has set options
    of malloc, or with another C library.

    heaps: how many there may be; threads share them. Training and scoring need a single one,
           because only the main heap has room for blocks of more than 64 MB. A greedy search has
           smaller blocks, and cores that search wait less for each other with a heap for each.
    """
    chosen = os.environ.get("GLIBC_TUNABLES", "") + "".join(os.environ)
    if "glibc.malloc" in chosen or "MALLOC_" in chosen or (glibc := _glibc()) is None:
        return
    glibc.mallopt(M_ARENA_MAX, heaps)
    glibc.mallopt(M_MMAP_MAX, 0)
    glibc.mallopt(M_TRIM_THRESHOLD, -1)


@contextlib.contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Return freed memory to the system before and after the body, which takes much for a moment.

    For a process that keeps it, as with `tune_malloc`, the peak is lower then: what is free in
    pieces, or in the heap of another thread, would not serve the body. Has no effect with another
    C library than glibc.
    """
    glibc = _glibc()
    try:
        if glibc is not None:
            glibc.malloc_trim(0)
        yield
    finally:
        if glibc is not None:
            glibc.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library of this process if it is glibc."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return ctypes.CDLL(None)
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device had too little memory.

    Too little for numpy or Python may be the fault of a damaged file that asks for too much.
    """
    return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


@contextlib.contextmanager
def with_oom_hint(advice: str) -> Iterator[None]:
    """Add advice to XLA's out-of-memory error."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"the device has too little memory ({reason}). {advice}") from error

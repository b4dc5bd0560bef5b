"""Stdin, stdout and stderr: closed from the start, not UTF-8, or gone while the program runs."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

GONE = (errno.EPIPE, errno.EIO)
"""What writing fails with when the reader of a pipe has gone, or the terminal."""


def open_streams() -> None:
    """Let those that were closed lead nowhere, and stdout be UTF-8 whatever the locale says."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # or a file of ours would get that number, and what others write to it
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the program runs
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """What the body says is said now; where nobody can hear it any more, the program goes on."""
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        if error.errno not in GONE:
            raise
        drop_unwritable()


def drop_unwritable() -> None:
    """Let stdout and stderr lead nowhere where they take nothing more.

    Python flushes them once more at its end, and would complain.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

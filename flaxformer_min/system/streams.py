"""Standard streams that are closed from the start, not UTF-8, or whose reader goes away."""

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Iterator

GONE = (errno.EPIPE, errno.EIO)
"""Errors of writing to a pipe or terminal that has gone away."""

CLOSED_PIPE = 141
"""The exit status after a closed pipe, as a shell reports it: 128 + SIGPIPE."""


def open_streams() -> None:
    """Open closed standard streams on the null device, and set stdout to UTF-8."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # otherwise the next opened file would become stdin, stdout or stderr
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - open until the program ends
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Flush what the body prints; continue if its reader is gone."""
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        if error.errno not in GONE:
            raise
        drop_unwritable()


def drop_unwritable() -> None:
    """Redirect stdout and stderr to the null device if they cannot be written.

    Otherwise Python would report an error when it flushes them at exit.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def visible(text: str) -> str:
    r"""Return the text with escapes in place of the control characters that move a cursor or more.

    >>> visible("one\r two\x1b[2J\n")
    'one\\r two\\x1b[2J\n'
    """
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], text)

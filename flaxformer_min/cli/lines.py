"""Text in and out, line by line, and how to stop in between."""

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from flaxformer_min.runtime.files import open_atomically
from flaxformer_min.runtime.signals import StopRequest
from flaxformer_min.runtime.streams import unheard

CHUNK = 1_024
"""Lines that are read, translated and written together, at most."""

BLOCK = 1 << 16
"""Bytes that are read at once, at most."""

LOOK = 0.5
"""Seconds after which a wait for text looks whether a signal has come.

One that comes just before the wait, or to another thread, does not end the wait itself.
"""


def warn_user(message: Any) -> None:
    """Tell it on stderr."""
    with unheard():
        print(f"flaxformer-min: warning: {message}", file=sys.stderr)


class Stop(StopRequest):
    """A signal ends at once what loads or waits; `patiently`, what is being done is finished.

    A second signal always ends at once. Either way it is a KeyboardInterrupt, so that what is half
    written is cleaned up.
    """

    patient = False
    came_twice = False

    def _handle(self, number, frame) -> None:
        self.came_twice = bool(self)
        self.signal_number = number
        if self.came_twice or not self.patient:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Do not interrupt what is inside, but what comes after it."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False
        if self:
            raise KeyboardInterrupt


class Lines:
    r"""Lines of an open file as they come, decoded; `count` of them were taken so far.

    Only \n ends a line; a \r before it and a BOM are dropped. Bytes that are no UTF-8 become U+FFFD
    with a warning. At a terminal it prompts.
    """

    def __init__(self, file: Any, name: str, warn: Callable[[str], None] = warn_user):
        """`name` is what to call it in warnings."""
        self.name, self.count = name, 0
        self.typed = os.isatty(file.fileno())
        self._descriptor, self._warn = file.fileno(), warn
        self._lines: list[bytes] = []
        self._rest, self._ended = bytearray(), False

    def take(self, most: int, wait: bool = False) -> list[str]:
        """The next lines, `most` at most: those that are there already, and at least one.

        Fewer, with `wait`, only at the end. None at all: this was the end.
        """
        while len(self._lines) < most and not self._ended:
            if self._lines and not wait and not select.select([self._descriptor], [], [], 0)[0]:
                break
            self._read_block()
        taken, self._lines = self._lines[:most], self._lines[most:]
        return [self._decode(line) for line in taken]

    def _read_block(self) -> None:
        if self.typed and not self._rest:
            print("> ", end="", file=sys.stderr, flush=True)
        while not select.select([self._descriptor], [], [], LOOK)[0]:
            pass
        block = os.read(self._descriptor, BLOCK)
        self._rest += block
        if b"\n" in block:
            *lines, self._rest = self._rest.split(b"\n")
            self._lines += lines
        if not block:
            self._ended = True
            self._lines += [self._rest] if self._rest else []

    def _decode(self, line: bytes) -> str:
        self.count += 1
        line = line.removesuffix(b"\r")
        if self.count == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            self._warn(
                f"{self.name}, line {self.count} is no UTF-8 from byte {error.start + 1} on; what "
                "cannot be read is replaced by U+FFFD."
            )
            return line.decode(errors="replace")


@contextlib.contextmanager
def open_lines(path: str | None, warn: Callable = warn_user) -> Iterator[Lines]:
    """The lines of a file, or of stdin."""
    if path is None:
        yield Lines(sys.stdin, "stdin", warn)
    else:
        with open(path, "rb", buffering=0) as file:
            yield Lines(file, path, warn)


def aligned(first: Lines, *others: Lines) -> Iterator[tuple[int, list[list[str]]]]:
    """The number of the next line, and the next lines of each file, the same number of each.

    Raises ValueError, with the number of lines of each, where one has more than another.
    """
    while True:
        number = first.count + 1
        lines = first.take(1 if first.typed else CHUNK)
        beside = [other.take(len(lines) or 1, wait=True) for other in others]
        if any(len(other) != len(lines) for other in beside):
            break
        if not lines:
            return
        yield number, [lines, *beside]
    counts = []
    for file in (first, *others):
        while file.take(CHUNK, wait=True):
            pass
        counts.append(f"{file.name} has {file.count:,}")
    raise ValueError(f"files must have the same number of lines; {' and '.join(counts)}.")


def read_aligned(*paths: str, warn: Callable = warn_user) -> Iterator[tuple[int, list[list[str]]]]:
    """`aligned` for files by name."""
    with contextlib.ExitStack() as stack:
        yield from aligned(*[stack.enter_context(open_lines(path, warn)) for path in paths])


def open_output(path: str | None) -> contextlib.AbstractContextManager[BinaryIO]:
    """Stdout, or a file that is there whole or not at all (a device or pipe is written to)."""
    return (
        contextlib.nullcontext(sys.stdout.buffer) if path is None else open_atomically(Path(path))
    )


def write(output: BinaryIO, lines: list[str]) -> None:
    """Write lines, now."""
    output.write("".join(f"{line}\n" for line in lines).encode())
    output.flush()


@contextlib.contextmanager
def progress(total: int | None, shown: bool = True) -> Iterator[Callable[[int], Any]]:
    """Counts sentences on stderr, where that is a terminal; gives what to call with each few."""
    if not (shown and sys.stderr.isatty()):
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit=" sentences", leave=False) as bar:
        yield bar.update

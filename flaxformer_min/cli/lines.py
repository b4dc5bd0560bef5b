"""Input and output of lines, and interruption between them."""

import contextlib
import errno
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from flaxformer_min.system.files import open_atomically
from flaxformer_min.system.signals import StopRequest
from flaxformer_min.system.streams import ignore_broken_pipe, visible
from flaxformer_min.system.text_files import SAMPLE, check_is_text, decode_line

CHUNK = 1_024
"""Most lines that are read, translated and written together."""

BLOCK = 1 << 16
"""Most bytes that are read at once."""

POLL_SECONDS = 0.5
"""How often waiting for input checks for signals.

A signal just before the wait, or to another thread, does not interrupt the wait itself.
"""


def warn_user(message: Any) -> None:
    """Print a warning on stderr."""
    with ignore_broken_pipe():
        print(f"flaxformer-min: warning: {visible(str(message))}", file=sys.stderr)


class Stop(StopRequest):
    """Raises KeyboardInterrupt at a signal: at once, or at the end of a `patiently` block.

    A second signal always interrupts at once. Partial files are removed by the exception.
    """

    patient = False
    came_twice = False

    def _handle(self, number, frame) -> None:
        if self() and number == signal.SIGHUP:  # a terminal that is closed may send it twice
            return
        self.came_twice = self()
        self.signal_number = number
        if self.came_twice or not self.patient:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Delay an interrupt until the end of the body."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False
        if self():
            raise KeyboardInterrupt


class Lines:
    r"""Decoded lines of an open file, as soon as they are available.

    Only \n ends a line; a \r before it and a BOM are dropped. Invalid UTF-8 becomes U+FFFD, with a
    warning; other formats are refused (see `check_is_text`). At a terminal it prompts. `count` is
    the number of lines taken so far.
    """

    def __init__(self, file: Any, name: str, warn: Callable[[str], None] = warn_user):
        """Take an open file, and its name in warnings."""
        self.name, self.count = name, 0
        self.typed = os.isatty(file.fileno())
        self._descriptor, self._warn = file.fileno(), warn
        self._lines: list[bytes] = []
        self._rest, self._ended, self._beginning = bytearray(), False, b""

    def take(self, most: int, wait: bool = False) -> list[str]:
        """Return at most `most` available lines, and at least one unless the file has ended.

        With `wait`, return exactly `most`, or fewer at the end of the file.
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
        while not select.select([self._descriptor], [], [], POLL_SECONDS)[0]:
            pass
        block = os.read(self._descriptor, BLOCK)
        self._rest += block
        if len(self._beginning) < SAMPLE and not self.count:
            self._beginning += block
        if b"\n" in block:
            *lines, self._rest = self._rest.split(b"\n")
            self._lines += lines
        if not block:
            self._ended = True
            self._lines += [self._rest] if self._rest else []

    def _decode(self, line: bytes) -> str:
        self.count += 1
        first = self.count == 1
        if first:
            check_is_text(self._beginning, self.name)
        try:
            return decode_line(line, first)
        except UnicodeDecodeError as error:
            self._warn(
                f"{self.name}, line {self.count} is not UTF-8 from byte {error.start + 1} on; "
                "invalid bytes are replaced by U+FFFD."
            )
            return decode_line(line, first, errors="replace")


@contextlib.contextmanager
def open_lines(path: str | None, warn: Callable = warn_user) -> Iterator[Lines]:
    """Open a file, or stdin if `path` is None."""
    if path is None:
        yield Lines(sys.stdin, "stdin", warn)
    else:
        with open(path, "rb", buffering=0) as file:
            yield Lines(file, path, warn)


def aligned(first: Lines, *others: Lines) -> Iterator[tuple[int, list[list[str]]]]:
    """Yield the number of the next line, and the same number of next lines of each file.

    Raises ValueError, with the number of lines of each file, if they differ.
    """
    while True:
        number = first.count + 1
        lines = first.take(1 if first.typed else CHUNK)
        aligned_lines = [other.take(len(lines) or 1, wait=True) for other in others]
        if any(len(other) != len(lines) for other in aligned_lines):
            break
        if not lines:
            return
        yield number, [lines, *aligned_lines]
    counts = []
    for file in (first, *others):
        while file.take(CHUNK, wait=True):
            pass
        counts.append(f"{file.name} has {file.count:,}")
    raise ValueError(f"files must have the same number of lines; {' and '.join(counts)}.")


def read_aligned(*paths: str, warn: Callable = warn_user) -> Iterator[tuple[int, list[list[str]]]]:
    """Yield `aligned` lines of files, given by name."""
    with contextlib.ExitStack() as stack:
        yield from aligned(*[stack.enter_context(open_lines(path, warn)) for path in paths])


def open_output(path: str | None) -> contextlib.AbstractContextManager[BinaryIO]:
    """Open stdout, or a file that is written atomically (see `open_atomically`)."""
    return (
        contextlib.nullcontext(sys.stdout.buffer) if path is None else open_atomically(Path(path))
    )


def write(output: BinaryIO, lines: list[str]) -> None:
    """Write lines, and flush them; at a terminal without control characters (see `visible`)."""
    if output.isatty():
        lines = [visible(line) for line in lines]
    rest = memoryview("".join(f"{line}\n" for line in lines).encode())
    while rest:  # stdout without a buffer, as with PYTHONUNBUFFERED, may take a part
        taken = output.write(rest)
        if taken is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        rest = rest[taken:]
    output.flush()


@contextlib.contextmanager
def progress(total: int | None, shown: bool = True) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar on stderr if that is a terminal; yield the function that advances it."""
    if not (shown and sys.stderr.isatty()):
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit=" sentences", leave=False) as bar:
        yield bar.update


def on_one_line(text: str) -> str:
    """Return the text without line breaks, which a model may spell in bytes."""
    return text.replace("\n", " ").replace("\r", " ")


def append_pairs(
    folder: Path, split: str, languages: Sequence[str], pairs: Iterable[tuple[str, str]]
) -> None:
    """Append pairs to `SPLIT.LANGUAGE` of both languages, the files of a corpus `text:DIR`."""
    with contextlib.ExitStack() as stack:
        paths = [folder / f"{split}.{language}" for language in languages]
        files = [stack.enter_context(path.open("ab")) for path in paths]
        for sides in pairs:
            for file, side in zip(files, sides, strict=True):
                file.write(f"{on_one_line(side)}\n".encode())


def json_number(value: float) -> float | None:
    """Return a rounded number, or None (null in JSON) for infinity and NaN."""
    return round(value, 6) if math.isfinite(value) else None

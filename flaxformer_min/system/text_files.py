r"""Text files: what they must not be, and how their lines are read.

A file of another format would otherwise be read as lines, of which only some are invalid UTF-8.
"""

import bz2
import codecs
import gzip
import io
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

MOST_EXPANSION = 100
"""Text shrinks to a third or a tenth; a file that becomes this many times larger is a bomb."""

SMALL = 1 << 24
"""Bytes that may always be decompressed."""

SAMPLE = 1 << 16
"""Bytes from the beginning of a file that its format is recognized by."""


class _Compression(NamedTuple):
    magic: bytes
    name: str
    tool: str
    open: Callable[[BinaryIO], BinaryIO]


def _open_zstd(file: BinaryIO) -> BinaryIO:
    try:
        from compression import zstd  # Python 3.14
    except ImportError:
        from backports import zstd
    return zstd.open(file, "rb")


COMPRESSIONS = {
    ".gz": _Compression(rb"\x1f\x8b", "gzip", "zcat", gzip.open),
    ".bz2": _Compression(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "bzip2", "bzcat", bz2.open),
    ".xz": _Compression(rb"\xfd7zXZ\0", "xz", "xzcat", lzma.open),
    ".zst": _Compression(
        rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "Zstandard", "zstdcat", _open_zstd
    ),
}
"""What text may be compressed with, by the ending of a file's name."""

FORMATS = {
    rb"PK(\x03\x04|\x05\x06)": ("a zip archive", "Unpack it first: unzip -p FILE > TEXT."),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", "Unpack it first: 7z x -so FILE > TEXT."),
    rb"\x04\x22\x4d\x18": ("compressed (lz4)", "Decompress it first: lz4cat FILE > TEXT."),
    rb"PAR1[\0-\x08\x0e-\x1f]": (
        "a table (parquet)",
        "Write its texts into a file, one a line, for example with pandas.",
    ),
    rb"ARROW1\0\0|\xff{4}.{3}\0\x10\0{3}": (
        "a table (Arrow)",
        "Write its texts into a file, one a line, for example with pandas.",
    ),
    rb"SQLite format 3\0": ("a database (SQLite)", "Write its texts into a file, one a line."),
    rb"%PDF-\d": ("a PDF", "Extract its text first: pdftotext FILE TEXT."),
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("a document of Office", "Save it as plain text first."),
    rb".{257}ustar": ("a tar archive", "Unpack it first: tar -xOf FILE > TEXT."),
}
"""Other formats: their beginning, their name in errors, and how to get text from them."""


def check_is_text(beginning: bytes, name: str, corpus: bool = False) -> None:
    r"""Raise ValueError if a file that begins so is not lines of UTF-8, which end in \n.

    beginning: up to SAMPLE bytes.
    corpus:    the reader takes compressed files, which it recognizes by their names.
    """
    for ending, (magic, kind, tool, _) in COMPRESSIONS.items():
        if re.match(magic, beginning, re.DOTALL):
            way_out = (
                f", or add {ending} to its name." if corpus else f" first: {tool} FILE > TEXT."
            )
            raise ValueError(
                f"text must not be compressed; {name} is compressed ({kind}). Decompress it"
                + way_out
            )
    for magic, (kind, way_out) in FORMATS.items():
        if re.match(magic, beginning, re.DOTALL):
            raise ValueError(f"text must be lines of UTF-8; {name} is {kind}. {way_out}")
    if encoding := _wide_encoding(beginning):
        raise ValueError(
            f"text must be UTF-8; {name} is {encoding}. Convert it: iconv -f {encoding.lower()} -t "
            "utf-8."
        )
    if len(re.findall(rb"\r(?!\n)", beginning.rstrip(b"\r"))) > beginning.count(b"\n"):
        raise ValueError(
            rf"the lines of a text must end in \n; those of {name} end in \r. Convert it: "
            r"tr '\r' '\n' < FILE > TEXT."
        )


def _wide_encoding(beginning: bytes) -> str | None:
    """Return which of UTF-16 and UTF-32 a file is in that begins so, None for neither."""
    marks = {
        b"\xff\xfe\0\0": "UTF-32",
        b"\0\0\xfe\xff": "UTF-32",
        b"\xff\xfe": "UTF-16",
        b"\xfe\xff": "UTF-16",
    }
    for mark, encoding in marks.items():
        if beginning.startswith(mark):
            return encoding
    if b"\0" not in beginning:  # which spaces and line breaks have in all of them
        return None
    try:  # NUL is allowed in UTF-8, but every other byte is one only where wide text is Latin
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
        if beginning.count(b"\0") < 0.4 * len(beginning):
            return None
    except UnicodeDecodeError:
        pass
    for encoding in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        try:
            text = beginning[: len(beginning) // 4 * 4].decode(encoding)
        except UnicodeDecodeError:
            continue
        if text and all(sign.isprintable() or sign.isspace() for sign in text):
            return encoding
    return None


def decompress(file: BinaryIO, path: Path, size: int) -> bytes | None:
    """Return the content of a compressed file of `size` bytes; None if its name has no such ending.

    Raises ValueError if it cannot be decompressed, or becomes many times larger than text would.
    """
    compression = COMPRESSIONS.get(path.suffix)
    if compression is None:
        return None
    limit = max(MOST_EXPANSION * size, SMALL)
    try:
        with compression.open(file) as opened, io.BytesIO() as content:
            while part := opened.read(SMALL):  # to read up to the limit would allocate it at once
                content.write(part)
                if content.tell() > limit:
                    raise ValueError(
                        f"{path} must be compressed text; it becomes more than {MOST_EXPANSION} "
                        "times as large. If it is, decompress it yourself."
                    )
            return content.getvalue()
    except ImportError as error:
        raise ValueError(
            f"{path} needs Python 3.14 or the package backports.zstd; there is neither. Install "
            "it, or decompress the file: zstdcat FILE > TEXT."
        ) from error
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # each library raises others
        raise ValueError(f"{path} must be a {compression.name} file; {error}.") from error


def decode_line(line: bytes, first: bool, errors: str = "strict") -> str:
    r"""Return a line of UTF-8 text without a carriage return, and without a BOM on the `first`.

    >>> decode_line(b"\xef\xbb\xbfone\r", first=True)
    'one'
    """
    if first:
        line = line.removeprefix(b"\xef\xbb\xbf")
    return line.removesuffix(b"\r").decode(errors=errors)

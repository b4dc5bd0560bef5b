"""Reading the files of a model from elsewhere: regular, of limited size, and JSON only if whole."""

import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST_TEXT = 100_000_000
"""Bytes of settings, of a vocabulary or of a SentencePiece model: a hundred times a usual one."""


def check_regular(path: Path, most: int | None = None) -> None:
    """Raise ValueError unless a path is a regular file of at most `most` bytes, or a link to one.

    A pipe would be waited for without an end, and a device may never end.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path.parent} must have a file {path.name}; {reason}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} must be a file; it is a folder, a pipe or a device.")
    if most is not None and status.st_size > most:
        raise ValueError(
            f"{path} must have at most {most:,} bytes; it has {status.st_size:,}. Is it another "
            "file?"
        )


def read_file(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """Return the bytes of a regular file. Raises ValueError as `check_regular` does."""
    check_regular(path, most)
    # Not blocking, in case that a pipe has taken the file's place in the meantime.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} must have at most {most:,} bytes; it has more.")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON. Raises ValueError for a name that comes twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise ValueError(f"{twice!r} comes twice")
        return content

    try:
        content = json.loads(read_file(path).decode("utf-8-sig"), object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError(f"{path} must hold complete JSON; it is nested too deeply.") from error
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} must hold complete JSON, each name once; {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(content).__name__}.")
    return content

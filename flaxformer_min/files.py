"""Files that are there whole or not at all."""

import os
import tempfile
from pathlib import Path

PARTIAL = ".partial"
"""How the name of a file ends that is still being written."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there whole or not at all, with the permissions of any new file.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder) / "a" / "b.txt", "done")
    ...     (Path(folder) / "a" / "b.txt").read_text()
    'done'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, scratch = tempfile.mkstemp(PARTIAL, f".{path.name}-", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o666 & ~_umask())
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def remove_partial(folder: Path) -> None:
    """Remove what processes that were killed left half written. Only for the one that may write."""
    for path in folder.glob(f".*{PARTIAL}"):
        path.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""Atomic writing of files and folders, and where they are."""

import contextlib
import errno
import glob
import grp
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""Suffix of files and folders that are still being written."""

MOST_NAME_BYTES = 200
"""Most bytes of a file's own name in the names of its unfinished versions."""

MOST_BYTES = 1 << 28
"""Largest settings, tokenizer, log or description of a run."""

ABANDONED = 24 * 3600
"""Seconds after the last change after which a partial folder counts as abandoned."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing that do not tell which file it was."""


@contextlib.contextmanager
def open_atomically(path: Path, cached: bool = False) -> Iterator[BinaryIO]:
    """Open a file for writing, which appears at `path` only if the body ends without an error.

    If `path` is a symbolic link, its target is replaced; a device or pipe is written to directly.
    A file that is replaced keeps its permissions, so that a private one stays private. Raises
    ValueError if the folder does not exist.

    cached: the folder belongs to a cache, and whatever is unfinished there may be removed.
    """
    if path.exists() and not path.is_file():
        with naming(path), path.open("wb") as file:
            yield file
        return
    path = path.resolve()
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r} to write in; create it first.")
    _remove_abandoned(path, cached)
    handle, scratch = tempfile.mkstemp(PARTIAL, _scratch_prefix(path), path.parent)
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, _permissions(path))
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes, cached: bool = False) -> None:
    """Write a file atomically, and create its folder if necessary; `cached` as above.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder) / "a" / "b.txt", "done")
    ...     (Path(folder) / "a" / "b.txt").read_text()
    'done'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomically(path, cached) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def folder_atomically(path: Path, cached: bool = False) -> Iterator[Path]:
    """Create an empty folder, which becomes `path` only if the body ends without an error.

    A folder that exists must be empty: it is filled, because a process may be in it, or a volume
    mounted on it. What killed processes left unfinished is removed after a day.

    cached: the folder above belongs to a cache. Another process that wrote `path` in the meantime
            wrote the same, which is kept, and whatever is unfinished there may be removed.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path, cached)
    scratch = _scratch_folder(path, cached)
    try:
        with naming(path):
            yield scratch
            for file in (path for path in scratch.iterdir() if path.is_file()):
                with file.open("rb+") as opened:
                    os.fsync(opened.fileno())
        os.chmod(scratch, 0o777 & ~_umask())
        if path.is_dir() and not cached:
            _fill(path, scratch)
            return
        try:
            os.rename(scratch, path)
        except OSError:
            if not cached or not path.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Name what was to be written in the error of a full disk, quota or largest file."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            error.filename = str(path)
        raise


def read_file(path: Path) -> bytes:
    """Return the content of a regular file of a run.

    Raises OSError for a pipe or device, which could be read forever, and for a file of more than
    `MOST_BYTES`.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # or a pipe would wait
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            rule = f"it must be a regular file of at most {MOST_BYTES >> 20} MB"
            raise OSError(errno.EINVAL, rule, str(path))
        return file.read(MOST_BYTES + 1)


def _scratch_folder(path: Path, cached: bool) -> Path:
    """Create the folder that becomes `path`, beside it."""
    try:
        return Path(tempfile.mkdtemp(PARTIAL, _scratch_prefix(path), path.parent))
    except OSError:  # a folder of our own, such as a mounted volume, may be in one that is not
        if cached or not path.is_dir():
            raise
        return Path(tempfile.mkdtemp(PARTIAL, _scratch_prefix(path), path))


def _fill(folder: Path, scratch: Path) -> None:
    """Move everything from `scratch`, which may be in it, to an empty folder."""
    if any(each != scratch for each in folder.iterdir()):
        raise ValueError(f"{folder} must be empty; it is not any more. Choose another folder.")
    for file in scratch.iterdir():
        shutil.move(file, folder / file.name)


def _remove_abandoned(path: Path, cached: bool) -> None:
    """Remove what killed processes left of `path` a day ago or earlier; in a cache, of anything."""
    prefix = "." if cached else _scratch_prefix(path)
    for left in path.parent.glob(f"{glob.escape(prefix)}*{PARTIAL}"):
        with contextlib.suppress(OSError):  # its process has just finished it, or another's
            # A folder itself changes only when files are created in it, not when they grow.
            changed = max(each.stat().st_mtime for each in (left, *left.glob("*")))
            if time.time() - changed > ABANDONED:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def remove_partial(path: Path) -> None:
    """Remove unfinished versions of a file. Only for a process with exclusive access to it."""
    for partial in path.parent.glob(f"{glob.escape(_scratch_prefix(path))}*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def _scratch_prefix(path: Path) -> str:
    """Return how the names of unfinished versions of a file or folder begin.

    A long name is cut, between characters, because names of files have at most 255 bytes.
    """
    name = path.name
    while len(os.fsencode(name)) > MOST_NAME_BYTES:
        name = name[:-1]
    return f".{name}-"


def _permissions(path: Path) -> int:
    """Return the permissions of a file, or those of a new one."""
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        return 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def cache_folder(cache_dir: str | Path = "") -> Path:
    """Return the folder for cached data: `cache_dir`, or one in the user's cache folder.

    Raises ValueError if there is none, or others can write it (see `check_private`).

    >>> cache_folder("/data/cache").as_posix()
    '/data/cache'
    """
    try:
        if cache_dir:
            folder = Path(cache_dir).expanduser()
        else:
            given = os.environ.get("XDG_CACHE_HOME", "")  # a relative one must be ignored
            caches = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
            folder = caches / "flaxformer_min"
    except RuntimeError as error:  # neither HOME nor an entry of passwd
        raise ValueError(
            "a cache needs a folder, and this user has no home. Set XDG_CACHE_HOME, or "
            "data.cache_dir where a command has it."
        ) from error
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Raise ValueError if another user could put files into a folder, or replace it, as ssh does.

    A folder that does not exist yet is created in the nearest one that does. A folder with the
    sticky bit, such as /tmp, may be above.
    """
    path = folder.absolute()
    for each in (path, *path.parents, *path.resolve().parents):
        try:
            status = each.stat()
        except OSError:
            continue
        writable = status.st_mode & stat.S_IWOTH or (
            status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
        )
        is_sticky = status.st_mode & stat.S_ISVTX and each != path
        if status.st_uid not in (os.getuid(), 0) or (writable and not is_sticky):
            raise ValueError(
                f"a cache must be in folders that only this user can write; others can write {each}"
                ". Choose another with --data.cache-dir or XDG_CACHE_HOME, or chmod go-w."
            )


def _is_own_group(group: int) -> bool:
    """Return whether a group is this user's own, without other members, as many systems have it."""
    try:
        entry, user = grp.getgrgid(group), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return group == user.pw_gid and entry.gr_name == user.pw_name and not entry.gr_mem

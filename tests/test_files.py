"""Folders appear whole, where they were asked for, and nothing else is touched."""

import errno
import os
import resource
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from flaxformer_min.system.files import (
    ABANDONED,
    folder_atomically,
    open_atomically,
    remove_partial,
    write_atomically,
)


def write(path, **options):
    with folder_atomically(path, **options) as folder:
        (folder / "inside").mkdir()
        (folder / "inside" / "file").write_text("whole")


@pytest.mark.parametrize("name", [".", "link", "plain"])
def test_an_empty_folder_is_filled_not_replaced(tmp_path, monkeypatch, name):
    """A process may be in it, or a volume mounted on it; a link leads to it."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "link").symlink_to("plain")
    before = (tmp_path / "plain").stat().st_ino
    monkeypatch.chdir(tmp_path / "plain" if name == "." else tmp_path)
    write(Path(name))
    assert (tmp_path / "plain" / "inside" / "file").read_text() == "whole"
    assert (tmp_path / "plain").stat().st_ino == before
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "plain"]


def test_an_empty_folder_is_filled_where_the_one_above_belongs_to_others(tmp_path, monkeypatch):
    made = tempfile.mkdtemp

    def mkdtemp(suffix, prefix, folder):
        if folder == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return made(suffix, prefix, folder)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    (tmp_path / "volume").mkdir()
    write(tmp_path / "volume")
    assert os.listdir(tmp_path / "volume") == ["inside"]
    for cached in (False, True):
        with pytest.raises(PermissionError, match=str(tmp_path)):
            write(tmp_path / "new", cached=cached)


def write_beside_another(out, **options):
    with folder_atomically(out, **options) as folder:
        (folder / "file").write_text("ours")
        out.mkdir()
        (out / "file").write_text("theirs")


def test_a_folder_that_another_process_has_filled_is_kept_and_told(tmp_path):
    with pytest.raises(ValueError, match="out must be empty; it is not any more. Choose another"):
        write_beside_another(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "theirs"


def test_in_a_cache_another_process_wrote_the_same(tmp_path):
    write_beside_another(tmp_path / "out", cached=True)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(("cached", "left"), [(False, {"new", ".thesis.partial"}), (True, {"new"})])
@pytest.mark.parametrize(
    ("leave", "write_new"),
    [(Path.touch, partial(write_atomically, content="whole")), (Path.mkdir, write)],
    ids=["file", "folder"],
)
def test_only_what_a_cache_abandoned_is_removed_whatever_its_name(
    tmp_path, leave, write_new, cached, left
):
    for name in (".thesis.partial", ".new-abc.partial"):
        leave(tmp_path / name)
        os.utime(tmp_path / name, (time.time() - 2 * ABANDONED,) * 2)
    write_new(tmp_path / "new", cached=cached)
    assert set(os.listdir(tmp_path)) == left


def test_a_folder_whose_files_still_grow_is_not_abandoned(tmp_path):
    growing = tmp_path / ".other-abc.partial"
    growing.mkdir()
    (growing / "source.bin").touch()
    os.utime(growing, (time.time() - 2 * ABANDONED,) * 2)
    write(tmp_path / "new", cached=True)
    assert growing.exists()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path, mode):
    """A private file stays private, also behind a link; a new one is as the umask wants it."""
    write_atomically(tmp_path / "own", "old")
    (tmp_path / "own").chmod(mode)
    (tmp_path / "link").symlink_to("own")
    for name in ("own", "link"):
        write_atomically(tmp_path / name, f"new {name}")
        assert (tmp_path / "own").stat().st_mode & 0o777 == mode
    assert (tmp_path / "own").read_text() == "new link"
    (tmp_path / "plain").touch()
    write_atomically(tmp_path / "new", "")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("name", ["번역" * 42, "a" + "번역" * 42, "n" * 255], ids=len)
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["file", "folder"])
def test_a_name_as_long_as_a_name_may_be_can_be_written(tmp_path, name, make):
    """Those of its unfinished versions are longer, so they begin with a part of it."""
    write_new = write if make is Path.mkdir else partial(write_atomically, content="whole")
    with pytest.raises(KeyError), open_atomically(tmp_path / name):
        [left] = os.listdir(os.fsencode(tmp_path))
        assert left.decode().startswith(f".{name[:50]}") and left.endswith(b".partial")
        abandoned = tmp_path / f"{left.decode().removesuffix('.partial')}x.partial"
        make(abandoned)
        raise KeyError
    assert os.listdir(tmp_path) == [abandoned.name]
    os.utime(abandoned, (time.time() - 2 * ABANDONED,) * 2)
    write_new(tmp_path / name)
    assert os.listdir(tmp_path) == [name]


def test_unfinished_versions_are_those_of_this_name_whatever_its_signs(tmp_path):
    """A name is no pattern, in which [ab] is a or b."""
    for name in (".[ab]-x.partial", ".a-x.partial", ".b-x.partial"):
        (tmp_path / name).touch()
    remove_partial(tmp_path / "[ab]")
    assert set(os.listdir(tmp_path)) == {".a-x.partial", ".b-x.partial"}


@pytest.fixture
def files_of_a_kilobyte():
    """No file of this process may be larger, which is told as a full disk is: without its name."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_what_does_not_fit_on_the_disk_is_named(tmp_path, files_of_a_kilobyte):
    """By the name that the user gave, not by that of the unfinished version."""
    with (
        pytest.raises(OSError, match=f"'{tmp_path}/out'$"),
        folder_atomically(tmp_path / "out") as folder,
        (folder / "model.bin").open("wb") as file,
    ):
        file.write(bytes(2000))
    with (
        pytest.raises(OSError, match=f"'{tmp_path}/text'$"),
        open_atomically(tmp_path / "text") as file,
    ):
        file.write(bytes(2000))
    assert not [*tmp_path.iterdir()]

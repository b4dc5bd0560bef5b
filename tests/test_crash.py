"""A process that is killed leaves a folder from which the next one continues without a trace."""

import errno
import shutil

import pytest
from training_jobs import shared_programs

from benchmarks import crash
from flaxformer_min.cli.train import main
from flaxformer_min.storage import run_folder
from flaxformer_min.storage.run_folder import RunFolder


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills, seed",
    [
        pytest.param(1, 247, id="one, after a checkpoint"),
        pytest.param(3, 1, id="three, at least one while a checkpoint is written"),
    ],
)
def test_kills_leave_no_trace(tmp_path, capfd, kills, seed):
    """Kills of real processes; the run that they are compared with is trained in this one."""
    config = crash.write_job(tmp_path, rounds=kills, save_every=10)
    uncut, crashed = tmp_path / "uncut", tmp_path / "crashed"
    rounds = list(crash.crash(config, crashed, rounds=kills, seed=seed))
    with shared_programs():
        for workdir in (uncut, crashed):
            assert main([str(config), "--workdir", str(workdir)]) == 0
    assert [each.problem for each in rounds] == [""] * kills
    assert rounds[-1].step is not None
    assert kills == 1 or any(each.saving for each in rounds)
    assert crash.differences(uncut, crashed) == []
    assert crash.leftovers(crashed) == []
    assert "warning" not in capfd.readouterr().err


def test_a_file_system_without_locks_is_told_from_another_process(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "flock", flock)
    with pytest.raises(OSError, match="can be locked; .*: No locks available"):
        with RunFolder(tmp_path).locked():
            pass


def test_what_a_kill_leaves_of_a_file_is_removed(tmp_path):
    run = RunFolder(tmp_path)
    (tmp_path / ".config.json-x7.partial").write_text('{"format_ver')
    others = [".mine", ".test.de-x7.partial"]  # the latter of a translator that is still writing
    for name in others:
        (tmp_path / name).write_text("of somebody else")
    with run.locked():
        assert sorted(path.name for path in tmp_path.iterdir()) == [*others, "lock"]


def test_an_error_is_told_though_the_new_folder_is_gone(tmp_path):
    with (
        pytest.raises(RuntimeError, match="^of the training$"),
        RunFolder(tmp_path / "run").locked(),
    ):
        shutil.rmtree(tmp_path / "run")
        raise RuntimeError("of the training")

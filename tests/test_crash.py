"""A process that is killed leaves a folder from which the next one goes on without a trace."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import train
from benchmarks import crash


def test_three_kills_leave_no_trace(tmp_path):
    """Kills of real processes; what is compared with them is trained in this one."""
    config = crash.write_job(tmp_path, rounds=3, save_every=10)
    uncut, crashed = tmp_path / "uncut", tmp_path / "crashed"
    rounds = list(crash.crash(config, crashed, rounds=3, seed=1))
    for workdir in (uncut, crashed):
        assert train.main([str(config), "--workdir", str(workdir)]) == 0
    assert [each.problem for each in rounds] == [""] * 3
    assert any(each.saving for each in rounds)
    assert crash.differences(uncut, crashed) == []
    assert crash.leftovers(crashed) == []


def test_what_a_kill_leaves_of_a_file_is_removed(tmp_path):
    """A killed writer cannot remove its scratch file; the next process that holds the run does."""
    run = train.RunFolder(tmp_path)
    (tmp_path / ".config.json-x7.partial").write_text('{"format_ver')
    others = [".mine", ".test.de-x7.partial"]  # the latter of a translator that is still writing
    for name in others:
        (tmp_path / name).write_text("of somebody else")
    with run.locked():
        assert sorted(path.name for path in tmp_path.iterdir()) == [*others, "lock"]

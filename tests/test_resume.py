"""An interrupted run continues as if there had been no interruption, or says why it cannot."""

import functools
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
from training_jobs import changed, small_config, stopped_after, watched_steps

from benchmarks.crash import differences, leftovers, newest
from flaxformer_min.cli.train import main
from flaxformer_min.experiment.run import train
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("programs_are_shared")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return small_config(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def uncut(config, tmp_path_factory):
    """The folder of a run that was never interrupted."""
    return train(config, tmp_path_factory.mktemp("uncut") / "run").run.path


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "flaxformer_min")
    return caplog


@pytest.mark.parametrize(
    "batches, cuts, settings, workers",
    [
        pytest.param(4, (1, 2, 3, 4, 7), {}, 0, id="post-norm"),
        pytest.param(2, (2, 5), {"model": {"norm": "pre"}, "gradient_accumulation": 2}, 0,
         id="pre-norm, accumulating", marks=pytest.mark.slow),
        pytest.param(4, (3, 5), {}, 1, id="worker processes", marks=pytest.mark.slow),
        pytest.param(4, (4, 7, 8),
         {"ema_decay": 0.9, "r_drop": 1.0, "cooldown_steps": 5, "average_checkpoints": 2}, 0,
         id="all that regularises", marks=pytest.mark.slow),
        pytest.param(4, (4, 7), {"simcut": 3.0}, 0, id="simcut", marks=pytest.mark.slow),
        pytest.param(4, (4, 7), {"optimizer": "schedule_free"}, 0, id="schedule-free",
         marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_run_cut_anywhere_equals_the_uncut_run_bit_for_bit(
    request, tmp_path, log, batches, cuts, settings, workers
):
    """Parameters, optimizer, key, position in the text, and all metrics but the clock's.

    Cuts lie within an epoch and at its end; right before, at and right after a save, which comes
    every 3 steps; within the 4 steps of a line of metrics. Dropout is on.
    """
    config, cut = small_config(tmp_path, **settings), tmp_path / "cut"
    if settings:
        uncut = train(config, tmp_path / "uncut").run.path
    else:
        uncut = request.getfixturevalue("uncut")
    config = changed(config, "data", workers=workers)
    for step in cuts:
        stopped_after(config, cut, step)
    assert f"an epoch: {batches} batches" in log.text
    assert not train(config, cut).stopped
    assert differences(uncut, cut) == []
    restored = [RunFolder(folder).params() for folder in (uncut, cut)]
    jax.tree.map(np.testing.assert_array_equal, *restored)


def test_a_run_that_ended_is_lengthened_as_if_it_had_been_longer_from_the_start(
    tmp_path, config, uncut
):
    """All but the validation at the first end, which the longer run lacks: a cost, and a line."""
    short = tmp_path / "short"
    assert train(changed(config, "training", steps=5), short).step == 5
    assert train(config, short).step == 9
    found = differences(uncut, short)
    known = ("metrics:", "the number of metrics: 4 and 5", "the description of step 9")
    assert all(text.startswith(known) for text in found)
    descriptions = [newest(folder)[2] for folder in (uncut, short)]
    costs, more_costs = (each["progress"].pop("costs") for each in descriptions)
    assert costs == more_costs[1:]
    assert descriptions[0] == descriptions[1]
    losses, other_losses = (
        [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
        for folder in (uncut, short)
    )
    assert losses == other_losses and len(losses) == 2


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_devices(tmp_path):
    """The same rows, and equal to rounding, from one device to two and from two to one."""
    # This epsilon hides noise, which Adam would amplify.
    config = small_config(tmp_path, model={"dropout": 0.0}, adam_epsilon=1e-3)
    first = changed(config, "training", steps=5)
    uncut, growing, shrinking = (tmp_path / name for name in ("uncut", "growing", "shrinking"))
    train(first, shrinking)
    on_one_device = (
        "import jax\n"
        "from flaxformer_min.config import *\n"
        "from flaxformer_min.experiment.run import train\n"
        "assert jax.device_count() == 1\n"
        f"train({first!r}, {str(growing)!r})\n"
        f"train({config!r}, {str(shrinking)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", on_one_device],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for workdir in (uncut, growing):
        train(config, workdir)
    _, expected, description = newest(uncut)
    for workdir in (growing, shrinking):
        _, found, of_found = newest(workdir)
        assert of_found["batches"] == description["batches"]
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
            (found["params"], found["opt_state"]),
            (expected["params"], expected["opt_state"]),
        )


@pytest.fixture(params=["file size", "disk"])
def limited(request, tmp_path):
    """A folder, how to leave no room for a checkpoint in it, and how to make room again."""
    folder = tmp_path / "limited"
    folder.mkdir()
    if request.param == "file size":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE)
        yield folder, lambda: limit((20_000, hard)), lambda: limit((soft, hard))
        limit((soft, hard))
        return

    def mount(*options):
        return subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode

    def fill():
        space = os.statvfs(folder)
        used = (space.f_blocks - space.f_bfree) * space.f_frsize
        assert mount("-o", f"remount,size={used + 100_000}") == 0

    if not shutil.which("mount") or mount("-t", "tmpfs", "-o", "size=16m", "tmpfs"):
        pytest.skip("only root can mount a disk of 16 MB")
    yield folder, fill, lambda: mount("-o", "remount,size=16m")
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


# TensorStore may report a write that failed when nothing waits for it any more.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_a_full_disk_stops_training_and_costs_only_what_was_not_saved(
    config, uncut, tmp_path, limited, capsys, caplog, failed_transfers
):
    """A file system without room, and one that refuses to write a large file."""
    folder, fill, make_room = limited
    often = changed(config, "training", save_every=2)
    stopped_after(often, folder / "run", 3)
    arguments = [str(folder / "run" / "config.json"), "--training.steps", "9"]
    capsys.readouterr()
    fill()
    try:
        status, error = main(arguments, "train.py"), capsys.readouterr().err
    finally:
        make_room()
    assert status == 2
    assert re.fullmatch(
        "train.py: error: a checkpoint must be written completely; in .*/limited/run/checkpoints: "
        "(No space left on device|File too large). Earlier ones are intact. Free some space, and "
        "start again to continue from the newest.\n",
        error,
    )
    assert newest(folder / "run")[0] == 3
    train(often, folder / "run")
    assert differences(uncut, folder / "run") == []
    assert leftovers(folder / "run") == []
    caplog.clear()  # a logged error keeps failed transfers alive, which would end in another test


def test_a_finished_run_trains_no_further_and_is_not_saved_again(config, tmp_path, log):
    short, taken = changed(config, "training", steps=2), []
    with watched_steps(before=lambda state: taken.append(int(state.step))):
        first = train(short, tmp_path / "run")
        before = newest(tmp_path / "run")[2]
        again = train(short, tmp_path / "run")
    assert taken == [0, 1]
    assert newest(tmp_path / "run")[2] == before
    assert (again.step, again.validation) == (2, first.validation)
    assert set(again.validation) == {"loss", "perplexity", "accuracy"}
    assert "Continuing from step 2." in log.messages

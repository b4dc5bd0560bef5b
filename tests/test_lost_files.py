"""Commands on a run whose newest checkpoint lost a folder: one warning, and the one before it."""

import shutil

import pytest
from tiny_run import make_tiny_run
from training_jobs import small_config

from flaxformer_min import cli
from flaxformer_min.cli.train import main as train_command
from flaxformer_min.experiment.run import train
from flaxformer_min.storage.run_folder import RunFolder


def check_warnings(capfd, step):
    """That one line on stderr names the damaged checkpoint; `score` adds its perplexity there."""
    line, *others = capfd.readouterr().err.splitlines()
    assert all(each.startswith("2 pairs, ") for each in others)
    assert f" warning: checkpoint {step} in " in line and " is damaged (" in line


@pytest.mark.parametrize("command", ["translate", "evaluate", "score"])
def test_a_command_falls_back_with_one_warning(tmp_path, capfd, command):
    """And without a traceback of what TensorStore still reads."""
    run = make_tiny_run(tmp_path / "run", steps=(1, 2))
    shutil.rmtree(run / "checkpoints" / "2" / "state" / "d")
    lines = tmp_path / "lines"
    lines.write_text("the red house\nnine doors\n")
    options = {
        "translate": ["--input", lines, "--beam-size", "1"],
        "evaluate": ["--source", lines, "--reference", lines, "--beam-size", "1"],
        "score": [lines, lines],
    }
    assert cli.main([command, str(run), *map(str, options[command])]) == 0
    check_warnings(capfd, 2)


@pytest.mark.usefixtures("programs_are_shared")
def test_a_resumed_training_falls_back_with_one_warning(tmp_path, capfd):
    """It takes the steps behind the intact checkpoint again."""
    run = tmp_path / "run"
    train(small_config(tmp_path, steps=6), run)
    shutil.rmtree(run / "checkpoints" / "6" / "state" / "d")
    assert train_command([str(run / "config.json")]) == 0
    check_warnings(capfd, 6)
    assert RunFolder(run).params().step == 6

"""What a hostile or unlucky user does to the program, and what it does then."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from tiny_run import make_tiny_run
from training_jobs import small_config, write_config

from flaxformer_min import cli
from flaxformer_min.experiment.run import train
from flaxformer_min.runs.folder import RunFolder
from flaxformer_min.runtime.signals import InterruptOnSignal, StopRequest
from flaxformer_min.training.metrics import MetricsLog, Window, read_metrics

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of random parameters, to translate with; not to be changed."""
    return make_tiny_run(tmp_path_factory.mktemp("tiny") / "run")


def contents(folder):
    """Every file below a folder and what it holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# A mistyped --workdir.


@pytest.mark.parametrize(
    "files",
    [
        {"lock": "my own notes"},
        {"lock": "1" * 30},
        {"lock": "my own notes", "thesis.tex": "years of work"},
        {"lock": "17\n", "thesis.tex": "years of work"},
        {"lock": "my own notes", "config.json": '{"model_type": "bert"}'},
    ],
)
def test_a_mistyped_workdir_leaves_every_file_as_it_was(tmp_path, capsys, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    assert cli.main(["train", "--workdir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("flaxformer-min train: error: ")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "config.json", "checkpoints"])
def test_training_follows_no_link_out_of_the_run_folder(tmp_path, capsys, name):
    (tmp_path / "mine").write_text("17\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    assert cli.main(["train", "--workdir", str(tmp_path / "run")]) == 2
    assert f"{name} is a link to" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "17\n"


def test_a_lock_that_is_no_file_is_refused_at_once(tmp_path):
    """A named pipe would be waited for without end."""
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(ValueError, match="must be a run's own lock file"):
        with RunFolder(tmp_path).locked():
            pass


def test_the_lock_of_an_ended_process_is_taken_over(tmp_path):
    (tmp_path / "lock").write_text("4194303\n")
    with RunFolder(tmp_path).locked():
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


# A terminal that is closed.


def test_a_closed_terminal_requests_a_stop_once_and_for_all():
    """The system sends SIGHUP, and the shell again: the second must not end the process."""
    with StopRequest() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop() and stop.status == 128 + signal.SIGHUP


def test_a_closed_terminal_interrupts_only_once():
    with InterruptOnSignal() as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.status == 129


def test_under_nohup_a_closed_terminal_changes_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_training_saves_when_its_terminal_is_closed(tmp_path):
    """A terminal of its own, controlling: only such a one sends SIGHUP when it is closed."""
    workdir = tmp_path / "run"
    names = ("steps", "save-every", "validate-every")
    forever = [word for name in names for word in (f"--training.{name}", "100000")]
    command = [sys.executable, "train.py", write_config(tmp_path), "--workdir", str(workdir)]
    controlling = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", controlling, *command, *forever],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        deadline = time.monotonic() + 120
        while len(read_metrics(workdir / "metrics.jsonl")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.close(ours)
        status = process.wait(timeout=60)
    assert status == 128 + signal.SIGHUP
    saved = [int(path.name) for path in (workdir / "checkpoints").iterdir()]
    assert max(saved) >= 8 and max(saved) % 100_000


# Metrics of steps that learned nothing.


def strict_json(line):
    """A record of metrics, which must be JSON as its standard says: without NaN and Infinity."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


NOTHING = dict.fromkeys(("loss", "accuracy", "gradient_norm"), float("nan"))
COUNTS = {"positions": 8.0, "real": 6.0, "tokens": 3.0, "learning_rate": 0.1}


def test_a_window_of_skipped_steps_has_no_loss_instead_of_a_perfect_one():
    window = Window()
    for _ in range(2):
        window.add({**NOTHING, **COUNTS, "skipped": 1.0})
    line = window.close()
    assert [line[name] for name in NOTHING] == [None] * 3
    assert line["skipped"] == 2 and line["padding"] == 0.25
    window.add({**dict.fromkeys(NOTHING, 0.5), **COUNTS, "skipped": 0.0})
    window.add({**NOTHING, **COUNTS, "skipped": 1.0})
    assert window.close()["loss"] == 0.5


def test_metrics_are_json_whatever_was_measured(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "events", 0)
    log.write(1, {"validation_loss": float("nan"), "perplexity": float("inf"), "bleu": 2.5})
    log.write(2, {"loss": None})
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert strict_json(lines[0]) == {
        "step": 1,
        "validation_loss": None,
        "perplexity": None,
        "bleu": 2.5,
    }
    assert strict_json(lines[1]) == {"step": 2, "loss": None}


def test_nan_in_the_metrics_of_an_earlier_version_is_null_once_the_run_continues(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "events", 1).close()
    assert strict_json((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None}


@pytest.mark.slow
def test_steps_that_learn_nothing_are_told_as_such(tmp_path, caplog):
    """A loss of infinity: every step is skipped, and the run ends with what it began with."""
    config = small_config(tmp_path, steps=4, log_every=2, validate_every=4)
    with caplog.at_level(logging.INFO, "flaxformer_min"):
        train(config, tmp_path / "run", token_loss=lambda logits, label: logits[0] * jnp.inf)
    told = [text for text in caplog.messages if text.startswith("step ")]
    assert len(told) == 2 and all("nothing learned" in text for text in told)
    assert not any("loss 0.000" in text for text in told)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        strict_json(line)

"""`train.py`, which is also `flaxformer-min train`: settings, output, signals and exit status."""

import errno
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
from training_jobs import write_config

from benchmarks.crash import newest
from flaxformer_min import cli
from flaxformer_min.cli.train import main, read_arguments
from flaxformer_min.config import Config
from flaxformer_min.experiment import run
from flaxformer_min.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("programs_are_shared")


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


def train(config, workdir, *overrides):
    return main([config, "--workdir", str(workdir), *overrides], "train.py")


def test_progress_and_how_to_translate_are_printed(config, tmp_path, capsys):
    assert train(config, tmp_path / "run") == 0
    printed, errors = capsys.readouterr()
    for text in ("100 pairs read", "M parameters", "step 4/9", "validation: loss", "No test score"):
        assert text in printed
    *_, example = printed.rstrip().splitlines()
    assert re.fullmatch(rf"  echo '[a-z ]+' \| flaxformer-min translate {tmp_path}/run", example)
    assert errors == ""
    assert newest(tmp_path / "run")[0] == 9


def test_the_command_of_the_package_is_the_same_program(tmp_path, capsys):
    assert cli.main(["train", str(tmp_path / "none.py")]) == 2
    assert capsys.readouterr().err.startswith("flaxformer-min train: error: a config is a Python")


def test_a_run_goes_on_by_the_settings_it_keeps(config, tmp_path, capsys):
    """`train.py RUN/config.json` is that run, wherever its folder and its text are now."""
    begin = ["train", config, "--workdir", str(tmp_path / "first"), "--training.steps", "1"]
    assert cli.main(begin) == 0
    os.rename(tmp_path / "first", tmp_path / "moved")
    os.rename(tmp_path / "corpus", tmp_path / "text")
    kept = tmp_path / "moved" / "config.json"
    assert read_arguments([str(kept)], "train.py").workdir == tmp_path / "moved"
    elsewhere = ["--training.steps", "2", "--data.corpus", f"text:{tmp_path}/text"]
    assert train(config, tmp_path / "moved", *elsewhere) == 2
    assert re.search(rf"text .*{re.escape(str(kept))}", capsys.readouterr().err)
    kept.write_text(kept.read_text().replace(f"{tmp_path}/corpus", f"{tmp_path}/text"))
    assert main([str(kept), "--training.steps", "2"], "train.py") == 0
    printed, errors = capsys.readouterr()
    assert "Continuing from step 1." in printed and errors == ""
    assert newest(tmp_path / "moved")[0] == 2


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--model.d-fff", "3"], "--model.d-ff"),
        (["--training.steps", "many"], "many"),
        (["--model.norm", "middle"], "post"),
        (["--profile", "-1"], "--profile must be at least 0 steps; got -1"),
        (["--model.dropout", "1.0"], "model.dropout must be less than 1; got 1.0"),
        (["--data.rows-per-batch", "5"], "5 rows, 2 devices"),
        (["--data.corpus", "text:/nowhere"], "/nowhere"),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence(config, tmp_path, capsys, arguments, expected):
    """An unknown one is told with the known ones that are like it."""
    try:
        status = train(config, tmp_path / "run", *arguments)
    except SystemExit as ended:  # tyro's own, in a box
        status = ended.code
    error = " ".join("".join(capsys.readouterr()).replace("│", " ").split())
    assert status == 2
    assert expected in error
    assert "Traceback" not in error


def test_a_training_that_is_refused_leaves_no_folder(config, tmp_path):
    assert train(config, tmp_path / "run", "--data.corpus", "text:/nowhere") == 2
    assert not (tmp_path / "run").exists()


UNKNOWN = "from flaxformer_min.config import *\nconfig = Config(DataConfig(rows_per_bach=16))"


@pytest.mark.parametrize(
    "text, message",
    [
        (None, r"`config = Config\(...\)`"),
        ("x = 1", r"`config = Config\(...\)`"),
        (UNKNOWN, "config.py must be a Python file .*; TypeError.*'rows_per_bach'.*--help"),
        ("config = ", "config.py must be a Python file .*SyntaxError"),
        ("import no_such_module", "config.py must be a Python file .*no_such_module"),
    ],
)
def test_a_config_file_that_makes_no_config_is_reported_in_a_sentence(
    tmp_path, capsys, text, message
):
    if text:
        (tmp_path / "config.py").write_text(text + "\n")
    assert main([str(tmp_path / "config.py")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and "Traceback" not in error


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = "".join(capsys.readouterr())
    for group in ("data", "model", "training", "decoding"):
        for name in vars(getattr(Config(), group)):
            assert f"--{group}.{name.replace('_', '-')}" in text
    assert "--profile INT" in text


def test_help_whose_reader_goes_is_no_error(monkeypatch, capsys):
    def show(*_):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr("flaxformer_min.cli.train.read_arguments", show)
    assert main(["--help"]) == 141
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_below_the_output_is_named(tmp_path, config, monkeypatch, capsys):
    def write(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys.stdout, "write", write)
    assert main([str(config), "--workdir", str(tmp_path / "run")]) == 2
    assert 'No space left on device: "the program\'s output"' in capsys.readouterr().err


def test_control_characters_of_a_text_are_shown_as_escapes(config, tmp_path, monkeypatch, capsys):
    def prepare(*_):
        logging.getLogger("flaxformer_min").info("one\r two\x1b[2Jthree")
        raise ValueError("four\x1bfive")

    monkeypatch.setattr(run, "prepare", prepare)
    assert train(config, tmp_path / "run") == 2
    shown = "".join(capsys.readouterr())
    assert "one\\r two\\x1b[2Jthree" in shown and "four\\x1bfive" in shown
    assert not {"\r", "\x1b"} & {*shown}


def test_writes_that_end_after_an_error_say_nothing(monkeypatch):
    """tensorstore's futures find the loop of Orbax closed; anything else is reported."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    cli._ignore_late_writes()
    late, other = (
        SimpleNamespace(exc_value=RuntimeError(text))
        for text in ("Event loop is closed", "another")
    )
    sys.unraisablehook(late)
    sys.unraisablehook(other)
    assert seen == [other]


def test_too_little_memory_is_one_sentence_with_advice(config, tmp_path, monkeypatch, capsys):
    def prepare(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")

    monkeypatch.setattr(run, "prepare", prepare)
    assert train(config, tmp_path / "run") == 2
    sentence = r"train\.py: error: the device .* memory .*9 bytes\.\).*--model\.remat.*\n"
    assert re.fullmatch(sentence, capsys.readouterr().err)


def test_a_signal_before_training_ends_the_program_with_a_sentence(tmp_path, capsys):
    (tmp_path / "config.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    assert main([str(tmp_path / "config.py")], "train.py") == 130
    assert re.fullmatch(r"\nStopped\. The same command .*\.\n", capsys.readouterr().err)


@pytest.mark.parametrize("prog", ["train.py", "flaxformer-min train"])
def test_a_command_to_go_on_can_be_pasted(config, tmp_path, monkeypatch, capsys, prog):
    """Here a signal comes while the text is prepared."""

    def prepare(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(run, "prepare", prepare)
    arguments = [config, "--workdir", str(tmp_path / "my runs" / "it's one")]
    assert main(arguments, prog) == 143
    command = capsys.readouterr().out.rpartition("To continue: ")[2].strip()
    words = subprocess.run(
        f"printf '%s\n' {command}", shell=True, capture_output=True, text=True, check=True
    )
    program = ["python"] * (prog == "train.py") + shlex.split(prog)
    assert words.stdout.splitlines() == [*program, *arguments]


@pytest.mark.parametrize(
    "number, status",
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    config, tmp_path, number, status, capsys
):
    """In a process as a user starts it; the same command continues."""
    workdir = tmp_path / "run"
    command = [sys.executable, "train.py", config, "--workdir", str(workdir)]
    forever = ["--training.steps", "100000", "--training.save-every", "100000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command + forever, cwd=ROOT, **pipes) as process:
        deadline = time.monotonic() + 120
        while len(read_metrics(workdir / "metrics.jsonl")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "Finishing this step" in printed
    step = newest(workdir)[0]
    assert step >= 4
    assert f"Stopped at step {step} and saved. To continue: python train.py" in printed
    assert not list((workdir / "checkpoints").glob("*tmp*"))
    assert train(config, workdir, *forever, "--training.steps", str(step + 1)) == 0
    assert f"Continuing from step {step}." in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_who_goes_does_not_end_the_run(tmp_path, config):
    """Nor cost it what it has learned: `train.py | tee log`, and Ctrl-C, which ends both."""
    code = (
        "import sys; from flaxformer_min.cli import main; "
        f"status = main(['train', {config!r}, '--workdir', {str(tmp_path / 'run')!r}]); "
        "sys.stderr.write(f'status {status}')"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) as training:
        training.stdout.readline()
        training.stdout.close()
        assert training.stderr.read().endswith("status 0")
    assert newest(tmp_path / "run")[0] == 9

"""benchmarks/multi30k.sh: the text that the last runs are trained on, and what is not repeated."""

import gzip
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "multi30k.sh"

PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
echo "trained"
"""

TRANSLATOR = """#!/bin/sh
echo "$@" >> "$CALLS"
if [ "$1" = translate ]; then sed "s/^/${2##*/} /" "$4" > "$6"; fi
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """The script, with commands that log their arguments and translate by adding a word."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"python": PYTHON, "flaxformer-min": TRANSLATOR}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    calls = tmp_path / "calls"
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **environment):
        calls.write_text("")
        subprocess.run(
            ["bash", SCRIPT, *arguments], check=True, capture_output=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        return calls.read_text().splitlines()

    return run


def write_text(folder, open_=open, end=""):
    folder.mkdir()
    for split in ("train", "val", "test2016"):
        for language in ("en", "de"):
            with open_(folder / f"{split}.{language}{end}", "wt") as file:
                file.write(f"{split} {language} 1\n{split} {language} 2\n")


@pytest.mark.parametrize("open_, end", [(open, ""), (gzip.open, ".gz")])
def test_the_last_runs_are_trained_on_the_text_and_both_translations(tmp_path, start, open_, end):
    write_text(tmp_path / "m30k", open_, end)
    calls = start("m30k", "runs", "3", "4")
    text = tmp_path / "runs" / "text"
    sources, targets = ((text / f"train.{each}").read_text().splitlines() for each in ("en", "de"))
    assert sources == ["train en 1", "train en 2"] * 3
    assert targets == [
        *("train de 1", "train de 2"),
        *("sampled train en 1", "sampled train en 2"),
        *("plain train en 1", "plain train en 2"),
    ]
    assert (text / "val.de").read_text() == "val de 1\nval de 2\n"
    assert (text / "test2016.en").read_text() == "test2016 en 1\ntest2016 en 2\n"
    trained = [call for call in calls if call.startswith("train.py")]
    names = [Path(call.partition("--workdir ")[2].split()[0]).name for call in trained]
    assert names == ["sampled", "plain", "diverse-3", "diverse-4"]
    assert all(f"text:{tmp_path}/m30k " in call for call in trained[:2])
    assert all(f"text:{text} " in call for call in trained[2:])
    assert ["--data.subword-sampling 0" in call for call in trained] == [False, True, False, False]
    begun = [f"--training.init-from {tmp_path}/runs/sampled " in call for call in trained]
    assert begun == [False, False, True, True]
    assert "--training.seed 4" in trained[-1]
    assert calls[-1] == f"evaluate {tmp_path}/runs/diverse-4 --corpus text:{text} --lowercase"


def test_nothing_is_translated_or_written_twice(tmp_path, start):
    """The text keeps its time of change."""
    write_text(tmp_path / "m30k")
    first = start("m30k", "runs")
    written = (tmp_path / "runs" / "text" / "train.de").stat().st_mtime_ns
    second = start("m30k", "runs")
    assert (tmp_path / "runs" / "text" / "train.de").stat().st_mtime_ns == written
    assert sum(call.startswith("translate") for call in first) == 2
    assert second == [call for call in first if not call.startswith("translate")]


def test_another_direction_and_options_reach_every_training(tmp_path, start):
    write_text(tmp_path / "m30k")
    calls = start("m30k", "runs", LANGUAGES="de-en", OPTIONS="--training.steps 2")
    for call in calls:
        if call.startswith("train.py"):
            assert "--data.languages de-en" in call and call.endswith("--training.steps 2")
    assert (tmp_path / "runs" / "text" / "train.en").read_text().startswith("train en 1\n")
    assert "sampled train de 2" in (tmp_path / "runs" / "text" / "train.en").read_text()


def test_without_folders_it_prints_its_usage(start):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        start()
    assert failed.value.returncode == 2
    assert b"bash benchmarks/multi30k.sh DIR RUNS" in failed.value.stderr

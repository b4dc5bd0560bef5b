"""The last sections of docs/own_data.md run as they are written, on a tiny text."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from training_jobs import shared_programs, write_config

from flaxformer_min import cli
from flaxformer_min.storage.run_folder import RunFolder

PAGE = (Path(__file__).parents[1] / "docs" / "own_data.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True, scope="module")
def programs_are_shared():
    with shared_programs():
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the page has so far: configs/mine.py, here a tiny one, and my/folder."""
    config = Path(write_config(tmp_path, data={"normalization": "identity"}))
    (tmp_path / "my").mkdir()
    (tmp_path / "configs").mkdir()
    text = config.read_text().replace("'en-es'", "'en-de'")
    (tmp_path / "configs" / "mine.py").write_text(text)
    text = tmp_path / "corpus"
    for split in ("train", "val"):
        (text / f"{split}.es").rename(text / f"{split}.de")
    shutil.copytree(text, tmp_path / "my" / "folder")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_section(title):
    """Run the lines of a section's first block: commands of the shell and of the package."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    block = re.search(r"(?:^    .*\n)+", section, re.MULTILINE)[0]
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        words = shlex.split(line)
        if words[0] == "flaxformer-min":
            few = ("--training.steps", "2", "--training.cooldown-steps", "0")
            assert cli.main([*words[1:], *few]) == 0
        else:
            subprocess.run(["bash", "-euc", line], check=True)


def test_a_model_is_trained_in_both_directions_and_then_in_one(folder):
    run_section("8. Pre-train in both directions")
    english, german = ((folder / f"my/folder/train.{each}").read_text() for each in ("en", "de"))
    assert (folder / "my/both/train.source").read_text() == english + german
    assert (folder / "my/both/train.target").read_text() == german + english
    both, one = (RunFolder(f"runs/{name}") for name in ("both", "one"))
    assert both.tokenizers()[0].fingerprint == one.tokenizers()[0].fingerprint
    assert one.config().data.languages == "en-de" and one.newest_step() == 2

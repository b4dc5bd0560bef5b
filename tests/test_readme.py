"""The README is true: its Python runs, its commands and files exist."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tiny_run import make_tiny_run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_the_python_of_the_readme_runs(number, tmp_path, monkeypatch):
    if "runs/cldr_en_ko" in PYTHON[number]:
        make_tiny_run(tmp_path / "runs" / "cldr_en_ko")
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON[number], f"README.md, example {number + 1}", "exec"), {})


def test_trainer_researcher_and_translator_have_an_example_of_at_most_ten_lines():
    assert len(PYTHON) == 3
    for name, block in zip(("train", "Transformer", "Translator"), PYTHON, strict=True):
        assert re.search(rf"import .*\b{name}\b", block)
        assert len([line for line in block.splitlines() if line.strip()]) <= 10


def test_every_file_the_readme_names_is_there():
    names = re.findall(r"configs/\w+\.py", README)  # links: see test_docs.py
    assert len(names) >= 2
    for name in names:
        assert (ROOT / name).exists(), name


def test_every_box_of_figure_1_has_its_file_in_the_readme():
    files = {path.name for path in (ROOT / "flaxformer_min" / "model").glob("*.py")}
    table = README.split("## Figure 1")[1].split("## ")[0]
    assert files - {"__init__.py"} == set(re.findall(r"`(\w+\.py)`", table))


def test_the_console_script_is_installed_beside_the_interpreter():
    if shutil.which("flaxformer-min") is None:
        pytest.skip("flaxformer-min is not installed: pip install -e .")
    done = subprocess.run(["flaxformer-min", "--help"], capture_output=True, text=True)
    assert "translate" in done.stdout

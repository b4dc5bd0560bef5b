"""benchmarks/ablations.py: the rows' settings, resumed runs, and the numbers of the table."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
import ablations

from flaxformer_min.cli.train import read_arguments

pytestmark = pytest.mark.slow

TRAINING = """
import json, pathlib, sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
run = pathlib.Path(options["--workdir"])
run.mkdir(exist_ok=True)
with open(run / "starts", "a") as file:
    file.write("x")
bleu = 30.0 + int(options["--training.seed"]) - 4 * ("--model.norm" in options)
lines = [(2, 9.0, bleu + 1), (4, 9.5, bleu)]
(run / "metrics.jsonl").write_text("".join(
    json.dumps({"step": s, "validation_perplexity": p, "validation_bleu": b}) + "\\n"
    for s, p, b in lines
))
print("1.7 M parameters, vocabulary 9")
if "--training.average-checkpoints" in options:
    print("The mean of the checkpoints of steps 3, 4:\\n"
          f"validation: loss 2.1 nats, perplexity 8.25, BLEU {bleu + 2:.2f} on 3 sentences")
sys.exit(int("--fail" in options))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for the runs, and a train.py that takes no time."""
    (tmp_path / "train.py").write_text(TRAINING)
    monkeypatch.setattr(ablations, "ROOT", tmp_path)
    return tmp_path / "runs"


def start(folder, *options, rows="base:2,post-norm,average:2"):
    given = ["--corpus", "text:x", "--steps", "4", "--folder", str(folder), "--rows", rows]
    return ablations.main([*given, *options])


def starts(folder):
    return {path.parent.name: len(path.read_text()) for path in folder.glob("*/starts")}


@pytest.mark.parametrize("row", ablations.ROWS, ids=lambda row: row.name)
def test_a_row_changes_the_settings_it_names_and_nothing_else(row, monkeypatch):
    monkeypatch.chdir(ROOT)
    job = ablations.Job(row, 3, Path("runs"), ("--data.corpus", "text:x"))
    changed, base = (
        read_arguments(options, "train.py") for options in (job.command[2:], job.command[2:3])
    )
    found = {
        f"{group}.{name}".replace("_", "-"): value
        for group in ("data", "model", "training", "decoding")
        for name, value in vars(getattr(changed, group)).items()
        if value != getattr(getattr(base, group), name)
    }
    assert found == {"data.corpus": "text:x", "training.seed": 3, **row.settings}


def test_a_benchmark_that_is_started_again_trains_what_is_not_finished(folder):
    """Rows with equal settings share their runs; other options are refused in the same folder."""
    assert start(folder) == 0
    assert starts(folder) == {"base-0": 1, "base-1": 1, "post-norm-0": 1}
    (folder / "base-1.json").unlink()  # as if it had been interrupted
    assert start(folder) == 0
    assert starts(folder) == {"base-0": 1, "base-1": 2, "post-norm-0": 1}
    with pytest.raises(SystemExit, match="training.steps 4 .*Choose another --folder"):
        start(folder, "--steps", "5")


def test_a_training_that_fails_is_named_and_the_others_go_on(folder, capsys):
    assert start(folder, "--fail", "1") == 1
    printed = capsys.readouterr().out
    for name in ("base-0", "base-1", "post-norm-0"):
        assert f"{name} ended with 1; see {folder / name}.log" in printed
    assert not list(folder.glob("*.json"))


def test_the_table_holds_means_spreads_and_differences_seed_by_seed(folder, tmp_path, capsys):
    """BLEU 30 and 31 of the base at its end, one more at its best; the mean's is 2 above the end's;
    post-norm 4 below, for seed 0 alone: 26 against 30."""
    data, picture = tmp_path / "ablations.json", tmp_path / "ablations.png"
    assert start(folder, "--json", str(data), "--picture", str(picture)) == 0
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| ")
    ]
    assert [line[0] for line in lines] == ["row", "base", "post-norm", "average"]
    assert [line[2:] for line in lines[1:]] == [
        ["1.7", "9.50 (9.50 to 9.50)", "30.50 (30.00 to 31.00)"]
        + ["9.00 (9.00 to 9.00)", "31.50 (31.00 to 32.00)", "2", ""],
        ["1.7", "9.50", "26.00", "9.00", "27.00", "1", "-4.00"],
        ["1.7", "8.25 (8.25 to 8.25)", "32.50 (32.00 to 33.00)"]
        + ["8.25 (8.25 to 8.25)", "32.50 (32.00 to 33.00)", "2", "+2.00 (+2.00 to +2.00)"],
    ]
    rows = json.loads(data.read_text())["rows"]
    assert [row["row"] for row in rows] == ["base", "post-norm", "average"]
    assert rows[1]["bleu"] == [26.0]
    assert picture.read_bytes().startswith(b"\x89PNG")

"""A run folder of the first format is read for ever: tests/make_golden_run.py made it once."""

import json
import shutil

import pytest
from make_golden_run import EXPECTED, GOLDEN

from flaxformer_min.config import FORMAT_VERSION
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.runs.folder import RunFolder
from flaxformer_min.training.step import init_state

RECORDS = json.loads(EXPECTED.read_text())


@pytest.fixture(scope="module")
def translator():
    return Translator.load(GOLDEN, warn=pytest.fail)


def test_the_golden_run_is_of_a_format_that_is_still_read():
    """And small, for it is in every clone."""
    format_version = json.loads((GOLDEN / "config.json").read_text())["format_version"]
    assert 1 == format_version <= FORMAT_VERSION
    files = [path for path in GOLDEN.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000


def test_the_golden_run_translates_to_the_recorded_text(translator):
    found = translator.hypotheses([each["source"] for each in RECORDS], translator.options())
    assert [best.text for best, *_ in found] == [each["translation"] for each in RECORDS]
    log_probs = [each["log_prob"] for each in RECORDS]
    assert [best.log_prob for best, *_ in found] == pytest.approx(log_probs, abs=1e-4)


def test_the_golden_run_gives_references_the_recorded_scores(translator):
    found = translator.score([(each["source"], each["reference"]) for each in RECORDS])
    log_probs = [each["log_prob_of_reference"] for each in RECORDS]
    assert [each.log_prob for each in found] == pytest.approx(log_probs, abs=1e-4)


def test_training_goes_on_from_the_golden_run(tmp_path):
    """Optimizer, key and place in the rows have their names and shapes in the format, too."""
    run = RunFolder(shutil.copytree(GOLDEN, tmp_path / "run"))
    config = run.config()
    checkpoints = run.open_checkpoints(config)
    like = init_state(Transformer(run.model_config()), config.training)
    step, state, meta = checkpoints.restore(like.to_dict(), pytest.fail)
    checkpoints.close()
    assert step == int(state["step"]) == config.training.steps
    assert set(meta["rows"]) == {"epoch", "batch"}

"""A run folder of the first format can always be read: tests/make_golden_run.py made it once."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from make_golden_run import CONFIG, EXPECTED, GOLDEN
from tiny_run import random_params

from flaxformer_min.config import FORMAT_VERSION
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.experiment.state import init_from
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.training.step import TrainState

RECORDS = json.loads(EXPECTED.read_text())


@pytest.fixture(scope="module")
def translator():
    loaded = Translator.load(GOLDEN)
    loaded.runner.widths = (32,)  # one shape to compile
    return loaded


def test_the_golden_run_is_of_a_format_that_is_still_read(caplog):
    """Without any warning. It is small, because it is in every clone."""
    format_version = json.loads((GOLDEN / "config.json").read_text())["format_version"]
    assert 1 == format_version <= FORMAT_VERSION
    files = [path for path in GOLDEN.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    run = RunFolder(GOLDEN)
    with caplog.at_level(logging.WARNING, "flaxformer_min"):
        assert run.config().training == CONFIG.training
        found = run.params()
    assert found.step == CONFIG.training.steps
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
        for params in (found.params, random_params(run.model_config()))
    ]
    assert shapes[0] == shapes[1]
    assert not caplog.records


def test_the_golden_run_translates_to_the_recorded_text(translator):
    """And gives references the recorded scores."""
    found = translator.hypotheses([each["source"] for each in RECORDS])
    assert [best.text for best, *_ in found] == [each["translation"] for each in RECORDS]
    log_probs = [each["log_prob"] for each in RECORDS]
    assert [best.log_prob for best, *_ in found] == pytest.approx(log_probs, abs=1e-4)
    scored = translator.score([(each["source"], each["reference"]) for each in RECORDS])
    log_probs = [each["log_prob_of_reference"] for each in RECORDS]
    assert [each.log_prob for each in scored] == pytest.approx(log_probs, abs=1e-4)


def test_training_does_not_continue_the_golden_run_but_begins_with_its_parameters(tmp_path):
    """Its optimizer state has other names. Nothing in the folder is taken for damaged."""
    run = RunFolder(shutil.copytree(GOLDEN, tmp_path / "run"))
    with pytest.raises(ValueError, match="cannot be continued.*--training.init-from .*/run"):
        run.begin(run.config(), pytest.fail)
    params = run.params().params
    zeros = jax.tree.map(jnp.zeros_like, params)
    initial = TrainState(jnp.int32(0), zeros, None, jax.random.key(0))
    run.check_model(CONFIG.model)
    jax.tree.map(
        np.testing.assert_array_equal, init_from(run, initial, optax.sgd(1)).params, params
    )

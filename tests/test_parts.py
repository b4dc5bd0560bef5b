"""What the caller of `train` replaces or adds: optimizer, batches, callbacks."""

import jax
import numpy as np
import optax
import pytest
from training_jobs import changed, small_config, stopped_after, watched_steps

from benchmarks.crash import differences
from flaxformer_min.experiment.run import train
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.tokens import Batch, Tokens
from flaxformer_min.training.metrics import read_metrics

LION = optax.lion(1e-3)


pytestmark = pytest.mark.usefixtures("programs_are_shared")


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path)


class Counted:
    """Rows of random words, each a function of its number."""

    def __init__(self, tokenizers=None):
        self.number, self.tokenizers = 0, tokenizers

    def __next__(self):
        self.number += 1
        ids = np.random.default_rng(self.number).integers(4, 200, (4, 24), np.int32)
        ones = np.ones_like(ids)
        side = Tokens(ids, np.cumsum(ones, axis=1, dtype=np.int32) - 1, ones)
        return Batch(side, side)

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda: {"optimizer": LION}, id="optimizer"),
        pytest.param(lambda: {"batches": Counted()}, id="batches", marks=pytest.mark.slow),
        pytest.param(lambda: {"batches": Counted}, id="function", marks=pytest.mark.slow),
    ],
)
def test_a_run_with_parts_of_the_caller_that_is_cut_equals_the_uncut_run(config, tmp_path, parts):
    uncut = train(config, tmp_path / "uncut", **parts()).run.path
    for step in (2, 4):
        stopped_after(config, tmp_path / "cut", step, **parts())
    train(config, tmp_path / "cut", **parts())
    assert differences(uncut, tmp_path / "cut", parts().get("optimizer")) == []


def test_a_run_is_not_continued_with_another_optimizer(config, tmp_path):
    run = stopped_after(config, tmp_path / "run", 2, optimizer=LION).run
    refused = "its own optimizer; checkpoint 2 .* has the states ScaleByLionState.*, the given"
    with pytest.raises(ValueError, match=refused):
        train(config, run.path)
    assert train(config, run.path, optimizer=LION).step == 9
    assert not (run.path / "damaged").exists()


def test_a_run_is_not_continued_with_batches_of_another_kind(config, tmp_path):
    run = stopped_after(config, tmp_path / "run", 2, batches=Counted()).run
    with pytest.raises(ValueError, match="checkpoint 2 is of Counted, got TrainingBatches. Pass"):
        train(config, run.path)


class Unsaved(Counted):
    def get_state(self):
        return {"number": np.arange(2)}


@pytest.mark.parametrize(
    "batches, error",
    [
        (iter([]), "batches must be an iterator with .*; list_iterator has no get_state"),
        (Unsaved(), r"batches.get_state\(\) must return what JSON can hold; .*ndarray"),
    ],
)
def test_an_iterator_that_cannot_be_resumed_is_refused_before_training(
    config, tmp_path, batches, error
):
    with watched_steps(before=pytest.fail), pytest.raises(ValueError, match=error):
        train(config, tmp_path / "run", batches=batches)


def test_batches_that_end_too_early_are_named(config, tmp_path, monkeypatch):
    rows = iter([next(Counted())])
    monkeypatch.setattr(Counted, "__next__", lambda self: next(rows))
    with pytest.raises(ValueError, match="before training.steps=9; they ended after step 1. Rep"):
        train(config, tmp_path / "run", batches=Counted())


def test_callbacks_get_each_step_and_each_validation_once(config, tmp_path):
    """Also across an interruption. The log has the means of four steps."""
    steps, validations = {}, {}
    calls = {"on_step": steps.__setitem__, "on_validation": validations.__setitem__}
    stopped_after(config, tmp_path / "run", 3, **calls)
    assert list(steps) == [1, 2, 3]
    train(config, tmp_path / "run", **calls)
    assert (list(steps), list(validations)) == ([*range(1, 10)], [6, 9])
    lines = {line["step"]: line for line in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    mean = np.mean([steps[step]["loss"] for step in (1, 2, 3, 4)])
    assert lines[4]["loss"] == pytest.approx(mean)
    assert steps[8]["learning_rate"] == lines[8]["learning_rate"]
    assert lines[6]["validation_loss"] == validations[6]["validation_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True], ids=["setting", "given"])
def test_a_schedule_free_run_is_validated_and_translates_with_its_average(tmp_path, given):
    """x of y = (1 - β) z + β x (Defazio et al. 2024), which no step has as its parameters."""
    schedule_free = optax.contrib.schedule_free_adamw(1e-2, b1=0.9)
    parts = {"optimizer": schedule_free} if given else {}
    config = small_config(tmp_path, **({} if given else {"optimizer": "schedule_free"}))
    states = []

    def keep(state):
        states.append(jax.device_get((state.params, state.opt_state)))

    with watched_steps(after=keep):
        run = train(config, tmp_path / "run", **parts).run
    y, state = states[-1]
    x = jax.tree.map(lambda y, z: (y - 0.1 * z) / 0.9, y, state.z)
    restored = run.params(9).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), restored, x)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), restored, y)
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.slow
def test_fine_tuning_schedule_free_begins_all_its_sequences_with_the_given_parameters(tmp_path):
    former = train(changed(small_config(tmp_path), "training", steps=3), tmp_path / "former").run
    config = small_config(tmp_path, optimizer="schedule_free", init_from=str(former.path), steps=1)
    given = []
    with watched_steps(before=lambda state: given.append(jax.device_get(state.opt_state.z))):
        train(config, tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, given[0], RunFolder(former.path).params().params)

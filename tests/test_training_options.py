"""Options beyond the paper: R-Drop, averages, patience, subword sampling."""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import pickle
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import make_tiny_run
from training_jobs import changed

from flaxformer_min.config import Config, DataConfig, ModelConfig, TrainingConfig
from flaxformer_min.data.batches import TrainingBatches, shard_batch
from flaxformer_min.data.encoding import Ragged, Segmentations, encode_pairs
from flaxformer_min.data.tokenizer import train_tokenizer
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.experiment import run as run_module
from flaxformer_min.experiment import validation
from flaxformer_min.experiment.averaging import validate_average
from flaxformer_min.experiment.run import train
from flaxformer_min.kernels import loss as loss_module
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.storage.checkpoint import Checkpoints
from flaxformer_min.storage.metadata import Metric, steps_of
from flaxformer_min.storage.restore import average_checkpoints, best_cost
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.tokens import Batch, one_sentence_per_row
from flaxformer_min.training.loop import Progress, Trainer
from flaxformer_min.training.loss import Sums, sum_over_tokens
from flaxformer_min.training.step import (
    TrainState,
    gradient_sums,
    init_state,
    make_train_step,
    randomness,
)

CONFIG = ModelConfig(vocab_size=12, num_layers=1, d_model=8, d_ff=8, num_heads=2, dropout=0.4)
MODEL = Transformer(CONFIG)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def two_rows():
    ids = jnp.array([[5, 6, 3, 0], [7, 8, 9, 3]], jnp.int32)
    tokens = one_sentence_per_row(ids)
    return Batch(tokens, tokens)


def in_two_shares(batch):
    return shard_batch(jax.tree.map(np.asarray, batch), 2)


# ---- the loss, a few tokens at a time --------------------------------------------------------


class Sample(NamedTuple):
    """Hidden states of 12 tokens, and the other arguments of their loss."""

    hidden_states: jax.Array
    kernel: jax.Array
    labels: jax.Array
    real: jax.Array
    r_drop: float


def draw_sample(readings):
    numbers = np.random.default_rng(0)
    return Sample(
        jnp.asarray(numbers.normal(size=(readings, 3, 4, 6)), jnp.float32),
        jnp.asarray(numbers.normal(size=(6, 9)), jnp.float32),
        jnp.asarray(numbers.integers(0, 9, (3, 4))),
        jnp.asarray(numbers.integers(0, 3, (3, 4))),
        3.0 if readings == 2 else 0.0,
    )


@functools.cache
def plain_loss(readings):
    """The definition on all tokens at once, and jax's own gradient of it."""
    sample = draw_sample(readings)

    def loss(hidden_states, kernel):
        log_probs = jax.nn.log_softmax(hidden_states @ kernel)
        right = jnp.take_along_axis(log_probs, sample.labels[None, :, :, None], -1)[..., 0]
        loss = -(0.9 * right + 0.1 * log_probs.mean(-1)).mean(0)
        if readings == 2:
            p, q = jnp.exp(log_probs)
            loss += sample.r_drop / 4 * ((p - q) * (log_probs[0] - log_probs[1])).sum(-1)
        return jnp.where(sample.real, loss, 0.0).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(*sample[:2])


@pytest.mark.parametrize("chunk", [slow(1), slow(4), 5, 100])
@pytest.mark.parametrize("readings", [1, 2])
def test_the_loss_of_many_chunks_is_the_sum_over_tokens_and_so_is_its_gradient(
    chunk, readings, monkeypatch
):
    monkeypatch.setattr(loss_module, "CPU_CHUNK", chunk)
    sample = draw_sample(readings)

    def chunked(hidden_states, kernel):
        sums = sum_over_tokens(
            lambda x: x @ kernel, hidden_states, sample.labels, sample.real, 0.1, sample.r_drop
        )
        return sums.loss, sums

    gradients, sums = jax.jit(jax.grad(chunked, (0, 1), has_aux=True))(*sample[:2])
    loss, expected = plain_loss(readings)
    assert float(sums.loss) == pytest.approx(float(loss), rel=1e-5)
    assert float(sums.tokens) == (np.asarray(sample.real) > 0).sum()
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_r_drop_reads_a_batch_under_two_masks(averaging_learner):
    """Liang et al. 2021: without dropout the two agree, so their weight does not matter."""
    combinations = ((0.0, 0.0), (0.0, 5.0), (0.4, 1.0), (0.4, 5.0))
    batch = two_rows()
    state = TrainState(jnp.int32(0), None, None, jax.random.key(1))
    random = randomness(state, 0, 0, len(batch.target.ids), TrainingConfig())

    def loss(params, dropout, r_drop):
        model = Transformer(dataclasses.replace(CONFIG, dropout=dropout))
        return gradient_sums(model, params, batch, random, TrainingConfig(r_drop=r_drop))[1].loss

    _, first = averaging_learner
    together = jax.jit(lambda params: [loss(params, *each) for each in combinations])
    losses = dict(zip(combinations, map(float, together(first.params)), strict=True))
    assert losses[0.0, 5.0] == pytest.approx(losses[0.0, 0.0], rel=1e-6)
    assert losses[0.4, 5.0] > losses[0.4, 1.0] + 0.1


# ---- averages ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def averaging_learner():
    """A step that averages, and a state to begin with, of which the step is given a copy."""
    config = Config(model=CONFIG, training=TrainingConfig(ema_decay=0.15, warmup_steps=5))
    return make_train_step(MODEL, config), init_state(MODEL, config)


def test_the_moving_average_takes_its_share_of_every_step(averaging_learner):
    """avg = kept · avg + (1 - kept) · params, kept = min(decay, (1 + step) / (10 + step))."""
    step, first = averaging_learner
    state = jax.tree.map(jnp.copy, first)
    expected = np.asarray(state.params["embedding"]["table"], np.float64)
    for kept in (0.1, 0.15, 0.15):  # 1/10, then 2/11 and 3/12 are above the decay
        state, _ = step(state, in_two_shares(two_rows()))
        expected = kept * expected + (1 - kept) * np.asarray(state.params["embedding"]["table"])
    average = np.asarray(state.eval_params["embedding"]["table"])
    np.testing.assert_allclose(average, expected, rtol=1e-5)
    assert not np.allclose(average, state.params["embedding"]["table"], rtol=1e-4)


def test_a_step_that_is_skipped_leaves_the_average_alone(averaging_learner):
    step, first = averaging_learner
    state = jax.tree.map(jnp.copy, first)
    state = state._replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params))
    before = np.asarray(state.average["embedding"]["table"])
    state, metrics = step(state, in_two_shares(two_rows()))
    assert float(metrics["skipped"]) == 1
    np.testing.assert_array_equal(state.average["embedding"]["table"], before)


def logged(caplog):
    """Messages of the package; Orbax logs, too."""
    return [each.getMessage() for each in caplog.records if each.name == "flaxformer_min"]


def save_numbers(folder, numbers, keep=9, best=None):
    checkpoints = Checkpoints(folder, keep)
    for step, number in numbers.items():
        params = {"a": jnp.full((2, 3), number), "b": jnp.full(2, -number)}
        checkpoints.save(step, {"params": params}, {}, best)
    checkpoints.close()


def test_the_mean_is_that_of_the_newest_intact_checkpoints_number_by_number(tmp_path, caplog):
    save_numbers(tmp_path / "c", {1: 100.0, 2: 1.0, 3: 2.0, 4: 6.0})
    steps, mean = average_checkpoints(tmp_path / "c", 3)
    assert (steps, logged(caplog)) == ([4, 3, 2], [])
    np.testing.assert_array_equal(mean["a"], np.full((2, 3), 3.0))
    np.testing.assert_array_equal(mean["b"], [-3.0, -3.0])
    for file in (tmp_path / "c" / "4").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    steps, mean = average_checkpoints(tmp_path / "c", 3)
    assert steps == [3, 2, 1] and "checkpoint 4" in logged(caplog)[0]
    np.testing.assert_allclose(mean["b"], [-103 / 3] * 2, rtol=1e-6)


def test_a_checkpoint_saved_for_a_signal_changes_neither_the_mean_nor_which_are_kept(tmp_path):
    """Saves are due every 10 steps here; the newest always counts."""
    checkpoints = Checkpoints(tmp_path / "c", keep=2, every=10)
    for step in (10, 13, 20, 24, 30, 31):
        checkpoints.save(step, {"params": {"a": jnp.full(2, float(step))}}, {})
    checkpoints.close()
    assert steps_of(tmp_path / "c") == [31, 30, 20]
    assert average_checkpoints(tmp_path / "c", 2, every=10)[0] == [31, 30]
    save_numbers(tmp_path / "d", {10: 1.0, 13: 2.0, 20: 3.0})
    assert average_checkpoints(tmp_path / "d", 2, every=10)[0] == [20, 10]


def test_a_run_translates_with_the_mean_that_was_kept_until_it_is_dropped(tmp_path, caplog):
    run = RunFolder(make_tiny_run(tmp_path / "run"))
    step, params, _ = run.params()
    doubled = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), params)
    run.keep_average(doubled, 77)
    found, restored, is_mean = run.params()
    assert (found, is_mean) == (77, True)
    (loaded,) = Translator.load(run.path).restored
    assert (loaded.step, loaded.is_mean) == (77, True)
    for each in (restored, loaded.params):
        jax.tree.map(np.testing.assert_array_equal, each, doubled)
    jax.tree.map(np.testing.assert_array_equal, run.params(step).params, params)
    run.drop_average()
    assert run.params()[::2] == (step, False)
    assert logged(caplog) == []


@pytest.mark.parametrize(
    "best, losses, better",
    [
        (3.0, [2.0], True),
        (2.0, [3.0], False),
        (None, [2.0, 3.0], True),
        (None, [3.0, 2.0], False),
    ],
)
def test_the_mean_is_kept_only_if_validation_finds_it_better(tmp_path, best, losses, better):
    """Than the best checkpoint; where no score counts, than the newest, which is validated, too."""
    run = RunFolder(tmp_path)
    metric = None if best is None else Metric("validation_loss", best)
    save_numbers(run.checkpoints, {1: 1.0, 2: 2.0}, best=metric)
    validated = []

    def validate(params, step):
        validated.append((float(params["b"][0]), step))
        return {"validation_loss": losses[len(validated) - 1]}

    config = TrainingConfig(average_checkpoints=2, keep_checkpoints=3, save_every=1)
    validate_average(run, config, validate, 2)
    assert validated == [(-1.5, 2), (-2.0, 2)][: len(losses)]
    assert run.averaged.exists() == better


METRICS = dict.fromkeys(["loss", "accuracy", "tokens", "real", "positions"], jnp.float32(1))
METRICS |= dict.fromkeys(["gradient_norm", "learning_rate", "skipped"], jnp.float32(0))
PAIRS = [(f"number {i} and {i * 7}", f"Nummer {i} und {i * 7}") for i in range(60)]


class EmptyStep:
    """A train step that only counts."""

    def __init__(self, *_):
        """Take what `make_train_step` takes."""

    def __call__(self, state, batch):
        return state._replace(step=state.step + 1), METRICS

    def lower(self, state, batch):
        return self

    def compile(self):
        return self


@pytest.fixture
def nothing_is_learned(monkeypatch):
    """Nor compiled: steps are counted, and all parameters are equally good."""
    monkeypatch.setattr(run_module, "make_train_step", EmptyStep)
    ones = Sums(*(jnp.float32(1),) * 4)
    monkeypatch.setattr(validation, "make_eval_step", lambda model: lambda params, batch: ones)


def settings(folder, **training):
    options = {"validation_sentences": 0, "save_every": 2, **training}
    return Config(
        data=DataConfig(cache_dir=str(folder), rows_per_batch=4),
        model=dataclasses.replace(CONFIG, vocab_size=300),
        training=TrainingConfig(**options),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_learned")
def test_a_mean_is_dropped_when_a_run_continues_or_wants_none(tmp_path):
    """A run of 4 steps: the mean is compared again at its end, and is obsolete before that."""
    text = {"train": PAIRS, "validation": PAIRS[:9]}
    ended = settings(tmp_path, steps=4, average_checkpoints=2)
    run = train(ended, tmp_path / "run", pairs=text).run
    assert steps_of(run.checkpoints) == [4, 2] and not run.averaged.exists(), "it is not better"
    mean = run.params().params

    def continue_with(config, **options):
        run.drop_average()
        run.keep_average(mean, 4)
        return train(config, run.path, pairs=text, **options)

    assert continue_with(ended, stop=lambda: True).step == 4
    assert run.averaged.exists(), "it was not compared again yet"
    assert continue_with(ended).step == 4
    assert not run.averaged.exists()
    for other in (dict(steps=6, average_checkpoints=2), dict(steps=4, average_checkpoints=1)):
        assert continue_with(settings(tmp_path, **other), stop=lambda: True).step == 4
        assert not run.averaged.exists()


# ---- patience ---------------------------------------------------------------------------------


class Endless:
    """Batches for a step that does nothing."""

    def __next__(self):
        return two_rows()

    def get_state(self):
        return {}


class Log:
    def __init__(self):
        self.written = []

    def write(self, step, line):
        self.written.append((step, line))


def run_empty_steps(state, config, checkpoints, validate, **options):
    """Run the loop with steps that do nothing, and return the lines of metrics."""
    log, step = Log(), EmptyStep()
    to_devices = lambda batch: batch  # noqa: E731
    Trainer(state, step, Endless(), to_devices, config, checkpoints, log, validate, **options).run()
    return log.written


def tiny_state(step=0):
    return TrainState(jnp.int32(step), {"a": jnp.zeros(1)}, (), jax.random.key(0))


@pytest.mark.parametrize("costs, before", [([], 8), ([0.5, 0.6], 2)])
def test_training_stops_when_validation_finds_nothing_better(tmp_path, caplog, costs, before):
    """Losses 3, 1, 2, 2, ...: the third and the fourth are no better than the second. What was
    measured before an interruption counts: then 0.6 and 3 are no better than 0.5."""
    caplog.set_level(logging.INFO, "flaxformer_min")
    losses = iter([3.0, 1.0, 2.0, 2.0, 0.1, 0.1])
    config = TrainingConfig(steps=100, validate_every=2, log_every=50, save_every=50, patience=2)
    checkpoints, progress = Checkpoints(tmp_path, 3), Progress(costs=list(costs))
    validate = lambda params, step: {"validation_loss": next(losses)}  # noqa: E731
    run_empty_steps(tiny_state(), config, checkpoints, validate, progress=progress)
    assert "2 validations in a row" in logged(caplog)[-1]
    step, _, description = checkpoints.restore(tiny_state().to_dict())
    checkpoints.close()
    assert step == before
    found = description["progress"]["costs"]
    assert found == [*costs, 3.0, 1.0, 2.0, 2.0][: len(found)]


@pytest.mark.parametrize("stopping", [True, False])
def test_a_signal_that_also_ended_the_workers_is_a_stop_request(
    tmp_path, monkeypatch, caplog, stopping
):
    """As `scancel` sends it, to all processes of a job; without one, their end is an error."""
    caplog.set_level(logging.INFO, "flaxformer_min")
    checkpoints, calls = Checkpoints(tmp_path, 3), []

    def next_or_dead(_):
        calls.append("rows")
        if len(calls) == 4:
            raise RuntimeError("Worker process was terminated unexpectedly")
        return 0

    ending = contextlib.nullcontext() if stopping else pytest.raises(RuntimeError, match="Worker")
    monkeypatch.setattr(Endless, "__next__", next_or_dead)
    config, stop = TrainingConfig(steps=9), lambda: stopping and len(calls) == 4
    with ending:
        run_empty_steps(tiny_state(), config, checkpoints, pytest.fail, stop=stop)
    checkpoints.close()
    assert steps_of(tmp_path) == [3] * stopping
    assert logged(caplog) == []


def test_a_run_that_ran_out_of_patience_says_so_when_it_is_started_again(tmp_path, caplog):
    caplog.set_level(logging.INFO, "flaxformer_min")
    config = TrainingConfig(steps=100, patience=2)
    checkpoints = Checkpoints(tmp_path, 3)
    progress = Progress(costs=[1.0, 2.0, 2.0])
    run_empty_steps(tiny_state(4), config, checkpoints, pytest.fail, progress=progress)
    checkpoints.close()
    (text,) = logged(caplog)
    assert "2 validations in a row" in text and "larger --training.patience" in text


def worse_from_step_to_step(validator, params, step):
    return {"validation_loss": 2.0 + step, "validation_bleu": 30.0 - step}


@pytest.mark.parametrize(
    "best_by, of_training, of_search, counts",
    [
        ("bleu", {}, {}, True),
        slow("bleu", {"validation_sentences": 3}, {}, False),
        ("bleu", {}, {"beam_size": 2}, False),
        slow("bleu", {}, {"batch_size": 8}, True),
        ("loss", {"validation_sentences": 3}, {"beam_size": 2}, True),
    ],
)
@pytest.mark.usefixtures("programs_are_shared", "nothing_is_learned")
def test_bleu_is_compared_with_bleu_of_the_same_settings_only(
    tmp_path, monkeypatch, caplog, best_by, of_training, of_search, counts
):
    """Each validation is worse than the one before it: the first that counts is the best, and the
    second after it is the end."""
    monkeypatch.setattr(validation.Validator, "__call__", worse_from_step_to_step)
    text = {"train": PAIRS, "validation": PAIRS[:9]}
    shared = {"best_by": best_by, "validate_every": 2, "patience": 2, "save_every": 50}
    config = settings(tmp_path, **{"validation_sentences": 5, **shared, "steps": 4})
    run = train(config, tmp_path / "run", pairs=text).run
    longer = changed(config, "training", steps=10, **of_training)
    caplog.clear()
    result = train(changed(longer, "decoding", **of_search), run.path, pairs=text)
    warning = "the settings of BLEU in validation have changed; former scores do not count."
    assert logged(caplog) == [warning] * (not counts)
    assert (result.step, run.params().step) == ((6, 2) if counts else (10, 6))


def test_the_best_by_validation_is_saved_even_if_no_save_is_due(tmp_path):
    losses = iter([3.0, 1.0, 2.0])
    config = TrainingConfig(steps=6, validate_every=2, log_every=50, save_every=50)
    checkpoints = Checkpoints(tmp_path, 3, config.save_every)
    run_empty_steps(
        tiny_state(), config, checkpoints, lambda params, step: {"validation_loss": next(losses)}
    )
    checkpoints.close()
    assert (steps_of(tmp_path), best_cost(tmp_path)) == ([6, 4], 1.0)


def test_an_interrupted_validation_is_repeated_when_training_continues(tmp_path):
    """The metrics are then those of an uninterrupted run."""
    config = TrainingConfig(steps=4, validate_every=2, log_every=50, save_every=50)

    def resume(folder, give_up_at=None):
        state, checkpoints, progress = tiny_state(), Checkpoints(folder, 3), Progress()
        if found := checkpoints.restore(state.to_dict()):
            state, progress = TrainState(**found[1]), Progress(**found[2]["progress"])
        validated = []

        def validate(params, step):
            validated.append(step)
            return None if step == give_up_at else {"validation_loss": 10.0 - step}

        stop = lambda: give_up_at in validated  # noqa: E731
        lines = run_empty_steps(state, config, checkpoints, validate, stop=stop, progress=progress)
        step, _, description = checkpoints.restore(tiny_state().to_dict())
        checkpoints.close()
        return [(step, line["validation_loss"]) for step, line in lines], (step, description)

    def pending(description):
        return description["progress"]["validation_pending"]

    uncut, end = resume(tmp_path / "uncut")
    first, cut = resume(tmp_path / "cut", give_up_at=2)
    assert (first, cut[0], pending(cut[1])) == ([], 2, True)
    second, resumed = resume(tmp_path / "cut")
    assert second == uncut == [(2, 8.0), (4, 6.0)]
    assert resumed == end and not pending(end[1])
    first, cut = resume(tmp_path / "late", give_up_at=4)
    assert (first, best_cost(tmp_path / "late")) == ([(2, 8.0)], 8.0), "4 was not validated"
    second, resumed = resume(tmp_path / "late")
    assert (second, best_cost(tmp_path / "late")) == ([(4, 6.0)], 6.0), "it is counted now"
    assert resumed == end and resume(tmp_path / "late")[0] == [], "once"


# ---- subword sampling -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return train_tokenizer((text for pair in PAIRS for text in pair), 300, path)


def sampled_rows(tokenizer, cache, seed=0, alpha=0.1):
    encoded = encode_pairs(PAIRS, (tokenizer, tokenizer), (64, 64), cache, "pairs", segmentations=8)
    return TrainingBatches(encoded, (64, 64), 4, seed, subword_sampling=alpha)


def sentences(batches, tokenizer):
    found = []
    for number in range(len(batches)):
        side = batches[number].target
        for ids, segments in zip(side.ids, side.segments, strict=True):
            for segment in range(1, segments.max() + 1):
                found.append(tuple(ids[segments == segment].tolist()))
    return sorted(found)


def test_each_epoch_segments_the_same_text_differently(tokenizer, tmp_path):
    rows = sampled_rows(tokenizer, tmp_path)
    epochs = [sentences(rows.epoch(number), tokenizer) for number in (0, 1)]
    texts = sorted(target for _, target in PAIRS)
    for epoch in epochs:
        assert sorted(tokenizer.decode(ids) for ids in epoch) == texts
    assert len(set(epochs[0]) & set(epochs[1])) < len(PAIRS) / 2
    likeliest = sorted(map(tuple, tokenizer.encode_batch(texts)))
    assert sentences(sampled_rows(tokenizer, tmp_path, alpha=1e3).epoch(0), tokenizer) == likeliest
    assert sentences(sampled_rows(tokenizer, tmp_path / "other").epoch(1), tokenizer) == epochs[1]
    other_seed = sampled_rows(tokenizer, tmp_path, seed=1).epoch(1)
    assert sentences(other_seed, tokenizer) != epochs[1]


def test_sampled_batches_resume_exactly(tokenizer, tmp_path):
    uncut, resumed = (sampled_rows(tokenizer, tmp_path / name) for name in "ab")
    for _ in range(9):
        next(uncut)
    assert uncut.get_state()["epoch"] > 0
    resumed.set_state(uncut.get_state())
    for _ in range(7):
        one, other = next(uncut), next(resumed)
        jax.tree.map(np.testing.assert_array_equal, one, other)
    uncut.close()
    resumed.close()


def test_segmentations_are_drawn_by_their_probability_to_the_power_of_alpha():
    """Two sentences: one segmentation, and three of probabilities 0.5, 0.25 and 0.125."""
    lengths = np.array([3, 1, 2, 4])
    candidates = Ragged(np.arange(10), np.cumsum(lengths) - lengths, lengths)
    segmentations = Segmentations(candidates, np.array([1, 3]), np.log([0.9, 0.5, 0.25, 0.125]))
    rng = np.random.default_rng(0)
    drawn = [segmentations.draw(2.0, rng) for _ in range(4000)]
    assert {(each.starts[0], each.lengths[0]) for each in drawn} == {(0, 3)}
    shares = np.bincount([each.lengths[1] for each in drawn], minlength=5)[[1, 2, 4]] / 4000
    powers = np.array([0.5, 0.25, 0.125]) ** 2
    np.testing.assert_allclose(shares, powers / powers.sum(), atol=0.03)
    assert segmentations.first().lengths.tolist() == [3, 1]


def test_another_process_draws_the_same(tokenizer, tmp_path):
    epoch = sampled_rows(tokenizer, tmp_path).epoch(3)
    copy = pickle.loads(pickle.dumps(epoch))
    jax.tree.map(np.testing.assert_array_equal, copy[0], epoch[0])
    script = (
        "import sys, hashlib; from pathlib import Path;"
        "from flaxformer_min.data.batches import TrainingBatches;"
        "from flaxformer_min.data.encoding import EncodedPairs;"
        "rows = TrainingBatches(EncodedPairs.load(Path(sys.argv[1])), (64, 64), 4, 0,"
        " subword_sampling=0.1); print(hashlib.sha256(rows.epoch(3)[0].target.ids).hexdigest())"
    )
    command = [sys.executable, "-c", script, str(epoch.encoded.folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == hashlib.sha256(epoch[0].target.ids).hexdigest()

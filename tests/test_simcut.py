"""SimCut: a sentence pair and its copy without some embeddings must be predicted alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_min.config import Config, ModelConfig, TrainingConfig
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import CUT, EOS, Batch, Tokens, shift_right
from flaxformer_min.training.loss import sum_over_tokens
from flaxformer_min.training.step import TrainState, cut_copy, gradient_sums, init_state, randomness

CONFIG = ModelConfig(
    vocab_size=13,
    source_vocab_size=13,
    embeddings="separate",
    num_layers=1,
    d_model=8,
    d_ff=8,
    num_heads=2,
    dropout=0.0,
    dtype="float32",
)
MODEL = Transformer(CONFIG)
ZERO = 12
"""A piece of both vocabularies whose embedding is zero."""

TRAINING = TrainingConfig(simcut=3.0, simcut_share=0.4)


def packed_rows():
    """Two rows of 10 tokens; the first holds two sentences."""
    ids = [[5, 6, 7, 8, EOS, 9, 10, 11, EOS, 0], [7, 8, 9, 10, 11, 4, 5, 6, 7, EOS]]
    positions = [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0], [*range(10)]]
    segments = [[1, 1, 1, 1, 1, 2, 2, 2, 2, 0], [1] * 10]
    source = Tokens(*(jnp.array(each, jnp.int32) for each in (ids, positions, segments)))
    return Batch(source, source._replace(ids=jnp.where(source.ids > EOS, 16 - source.ids, EOS)))


@pytest.fixture(scope="module")
def params():
    params = init_state(MODEL, Config(model=CONFIG)).params
    for side in ("source_embedding", "target_embedding"):
        params[side]["table"] = params[side]["table"].at[ZERO].set(0.0)
    return params


def random_of(rows=2, step=0, device=0):
    state = TrainState(jnp.int32(step), None, None, jax.random.key(1))
    return randomness(state, device, 0, rows, TRAINING)


def zeroed(batch):
    """The batch with a piece whose embedding is zero in place of each id that is cut."""
    return Batch(*(side._replace(ids=jnp.where(side.ids == CUT, ZERO, side.ids)) for side in batch))


def read(params, batch):
    return MODEL.apply({"params": params}, batch, method="hidden_states")


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_the_model_reads_a_zero_and_the_position_of_what_is_cut(params):
    batch = packed_rows()
    cut = cut_copy(batch, random_of(), 0.4)
    assert all((side.ids == CUT).any() for side in cut)
    found = read(params, cut)
    np.testing.assert_array_equal(found, read(params, zeroed(cut)))
    assert jnp.abs(found - read(params, batch)).max() > 0.01


def test_the_loss_is_the_cross_entropy_of_the_whole_and_its_divergence_from_the_cut(params):
    """Gao et al. 2022: CE(whole) + α KL(whole || cut), token by token, in float64."""
    batch = packed_rows()
    both = (batch, zeroed(cut_copy(batch, random_of(), 0.4)))
    p, q = (log_softmax(MODEL.apply({"params": params}, each)) for each in both)
    expected = whole = 0.0
    for row, column in np.argwhere(np.asarray(batch.target.segments) > 0):
        right = p[row, column, batch.target.ids[row, column]]
        whole -= right
        expected -= 0.9 * right + 0.1 * p[row, column].mean()
        expected += 3 * (np.exp(p[row, column]) * (p - q)[row, column]).sum()
    _, sums = gradient_sums(MODEL, params, batch, random_of(), TRAINING)
    assert float(sums.loss) == pytest.approx(expected, rel=1e-5)
    assert float(sums.negative_log_likelihood) == pytest.approx(whole, rel=1e-5)
    assert float(sums.tokens) == 19


def test_gradients_flow_through_both_predictions():
    """Section 3 of the paper: stopping one of them costs BLEU."""
    numbers = np.random.default_rng(0)
    hidden_states, kernel = (
        jnp.asarray(numbers.normal(size=shape), jnp.float32) for shape in ((2, 3, 4, 6), (6, 9))
    )
    labels, real = jnp.ones((3, 4), jnp.int32), jnp.ones((3, 4), jnp.int32)

    def ours(hidden_states, kernel):
        return sum_over_tokens(lambda x: x @ kernel, hidden_states, labels, real, simcut=2.0).loss

    def plain(hidden_states, kernel):
        p, q = jax.nn.log_softmax(hidden_states @ kernel)
        return -p[..., 1].sum() + 2 * (jnp.exp(p) * (p - q)).sum()

    both = [jax.grad(loss, (0, 1))(hidden_states, kernel) for loss in (ours, plain)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *both)
    assert jnp.abs(both[0][0]).max(axis=(1, 2, 3)).min() > 0.01


def test_each_token_is_cut_with_the_given_probability_but_what_begins_and_ends_is_read():
    """The decoder reads BOS in place of the last token of the sentence before (`shift_right`)."""
    rows = jax.tree.map(lambda x: jnp.tile(x, (1_000, 1)), packed_rows())
    cut = cut_copy(rows, random_of(2_000), 0.05)
    inputs = cut.source.ids, shift_right(cut.target).ids
    fixed = rows.source.ids == EOS, rows.target.positions == 0
    for ids, always in zip(inputs, fixed, strict=True):
        assert (ids[always] != CUT).all()
        assert (ids[~always] == CUT).mean() == pytest.approx(0.05, abs=0.005)
    assert ((cut.source.ids == CUT) != (cut.target.ids == CUT)).any()


def test_what_is_cut_depends_on_the_step_and_the_row_but_not_on_the_devices():
    one = packed_rows()
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]), one)
    whole = cut_copy(two, random_of(4), 0.4)
    parts = [cut_copy(one, random_of(2, device=device), 0.4) for device in (0, 1)]
    other_step = cut_copy(two, random_of(4, step=1), 0.4)
    for number, side in enumerate(whole):
        joined = jnp.concatenate([part[number].ids for part in parts])
        np.testing.assert_array_equal(side.ids, joined)
        assert (side.ids[:2] != side.ids[2:]).any()
        assert (side.ids != other_step[number].ids).any()


def test_simcut_and_r_drop_exclude_each_other():
    with pytest.raises(ValueError, match=r"only one of them can be above 0; got 3.0 and 5.0"):
        dataclasses.replace(TRAINING, r_drop=5.0)

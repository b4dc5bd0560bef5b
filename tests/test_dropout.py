"""Dropout: the share that is dropped, and where in the figure it is applied."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from numpy.testing import assert_allclose, assert_array_equal

from flaxformer_min.config import ModelConfig
from flaxformer_min.kernels.dropout import hashed_words, keep_mask
from flaxformer_min.model.add_and_norm import AddAndNorm
from flaxformer_min.model.dropout import Dropout
from flaxformer_min.model.embedding import Embedding
from flaxformer_min.model.feed_forward import FeedForward
from flaxformer_min.model.multi_head_attention import MultiHeadAttention
from flaxformer_min.tokens import one_sentence_per_row

SHAPE = (101, 1999)
SIZE = 101 * 1999


def binomial_error(rate, size):
    """Five standard deviations of the share of successes."""
    return 5 * math.sqrt(rate * (1 - rate) / size)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.999])
def test_dropout_drops_its_share_and_scales_up_the_rest_so_that_the_mean_stays(rate):
    """Srivastava et al. 2014: kept values are divided by the share that is kept."""
    layer = jax.jit(lambda x, key: Dropout(rate).apply({}, x, rngs={"dropout": key}))
    x = np.random.default_rng(0).uniform(1, 2, SHAPE).astype(np.float32)
    ratio = np.asarray(layer(x, jax.random.key(2))) / x
    assert abs((ratio == 0).mean() - rate) < binomial_error(rate, SIZE)
    assert_allclose(ratio[ratio != 0], 1 / (1 - rate), rtol=1e-5)


def test_neighbours_are_dropped_independently():
    """Next to each other, and below each other."""
    keep = np.asarray(keep_mask(jax.random.key(3), 0.3, SHAPE, jnp.arange(101))).ravel()
    for distance in (1, 2, 4, 1999):
        correlation = np.corrcoef(keep[:-distance], keep[distance:])[0, 1]
        assert abs(correlation) < 5 / math.sqrt(SIZE)


def test_bits_of_hashed_words_are_fair_and_independent_of_each_other():
    """A fair coin for each of the 32 bits, and no two of them alike more often than not."""
    rows = jnp.arange(1 << 16)
    words = np.asarray(hashed_words(jax.random.key(6), (1 << 16,), rows))
    bits = (words[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < 5 * math.sqrt(0.25 / (1 << 16))
    correlation = np.corrcoef(bits.T) - np.eye(32)
    assert np.abs(correlation).max() < 5 / math.sqrt(1 << 16)


def test_rows_and_keys_have_unrelated_words():
    """In the order of a batch, with the negative numbers of a second pass, and by another key."""
    rows = jnp.concatenate([jnp.arange(32), -1 - jnp.arange(32)])
    one, other = (hashed_words(jax.random.key(seed), (64, 1024), rows) for seed in (7, 8))
    high = (np.concatenate([one, other]) >> 24).astype(np.float32)
    assert np.abs(np.corrcoef(high) - np.eye(128)).max() < 6 / math.sqrt(1024)
    assert np.abs(np.corrcoef(high.T[:64]) - np.eye(64)).max() < 6 / math.sqrt(128)


def test_without_a_key_or_a_rate_dropout_is_the_identity():
    """Section 5.4 is about training: translation gives no key and loses nothing."""
    x, rngs = jnp.arange(12.0).reshape(3, 4), {"dropout": jax.random.key(0)}
    assert_array_equal(Dropout(0.9).apply({}, x), x)
    assert_array_equal(Dropout(0.0).apply({}, x, rngs=rngs), x)
    assert Dropout(0.5).apply({}, x.astype(jnp.bfloat16), rngs=rngs).dtype == jnp.bfloat16


def check_rate(values, rate, kept_value):
    """Of `values`, a share of `rate` is zero and the rest is `kept_value`, scaled up."""
    values = np.asarray(values)
    assert abs((values == 0).mean() - rate) < binomial_error(rate, values.size)
    assert_allclose(values[values != 0], kept_value / (1 - rate), rtol=1e-5)


def apply_with_key(module, params, *arguments, method=None):
    """`module` on `arguments` with a dropout key."""
    call = jax.jit(
        lambda *given: module.apply(
            params, *given, method=method, rngs={"dropout": jax.random.key(7)}
        )
    )
    return call(*arguments)


def test_embeddings_with_their_positions_are_dropped_out():
    """Section 5.4: "to the sums of the embeddings and the positional encodings"."""
    module = Embedding(ModelConfig(d_model=64, dropout=0.3), vocab_size=5)
    tokens = one_sentence_per_row(jnp.full((3, 50), 4))
    params = {"params": {"table": jnp.full((5, 64), 1.0)}}
    plain = jax.jit(module.apply)(params, tokens)
    assert (plain != 0).all()
    check_rate(apply_with_key(module, params, tokens) / plain, 0.3, 1.0)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_output_of_a_sub_layer_is_dropped_out_and_the_residual_is_not(norm):
    """Section 5.4: "to the output of each sub-layer, before it is added to the sub-layer input"."""
    module = AddAndNorm(ModelConfig(d_model=64, dropout=0.3, norm=norm))
    x, output = jnp.full((200, 64), 5.0), jnp.full((200, 64), 2.0)
    params = {"params": {"norm": {"scale": jnp.ones(64), "bias": jnp.zeros(64)}}}
    total = np.asarray(apply_with_key(module, params, x, output, method=AddAndNorm.add))
    if norm == "pre":
        check_rate(total - 5, 0.3, 2.0)
    else:  # behind the norm a dropped value is what is below the mean of its row
        assert abs((total < 0).mean() - 0.3) < binomial_error(0.3, total.size)
        assert_allclose(total.mean(-1), 0, atol=1e-4)


def test_feed_forward_dropout_is_behind_the_relu():
    """Not in the paper: an inner layer of ones, and an outer one that lets it through."""
    config = ModelConfig(d_model=64, d_ff=64, feed_forward_dropout=0.3)
    inner = {"kernel": jnp.zeros((64, 64)), "bias": jnp.ones(64)}
    outer = {"kernel": jnp.eye(64), "bias": jnp.zeros(64)}
    params = {"params": {"inner": inner, "outer": outer}}
    x = jnp.ones((100, 64))
    check_rate(apply_with_key(FeedForward(config), params, x), 0.3, 1.0)
    assert_array_equal(FeedForward(config).apply(params, x), x)


def test_attention_dropout_is_applied_to_the_weights_but_not_to_those_recorded():
    """Not in the paper: all queries attend to 64 positions equally, and gather one-hot values."""
    module = MultiHeadAttention(ModelConfig(d_model=64, num_heads=1, attention_dropout=0.3))
    nothing = {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}
    through = {"kernel": jnp.eye(64), "bias": jnp.zeros(64)}
    params = {"params": dict(query=nothing, key=nothing, value=through, output=through)}

    def attend(module, x):
        gathered = module(x, module.keys_values(x), jnp.ones((4, 64, 64), bool))
        return gathered, module.variables["intermediates"]["weights"][0]

    call = jax.jit(
        lambda x, key: module.apply(
            params, x, method=attend, rngs={"dropout": key}, mutable=["intermediates"]
        )
    )
    (gathered, weights), _ = call(jnp.tile(jnp.eye(64)[None], (4, 1, 1)), jax.random.key(7))
    check_rate(gathered, 0.3, 1 / 64)
    assert_allclose(weights, np.full((4, 1, 64, 64), 1 / 64), rtol=1e-5)


def test_a_whole_model_is_noisy_by_its_key_alone():
    """Section 5.4: the same key drops the same, another key other values."""
    sizes = dict(vocab_size=11, num_layers=1, d_model=4, d_ff=4, num_heads=1)
    tiny = reference.tiny(ModelConfig(**sizes, dropout=0.3))
    noisy = jax.jit(lambda key: tiny.model.apply(tiny.params, tiny.batch, rngs={"dropout": key}))
    first, again, other = (np.asarray(noisy(jax.random.key(seed))) for seed in (0, 0, 1))
    assert_array_equal(first, again)
    assert (first != other).any(axis=-1).all()


def masked(x, rows):
    """The values after dropout of rows with these numbers."""
    rngs = {"dropout": jax.random.key(3)}
    return Dropout(0.5).apply({}, x, jnp.array(rows, jnp.int32), rngs=rngs)


def test_the_mask_of_a_row_depends_on_its_number_and_not_on_its_place():
    alone, first, last = (masked(jnp.ones((len(n), 99)), n) for n in ([7], [7, -8], [-8, 2, 7]))
    assert_array_equal(alone[0], first[0])
    assert_array_equal(alone[0], last[2])
    rows = np.asarray(last) > 0
    assert len({row.tobytes() for row in rows}) == 3 and 0.3 < rows.mean() < 0.7

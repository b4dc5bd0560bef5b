"""Attention against loops over equation 1, and its edge cases."""

import inspect
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from numpy.testing import assert_allclose, assert_array_equal

from flaxformer_min.config import ModelConfig
from flaxformer_min.kernels import attention as kernels
from flaxformer_min.kernels.attention import attention_by_blocks, fused_attention
from flaxformer_min.kernels.backend import compiling_for
from flaxformer_min.kernels.key_value import KeyValue
from flaxformer_min.model import attention
from flaxformer_min.model.attention import (
    attention_weights,
    batched_scaled_dot_product_attention,
    scaled_dot_product_attention,
)
from flaxformer_min.model.multi_head_attention import MultiHeadAttention

BATCH, HEADS, QUERIES, KEYS, D_K, D_V = 2, 3, 5, 7, 11, 13

one_head = jax.jit(scaled_dot_product_attention)
weights_of_one_head = jax.jit(attention_weights)


@pytest.fixture
def heads():
    numbers = np.random.default_rng(1)
    query = numbers.normal(size=(BATCH, HEADS, QUERIES, D_K))
    key = numbers.normal(size=(BATCH, HEADS, KEYS, D_K))
    value = numbers.normal(size=(BATCH, HEADS, KEYS, D_V))
    mask = numbers.random((BATCH, QUERIES, KEYS)) < 0.6
    mask[0, 2] = False  # a query that may attend to nothing
    mask[1, 3] = np.arange(KEYS) == 4  # and one that has no choice
    return [x.astype(np.float32) for x in (query, key, value)] + [mask]


def test_attention_is_equation_1_for_every_head_of_every_sentence(heads):
    """Section 3.2.1, number by number; section 3.2.2: each head attends on its own."""
    query, key, value, mask = heads
    outputs, weights = batched_scaled_dot_product_attention(query, key, value, mask)
    assert outputs.shape == (BATCH, HEADS, QUERIES, D_V)
    assert weights.shape == (BATCH, HEADS, QUERIES, KEYS)
    for b, h in np.ndindex(BATCH, HEADS):
        one = [np.asarray(x[b, h], np.float64) for x in (query, key, value)]
        expected = reference.attention(*one, mask[b])
        assert_allclose(outputs[b, h], expected, rtol=1e-5, atol=1e-6)
        expected_weights = reference.attention_weights(*one[:2], mask[b])
        assert_allclose(weights[b, h], expected_weights, rtol=1e-5)
        output, of_one_head = one_head(query[b, h], key[b, h], value[b, h], mask[b])
        assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
        assert_allclose(of_one_head, expected_weights, rtol=1e-5)
        assert_array_equal(of_one_head, weights_of_one_head(query[b, h], key[b, h], mask[b]))


def test_weights_sum_to_one_and_a_masked_key_gets_exactly_zero(heads):
    query, key, _, mask = heads
    _, weights = batched_scaled_dot_product_attention(query, key, key, mask)
    assert (np.asarray(weights)[np.broadcast_to(~mask[:, None], weights.shape)] == 0).all()
    sums = np.broadcast_to(mask.any(-1)[:, None], weights.shape[:-1])
    assert_allclose(weights.sum(-1), sums, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_query_that_may_attend_to_nothing_gives_zeros_and_finite_gradients(heads, dtype):
    """Section 3.2.3: the softmax of scores that are all -inf would be NaN."""
    query, key, value = (x[0, 0].astype(dtype) for x in heads[:3])
    mask = jnp.asarray(heads[3][0])

    def total(query, key, value):
        output, weights = scaled_dot_product_attention(query, key, value, mask)
        return (output**2).sum().astype(jnp.float32), (output, weights)

    gradients = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))
    gradient, (output, weights) = jax.device_get(gradients(query, key, value))
    assert (output[2] == 0).all() and (weights[2] == 0).all()
    assert all(np.isfinite(g.astype(np.float32)).all() for g in gradient)
    assert (gradient[0][2] == 0).all() and (gradient[0][0] != 0).any()


def test_a_query_that_may_attend_to_nothing_makes_no_nan_on_the_way():
    """Section 3.2.3: a search for NaNs with `jax_debug_nans` passes a row of padding."""
    x, nothing = jnp.ones((1, 2)), jnp.zeros((1, 1), bool)
    with jax.debug_nans(True):
        gradient = jax.grad(lambda x: scaled_dot_product_attention(x, x, x, nothing)[0].sum())(x)
    assert_array_equal(gradient, [[0, 0]])


def test_huge_scores_do_not_overflow():
    """Section 3.2.1: softmax depends on differences of scores, not on their size."""
    size = 1e15
    query = np.full((1, 2), size, np.float32)
    key = np.array([[size, size], [-size, -size], [size, size]], np.float32)
    weights = weights_of_one_head(query, key, np.array([[True, True, False]]))
    assert_array_equal(weights, [[1, 0, 0]])


def test_the_softmax_is_taken_in_float32_also_for_bfloat16():
    """Near 256, bfloat16 has steps of 2: scores of 256 and 257 over √2 would come out alike."""
    query = np.array([[16, 1]]).astype(jnp.bfloat16)
    key = np.array([[16, 0], [16, 1]]).astype(jnp.bfloat16)
    weights = np.asarray(weights_of_one_head(query, key, np.ones((1, 2), bool)))
    share = 1 / (1 + np.exp(-1 / np.sqrt(2)))
    assert weights.dtype == jnp.bfloat16
    assert_allclose(weights.astype(jnp.float32), [[1 - share, share]], rtol=2**-8)


def explicit_attention(query, key, value, mask):
    return batched_scaled_dot_product_attention(query, key, value, mask)[0]


@partial(jax.jit, static_argnums=0)
def output_and_gradients(attend, mask, *arrays):
    """The whole output; then that of queries that may attend to something, and its gradients."""
    output, back = jax.vjp(partial(attend, mask=mask), *arrays)
    is_read = mask.any(axis=-1)[:, None, :, None]
    return output, jnp.where(is_read, output, 0), *back(jnp.where(is_read, jnp.cos(output), 0))


by_blocks = partial(attention_by_blocks, batched_scaled_dot_product_attention)


@pytest.mark.parametrize("attend", [fused_attention, by_blocks], ids=["fused", "by blocks"])
@pytest.mark.parametrize(
    "dtype, error", [("float32", 1e-6), pytest.param("bfloat16", 2**-7, marks=pytest.mark.slow)]
)
def test_attention_without_its_weights_is_attention(heads, dtype, error, attend, monkeypatch):
    """Equation 1 and its gradients; a query that may attend to nothing makes no NaN."""
    monkeypatch.setattr(kernels, "BLOCK", 1)
    query, key, value = (x[..., :D_K].astype(dtype) for x in heads[:3])
    (_, *expecteds), (output, *founds) = (
        output_and_gradients(each, heads[3], query, key, value)
        for each in (explicit_attention, attend)
    )
    for expected, found in zip(expecteds, founds, strict=True):
        assert found.dtype == dtype
        expected, found = (np.asarray(x, np.float64) for x in (expected, found))
        assert_allclose(found, expected, atol=error * np.abs(expected).max())
    assert jnp.isfinite(output).all() and (founds[1][0, :, 2] == 0).all()


@pytest.mark.parametrize(
    "attend, expected", [(by_blocks, 0), (fused_attention, 2.5)], ids=["by blocks", "fused"]
)
def test_a_query_that_may_attend_to_nothing_gives_zeros_or_if_fused_the_mean(
    attend, expected, monkeypatch
):
    monkeypatch.setattr(kernels, "BLOCK", 1)
    value = jnp.array([[[[1.0], [4.0]]]])
    output = attend(value, value, value, jnp.zeros((1, 2, 2), bool))
    assert_allclose(output, np.full((1, 1, 2, 1), expected), rtol=1e-6)


H100 = SimpleNamespace(platform="gpu", compute_capability="9.0")
MI250 = SimpleNamespace(platform="gpu", compute_capability="gfx90a")


@pytest.mark.parametrize(
    "device, dtype, queries, d_k, supported",
    [
        (H100, "bfloat16", 64, 128, True),
        (SimpleNamespace(platform="tpu"), "bfloat16", 64, 64, False),
        (MI250, "bfloat16", 64, 64, False),
        (H100, "float32", 64, 64, False),
        (H100, "bfloat16", 63, 64, False),
        (H100, "bfloat16", 64, 60, False),
        (H100, "bfloat16", 64, 256, False),
    ],
)
@pytest.mark.parametrize("attached", [True, False])
def test_flash_attention_is_requested_only_where_it_is_supported(
    monkeypatch, device, dtype, queries, d_k, supported, attached
):
    """By the rules of jax; cuDNN refuses anything else with an error. The device that a program is
    compiled for decides, attached or not.
    """
    if attached:
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
    requested = []

    def attention(query, key, value, mask, implementation):
        requested.append(implementation)
        assert (query.shape, mask.shape) == ((2, queries, 3, d_k), (2, 1, queries, 32))
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    query, key = (jax.ShapeDtypeStruct((2, 3, length, d_k), dtype) for length in (queries, 32))
    mask = jax.ShapeDtypeStruct((2, queries, 32), bool)
    # A new function each time: shapes of one that was traced before are cached.
    with compiling_for(None if attached else [device]):
        jax.eval_shape(lambda *arrays: fused_attention(*arrays), query, key, key, mask)
    assert requested == ["cudnn" if supported else "xla"]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_each_sentence_stores_keys_and_values_at_its_own_positions(platform):
    """In a numpy loop. Nothing else changes, nor when the cache is resized."""
    rng = np.random.default_rng(0)
    stored = [rng.normal(size=(3, 2, 12, d)).astype(np.float32) for d in (4, 5)]
    new = [rng.normal(size=(3, 2, 2, d)).astype(np.float32) for d in (4, 5)]
    expected = [each.copy() for each in stored]
    positions = np.array([[0, 1], [11, 6], [10, 3]], np.int32)
    for side in (0, 1):
        for sentence, both in enumerate(positions):
            for number, position in enumerate(both):
                expected[side][sentence, :, position] = new[side][sentence, :, number]
    with compiling_for([SimpleNamespace(platform=platform)]):
        after = KeyValue(*map(jnp.asarray, stored)).store(
            KeyValue(*map(jnp.asarray, new)), jnp.asarray(positions)
        )
    for found, side in zip(after, expected, strict=True):
        assert_array_equal(found, side)
    for size in (5, 14):
        for found, side in zip(after.resize(size), expected, strict=True):
            cut = np.pad(side, ((0, 0), (0, 0), (0, 2), (0, 0)))[:, :, :size]
            assert_array_equal(found, cut)


MASKS = {
    "added to the scores": np.where(np.tri(4), 0.0, -1e9)[None].repeat(4, 0).astype(np.float32),
    "of one sentence": (np.tri(4) > 0)[None],
    "with heads, as Flax has it": (np.tri(4) > 0)[None, None].repeat(4, 0),
    "of keys alone": np.ones((4, 1, 4), bool),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_of_another_kind_is_refused(mask):
    """As many sentences as queries: broadcast, some of these would mean something else."""
    module = MultiHeadAttention(ModelConfig(d_model=6, num_heads=3, dtype="float32"))
    x = jnp.ones((4, 4, 6))
    untyped = inspect.unwrap(MultiHeadAttention.__call__)  # without these tests' own type check

    def attend(module, x, mask):
        return untyped(module, x, module.keys_values(x), mask)

    rule = r"must have the shape \(4, 4, 4\) and the type bool, True where .*; got \("
    with pytest.raises(ValueError, match=rule):
        module.init(jax.random.key(0), x, jnp.asarray(mask), method=attend)
    with pytest.raises(ValueError, match="the type bool, .*; got .* of float32"):
        inspect.unwrap(attention.attention_weights)(x[0], x[0], jnp.where(jnp.tri(4), 0.0, -1e9))


@pytest.mark.parametrize("sentences, queries, keys", [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_attention_of_nothing_is_nothing(sentences, queries, keys):
    module = MultiHeadAttention(ModelConfig(d_model=6, num_heads=3, dtype="float32"))
    x, attended = jnp.ones((sentences, queries, 6)), jnp.ones((sentences, keys, 6))

    def attend(module, x, attended, mask):
        return module(x, module.keys_values(attended), mask)

    mask = jnp.ones((sentences, queries, keys), bool)
    output, params = module.init_with_output(jax.random.key(0), x, attended, mask, method=attend)
    assert output.shape == x.shape
    if not keys:
        assert_array_equal(output, jnp.zeros_like(x))


@pytest.mark.parametrize(
    "device", [SimpleNamespace(platform="cpu"), SimpleNamespace(platform="tpu"), H100]
)
def test_multi_head_attention_is_its_heads_side_by_side_and_projected(device):
    """Section 3.2.2: Concat(head_1, ..., head_h) W^O, for self- and for cross-attention."""
    numbers = np.random.default_rng(2)
    x, seen = (numbers.normal(size=(1, n, 6)).astype(np.float32) for n in (4, 5))
    mask = numbers.random((1, 4, 5)) < 0.7
    module = MultiHeadAttention(ModelConfig(d_model=6, num_heads=3, dtype="float32"))

    def attend(module, x, attended, mask):
        return module(x, module.keys_values(attended), mask)

    params = reference.random_params(reference.MethodOf(module, attend), x, seen, mask)
    plain = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])
    apply = jax.jit(partial(module.apply, method=attend, mutable=["intermediates"]))
    for attended, allowed in [(seen, mask), (x, mask[:, :, :4])]:
        with compiling_for([device]):
            output, state = jax.device_get(apply(params, x, attended, allowed))
        expected, weights = reference.multi_head_attention(
            np.asarray(x[0]), np.asarray(attended[0]), allowed[0], plain, num_heads=3
        )
        assert_allclose(output[0], expected, rtol=1e-5, atol=1e-6)
        assert_allclose(state["intermediates"]["weights"][0][0], weights, rtol=1e-5, atol=1e-7)

"""Positional encoding against the formula, number by number, and against a pocket calculator."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from numpy.testing import assert_allclose, assert_array_equal

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.positions import batched_sinusoidal_encoding, sinusoidal_encoding
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import Batch, one_sentence_per_row

encoding = jax.jit(sinusoidal_encoding, static_argnums=(1, 2))
batched = jax.jit(batched_sinusoidal_encoding, static_argnums=(1, 2))


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_positions_are_encoded_by_the_formula(layout):
    """Section 3.5, in any order and with gaps, as positions of packed rows come."""
    positions = np.array([[0, 1, 2, 0, 1], [3, 3, 17, 40, 0]])
    expected = [reference.sinusoidal_encoding(row, 14, layout) for row in positions]
    actual = batched(jnp.asarray(positions), 14, layout)
    assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    actual = encoding(jnp.asarray(positions[1]), 14, layout)
    assert_allclose(actual, expected[1], rtol=1e-5, atol=1e-5)


def test_sines_and_cosines_are_those_of_a_pocket_calculator():
    """Section 3.5, d_model 4: position 1 has the angles 1 and 1/100, position 3 thrice that."""
    expected = [
        [0.841471, 0.540302, 0.00999983, 0.999950],
        [0.141120, -0.989992, 0.0299955, 0.999550],
    ]
    assert_allclose(encoding(jnp.array([1, 3]), 4), expected, rtol=1e-5)
    halves = [[0.841471, 0.00999983, 0.540302, 0.999950]]
    assert_allclose(encoding(jnp.array([1]), 4, "halves"), halves, rtol=1e-5)


def test_both_layouts_hold_the_same_numbers():
    """Section 3.5: halves are the interleaved columns 0, 2, 4, ... and then 1, 3, 5, ..."""
    positions = jnp.arange(9)
    interleaved = np.asarray(encoding(positions, 10))
    halves = np.concatenate([interleaved[:, ::2], interleaved[:, 1::2]], axis=1)
    assert_array_equal(encoding(positions, 10, "halves"), halves)


def test_a_shift_is_a_rotation_that_is_the_same_everywhere():
    """Section 3.5: PE(pos + k) is a linear function of PE(pos); here for k = 3."""
    here, there = (np.asarray(encoding(jnp.arange(20) + k, 8)) for k in (0, 3))
    angle = 3 / 10000 ** (np.arange(4) * 2 / 8)
    sine = here[:, ::2] * np.cos(angle)[None] + here[:, 1::2] * np.sin(angle)[None]
    cosine = here[:, 1::2] * np.cos(angle)[None] - here[:, ::2] * np.sin(angle)[None]
    assert_allclose(there[:, ::2], sine, rtol=1e-5, atol=1e-5)
    assert_allclose(there[:, 1::2], cosine, rtol=1e-5, atol=1e-5)


def test_a_model_that_saw_50_positions_reads_position_5000():
    """Section 3.5, "may allow the model to extrapolate": nothing in it has a length.

    An angle of 5,000 in float32 is known to 5,000 · 2⁻²³ or so, hence the tolerance.
    """
    model = Transformer(ModelConfig(vocab_size=7, num_layers=1, d_model=8, d_ff=8, num_heads=2))
    short = one_sentence_per_row(jnp.ones((1, 50), jnp.int32))
    params = reference.random_params(model, Batch(short, short))
    far = one_sentence_per_row(jnp.array([[4, 5, 6]]))
    far = far._replace(positions=far.positions + 5_000)
    table = np.asarray(params["params"]["embedding"]["table"], np.float64)
    expected = reference.embed(far.ids[0], far.positions[0], table, model.config)

    @jax.jit
    def read(source):
        embedded = model.apply(params, source, method=lambda model, ids: model.embed_source(ids))
        near = one_sentence_per_row(far.ids)
        return embedded, model.apply(params, Batch(source, near))

    embedded, scores = read(far)
    assert_allclose(embedded[0], expected, atol=2e-3)
    assert np.isfinite(scores).all()
    assert (np.asarray(scores) != read(one_sentence_per_row(far.ids))[1]).all()


@pytest.mark.parametrize(
    "d_model, layout, error",
    [
        (7, "interleaved", "d_model must be even: sines and cosines come in pairs; got 7."),
        (8, "sines first", "layout must be 'interleaved' or 'halves'; got 'sines first'."),
    ],
)
def test_a_wrong_width_or_layout_is_refused(d_model, layout, error):
    """Section 3.5 gives every frequency two columns."""
    with pytest.raises(ValueError) as raised:
        inspect.unwrap(sinusoidal_encoding)(jnp.arange(3), d_model, layout)
    assert str(raised.value) == error

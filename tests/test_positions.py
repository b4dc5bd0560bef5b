"""Positional encodings against the formula, a pocket calculator, and a table of vectors."""

import inspect
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from letters import Letters
from numpy.testing import assert_allclose

from flaxformer_min.config import ModelConfig
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.model.positions import batched_sinusoidal_encoding, sinusoidal_encoding
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import EOS, Batch, Tokens, one_sentence_per_row

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


def test_a_model_reads_positions_that_it_never_saw():
    """Section 3.5, "may allow the model to extrapolate": no parameter depends on a length.

    An angle of 5,000 has an error of about 5,000 · 2⁻²³ in float32, hence the tolerance.
    """
    model = Transformer(ModelConfig(vocab_size=7, num_layers=1, d_model=8, d_ff=8, num_heads=2))
    near = one_sentence_per_row(jnp.array([[4, 5, 6]]))
    far = near._replace(positions=near.positions + 5_000)
    params = reference.random_params(model, Batch(near, near))
    embedding = jax.tree.map(np.asarray, params["params"]["embedding"])
    expected = reference.embed(far.ids[0], far.positions[0], embedding, model.config)
    assert_allclose(model.apply(params, far, method=embed)[0], expected, atol=2e-3)
    apply = jax.jit(model.apply)
    assert (apply(params, Batch(far, near)) != apply(params, Batch(near, near))).all()


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


# ---- learned vectors, and functions of the caller's own ----------------------------------------

LEARNED = ModelConfig(
    vocab_size=30,
    num_layers=1,
    d_model=8,
    d_ff=8,
    num_heads=2,
    positional_encoding="learned",
    max_positions=12,
)


def embed(module, tokens):
    return module.embed_source(tokens)


def tokens_at(*positions):
    """Token 5 at each of these positions of one row."""
    positions = jnp.array([positions])
    return Tokens(jnp.full_like(positions, 5), positions, jnp.ones_like(positions))


@pytest.fixture(scope="module")
def learned():
    """A model with learned vectors of 12 positions, and random parameters."""
    model = Transformer(LEARNED)
    batch = Batch(tokens_at(0, 1), tokens_at(0, 1))
    return model, reference.random_params(model, batch)


def test_a_learned_vector_is_added_to_the_scaled_embedding(learned):
    """Table 3, row E: the table's row of each position, in any order and with gaps."""
    model, params = learned
    tokens = tokens_at(3, 3, 11, 0, 7)
    table = np.asarray(params["params"]["embedding"]["table"], np.float64)
    vectors = np.asarray(params["params"]["embedding"]["positional_encoding"]["table"], np.float64)
    assert vectors.shape == (12, 8)
    expected = table[[5] * 5] * np.sqrt(8) + vectors[[3, 3, 11, 0, 7]]
    for apply in (model.apply, jax.jit(model.apply, static_argnames="method")):
        for given in (params, jax.device_get(params)):
            assert_allclose(apply(given, tokens, method=embed)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("position", [12, -1])
def test_a_position_that_was_never_learned_is_an_error_outside_jit(learned, position):
    """The last learned position is 11. What a jitted function closes over is checked, too."""
    model, params = learned
    read = partial(model.apply, method=embed)
    fits, lacks = tokens_at(0, 11), tokens_at(0, position)
    assert np.isfinite(read(params, fits)).all()
    assert np.isfinite(jax.jit(lambda params: read(params, fits))(params)).all()
    for call in (read, jax.jit(lambda params, _: read(params, lacks))):
        with pytest.raises(ValueError, match=f"positions 0 to 11; got position {position}. Short"):
            call(params, lacks)


def test_a_position_that_was_never_learned_is_nan_inside_jit(learned):
    model, params = learned
    embedded = jax.jit(model.apply, static_argnames="method")(
        params, tokens_at(11, 12, 0, 5_000, 1), method=embed
    )
    assert np.isnan(embedded[0]).all(axis=-1).tolist() == [False, True, False, True, False]
    assert np.isfinite(embedded[0, [0, 2, 4]]).all()


def test_padding_may_lie_beyond_the_learned_positions(learned):
    """Two tokens in rows of 12, which are learned, and of 20 have the same logits."""
    model, params = learned
    few, many = (one_sentence_per_row(jnp.array([[5, 3] + [0] * more])) for more in (10, 18))
    model.apply(params, many, method=embed)  # where positions are known, and checked
    logits = [jax.jit(model.apply)(params, Batch(tokens, tokens)) for tokens in (few, many)]
    assert_allclose(logits[0][:, :2], logits[1][:, :2], rtol=1e-5, atol=1e-6)


def test_a_function_of_positions_replaces_the_encoding_on_both_sides():
    def ramp(positions, d_model):
        return jnp.broadcast_to(positions[:, None] / 10.0, (positions.size, d_model))

    model = Transformer(LEARNED, position_function=ramp)
    tokens = tokens_at(0, 4, 40)
    params = reference.random_params(model, Batch(tokens, tokens))
    assert list(params["params"]["embedding"]) == ["table"]
    expected = np.asarray(params["params"]["embedding"]["table"])[[5] * 3] * np.sqrt(8)
    expected = expected + np.array([[0.0], [0.4], [4.0]])
    for method in (embed, lambda module, tokens: module.embed_target(tokens)):
        assert_allclose(model.apply(params, tokens, method=method)[0], expected, rtol=1e-5)


@pytest.fixture(scope="module")
def translator(learned):
    """Knows 12 positions, and never ends a sentence of its own accord: the row of EOS is small."""
    model, params = learned
    params = jax.tree.map(np.array, params["params"])
    params["embedding"]["table"][EOS] = 0
    params["decoder"]["layer_0"]["feed_forward_norm"]["norm"]["bias"][:] = 9
    params["embedding"]["table"][4:] = np.abs(params["embedding"]["table"][4:])
    letters = Letters(), Letters()
    return Translator([model], [params], letters, max_positions=model.config.max_positions)


def test_a_translation_ends_by_the_last_learned_position(translator):
    """Eleven letters and EOS, though the source and `max_extra_tokens` allow for 53 tokens."""
    found = translator.hypotheses(["AB"])[0][0]
    assert len(found.text) == 11
    assert np.isfinite(found.log_prob)


def test_a_source_of_more_positions_than_were_learned_is_cut_with_a_warning(translator, caplog):
    with caplog.at_level(logging.WARNING, "flaxformer_min"):
        found = translator.hypotheses(["ABCDEFGHIJKLMNO", "ABCDEFGHIJK"])
    assert caplog.messages == ["line 1 has 16 tokens; only its first 11 are read."]
    assert found[0] == found[1]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flaxformer_min"):
        cut, whole = translator.score([("AB", "ABCDEFGHIJKLMNO"), ("AB", "ABCDEFGHIJK")])
    assert caplog.messages == ["target line 1 has 16 tokens; only its first 11 are read."]
    assert cut == whole and np.isfinite(cut.log_probs).all()


@pytest.mark.slow
def test_a_prefix_leaves_the_last_learned_position_to_eos(translator):
    found = translator.hypotheses(["AB"], ["C" * 11], beam_size=1)[0][0]
    assert found.text == "C" * 11 and np.isfinite(found.log_prob)
    with pytest.raises(ValueError, match="prefix 1 has 12 tokens, the limit is 11. Shorten it"):
        translator.hypotheses(["AB"], ["C" * 12])

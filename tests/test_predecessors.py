"""benchmarks/predecessors: the recurrent models are their formulas; packed rows do not leak."""

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from jaxtyping import install_import_hook

with install_import_hook("predecessors", "beartype.beartype"):
    from predecessors import AttentionalRNN, FixedVectorRNN

from flaxformer_min import ModelConfig
from flaxformer_min.tokens import BOS, EOS, Batch, Tokens, one_sentence_per_row

MODELS = [FixedVectorRNN, AttentionalRNN]
CONFIG = ModelConfig(
    vocab_size=11, num_layers=2, d_model=6, d_ff=5, num_heads=1, positional_encoding="none"
)
SOURCES, TARGETS = [[5, 6, 7, EOS], [9, EOS], [8, 4, EOS]], [[10, EOS], [4, 5, 6, EOS], [7, 8, EOS]]


# The specification: one sentence, one number at a time, in float64


def affine(x, p):
    return [
        p["bias"][o] + sum(x[i] * p["kernel"][i][o] for i in range(len(x)))
        for o in range(len(p["bias"]))
    ]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def gru(h, x, p):
    """Cho et al. 2014, with the reset gate after the product."""
    width, from_x = len(h), affine(x, p["input"])
    from_h = [sum(h[i] * p["kernel"][i][o] for i in range(width)) for o in range(3 * width)]
    after = []
    for i in range(width):
        reset = sigmoid(from_x[i] + from_h[i])
        update = sigmoid(from_x[width + i] + from_h[width + i])
        new = math.tanh(from_x[2 * width + i] + reset * (from_h[2 * width + i] + p["bias"][i]))
        after.append(update * h[i] + (1 - update) * new)
    return after


def read(ids, states, p, side):
    """The states of all layers after each token."""
    history = []
    for token in ids:
        x, states = p["embedding"]["table"][token] * math.sqrt(CONFIG.d_model), list(states)
        for layer in range(CONFIG.num_layers):
            states[layer] = x = gru(states[layer], x, p[f"{side}_{layer}"])
        history.append(states)
    return history


def logits(source, target, p, model):
    """Of every target token, given the source and the target before it."""
    nothing = [[0.0] * CONFIG.d_ff] * CONFIG.num_layers
    encoded = read(source[::-1], nothing, p, "encoder")  # from its end
    found = []
    for states in read([BOS, *target[:-1]], encoded[-1], p, "decoder"):
        top = states[-1]
        if model is AttentionalRNN:
            scores = [sum(np.multiply(top, each[-1])) for each in encoded]
            weights = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
            context = sum(w * np.array(each[-1]) for w, each in zip(weights, encoded, strict=True))
            top = [*context, *top]
        x = [math.tanh(number) for number in affine(top, p["output"])]
        found.append([sum(np.multiply(row, x)) for row in p["embedding"]["table"]])
    return np.array(found)


# Rows


def packed(sentences, length):
    """One row with all sentences and padding at its end."""
    columns = np.zeros((3, 1, length), np.int32)
    place = 0
    for segment, ids in enumerate(sentences, start=1):
        part = slice(place, place + len(ids))
        columns[:, 0, part] = ids, range(len(ids)), [segment] * len(ids)
        place += len(ids)
    return Tokens(*map(jnp.asarray, columns))


def padded(sentences, length):
    """One sentence a row."""
    rows = [[*ids, *[0] * (length - len(ids))] for ids in sentences]
    return one_sentence_per_row(jnp.array(rows))


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.__name__)
def drawn(request):
    """The module and parameters: all of them drawn, biases too, so that none can be left out."""
    model = request.param(CONFIG)
    params = model.init(jax.random.key(0), Batch(padded(SOURCES, 4), padded(TARGETS, 4)))["params"]
    rng = np.random.default_rng(1)
    draw = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.6, jnp.float32)  # noqa: E731
    return model, jax.tree.map(draw, params)


def test_a_recurrent_model_is_its_formula(drawn):
    """Packed with others and padding, or alone with padding: the loops see one sentence each."""
    model, params = drawn
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    apply = jax.jit(lambda batch: model.apply({"params": params}, batch))
    row = apply(Batch(packed(SOURCES, 11), packed(TARGETS, 10)))[0]
    alone = apply(Batch(padded(SOURCES, 6), padded(TARGETS, 5)))
    place = 0
    for number, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        expected = logits(source, target, exact, type(model))
        of_row = row[place : place + len(target)]
        np.testing.assert_allclose(of_row, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(alone[number, : len(target)], expected, rtol=1e-4, atol=1e-5)
        place += len(target)


def test_nothing_flows_between_the_sentences_of_a_row_nor_from_padding(drawn):
    """The gradient of one sentence's logits is zero at all tokens of others, and of padding."""
    model, params = drawn
    source, target = packed(SOURCES, 11), packed(TARGETS, 10)

    def second_sentence(table_of_source, table_of_target):
        """Each token has an embedding of its own, so that gradients tell them apart."""
        given = {**params, "embedding": {"table": jnp.concatenate(
            [params["embedding"]["table"], table_of_source, table_of_target])}}  # fmt: skip
        own = Batch(
            source._replace(ids=11 + jnp.arange(11, dtype=jnp.int32)[None]),
            target._replace(ids=22 + jnp.arange(10, dtype=jnp.int32)[None]),
        )
        wide = type(model)(ModelConfig(**{**vars(CONFIG), "vocab_size": 32}))
        return (wide.apply({"params": given}, own)[0, :, :11] ** 2)[target.segments[0] == 2].sum()

    tables = [jnp.ones((n, CONFIG.d_model)) * 0.1 for n in (11, 10)]
    of_source, of_target = (
        np.abs(each).sum(axis=1) for each in jax.grad(second_sentence, (0, 1))(*tables)
    )
    assert ((of_source > 0) == (source.segments[0] == 2)).all()
    read_by_it = (target.segments[0] == 2) & (target.ids[0] != EOS)  # EOS is never read
    assert ((of_target > 0) == read_by_it).all()


def test_decoding_token_by_token_gives_the_logits_of_training(drawn):
    """With any forced prefix, in a beam whose hypotheses change places."""
    model, params = drawn
    apply = lambda *given, method: model.apply({"params": params}, *given, method=method)  # noqa: E731
    source, target = padded(SOURCES, 4), padded(TARGETS, 4)
    expected = model.apply({"params": params}, Batch(source, target))
    cross = apply(apply(source, method="encode"), source, method="precompute_cross_attention")
    prefix = jnp.array([[0, 0], [4, 5], [7, 0]])
    cache, log_probs = apply(cross, 2, 4, prefix, method="prefill")
    teacher = np.asarray(jax.nn.log_softmax(expected))
    forced = [[0, 0], [teacher[1, 0, 4], teacher[1, 1, 5]], [teacher[2, 0, 7], 0]]
    np.testing.assert_allclose(log_probs, forced, rtol=1e-5, atol=1e-6)
    # Slot 0 reads the target; slot 1 reads something else, and then takes over from slot 0.
    tokens = jnp.array([[BOS, 8], [5, 8], [7, 8]])
    found, cache = apply(tokens, cross, cache, method="decode_step")
    rows, lengths = np.arange(3), np.array([0, 2, 1])
    np.testing.assert_allclose(found[:, 0], expected[rows, lengths], rtol=1e-4, atol=1e-5)
    cache = cache.resize(9).reorder(jnp.array([[1, 0]] * 3))
    newest = jnp.stack([jnp.full(3, 9), target.ids[rows, lengths]], axis=1)
    found, _ = apply(newest, cross, cache, method="decode_step")
    np.testing.assert_allclose(found[:, 1], expected[rows, lengths + 1], rtol=1e-4, atol=1e-5)

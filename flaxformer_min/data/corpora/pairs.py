"""Sentence pairs by number, wherever they lie."""

import abc
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, overload

Pair = tuple[str, str]


VALIDATION_NAMES = ("validation", "val", "valid", "dev")


def is_empty(pair: Pair) -> bool:
    r"""Whether a side says nothing, so that there is nothing to learn from the pair.

    >>> is_empty(("Hello.", " ")), is_empty(("Hello.", "Hallo."))
    (True, False)
    """
    return not all(side.strip() for side in pair)


class Pairs(Sequence[Pair], abc.ABC):
    """Sentence pairs of one split: `len`, `[i]`, `[i:j]` (a list) and a fast iteration.

    It can be pickled, and then holds where the data is, not the data.
    """

    languages: tuple[str, str]

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many pairs there are."""

    @abc.abstractmethod
    def identity(self) -> list:
        """What tells this data from other data, as JSON can hold it."""

    def fingerprint(self) -> str:
        """Sixteen hex digits that change when the pairs do: a key for what is computed from them.

        Files are known by path, size and time, prepared sets by name and version.
        """
        return hashlib.sha256(json.dumps(self.identity()).encode()).hexdigest()[:16]

    @abc.abstractmethod
    def _read(self, indices: range) -> list[Pair]:
        """The pairs of these numbers, all of which exist."""

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index):
        """A pair, or the list of pairs of a slice; IndexError where there is none."""
        if isinstance(index, slice):
            return self._read(range(*index.indices(len(self))))
        place = range(len(self))[index]
        return self._read(range(place, place + 1))[0]

    def __iter__(self) -> Iterator[Pair]:
        """All pairs in order, read in portions, which is faster than one by one."""
        for start in range(0, len(self), 16_384):
            yield from self[start : start + 16_384]


def find_split(wanted: str, known: list[str], where: str) -> str:
    """The split of that name, or the only one that goes by a usual other name for it."""
    if wanted in known:
        return wanted
    if wanted in VALIDATION_NAMES:
        found = [name for name in known if name in VALIDATION_NAMES]
    else:
        found = [name for name in known if wanted == "test" and name.startswith("test")]
    if len(found) > 1:
        raise ValueError(f"{where} has several splits for {wanted!r}: name one of {_list(found)}.")
    if not found:
        raise ValueError(f"{where} has no split {wanted!r}; it has {_list(known) or 'none'}.")
    return found[0]


def _list(names) -> str:
    return ", ".join(sorted(names))


class SequenceOfPairs(Pairs):
    """Any sequence of (source, target) with `len` and `[i]`, such as a list."""

    languages = ("", "")

    def __init__(self, items: Sequence[Pair], name: str):
        """Take the sequence; `name` is what errors call it."""
        self._items, self._name = items, name
        if not len(items):
            raise ValueError(f"{name} must hold at least one pair; it is empty.")

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._items)

    def identity(self) -> list:
        """Return the fingerprint of the sequence if it has one, or else a digest of all pairs."""
        if hasattr(self._items, "fingerprint"):
            return [self._items.fingerprint()]
        digest = hashlib.sha256()
        for pair in self:
            digest.update(json.dumps(pair).encode())
        return [digest.hexdigest()]

    def _read(self, indices: range) -> list[Pair]:
        return [self._checked(i, self._items[i]) for i in indices]

    def _checked(self, index: int, pair: Any) -> Pair:
        if (
            isinstance(pair, str)
            or len(pair) != 2
            or not all(isinstance(side, str) for side in pair)
        ):
            raise ValueError(
                f"{self._name}[{index}] must be a pair of two texts, source and target; got "
                f"{pair!r}."
            )
        return pair[0], pair[1]


def as_pairs(pairs: Any, name: str) -> Pairs:
    """Return any sequence of sentence pairs as `Pairs`.

    Raises ValueError for what has no length or cannot be indexed, and for an empty sequence.
    """
    if isinstance(pairs, Pairs):
        return pairs
    if isinstance(pairs, str) or not hasattr(pairs, "__len__") or not hasattr(pairs, "__getitem__"):
        raise ValueError(
            f"{name} must be a sequence of sentence pairs, with len() and [i]; got "
            f"{type(pairs).__name__}. Make a list of it."
        )
    return SequenceOfPairs(pairs, name)

"""Sentence pairs by number, wherever they lie."""

import abc
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import overload

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


def _two_languages(text: str) -> tuple[str, str]:
    parts = text.split("-")
    if len(parts) != 2 or not all(parts) or parts[0] == parts[1]:
        raise ValueError(
            "Languages must be two different ones, the source first, joined by one hyphen, as in "
            f"en-de; got {text!r}."
        )
    return parts[0], parts[1]


def _find_split(wanted: str, known: list[str], where: str) -> str:
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

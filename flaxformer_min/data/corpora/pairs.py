"""Sequences of sentence pairs."""

import abc
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, overload

from flaxformer_min.data.tokenizer import check_text

Pair = tuple[str, str]

VALIDATION_NAMES = ("validation", "val", "valid", "dev")
"""Names of a validation split; each finds the others."""


def is_empty(pair: Pair) -> bool:
    r"""Return whether a side of the pair has no text.

    >>> is_empty(("Hello.", " ")), is_empty(("Hello.", "Hallo."))
    (True, False)
    """
    return not all(side.strip() for side in pair)


class Pairs(Sequence[Pair], abc.ABC):
    """The sentence pairs of a split: `len`, `[i]`, `[i:j]` (a list) and fast iteration.

    A pickle holds the location of the data, not the data.
    """

    languages: tuple[str, str] = ("", "")

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of pairs."""

    @abc.abstractmethod
    def identity(self) -> list:
        """Return a JSON-serializable description, different for other data."""

    def fingerprint(self) -> str:
        """Return 16 hex digits that identify the pairs, for caches of what is computed from them.

        Files are identified by their content, prepared datasets by name and version.
        """
        return hashlib.sha256(json.dumps(self.identity()).encode()).hexdigest()[:16]

    @abc.abstractmethod
    def _read(self, indices: range) -> list[Pair]:
        """Return the pairs of these indices, all of which are in range."""

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index):
        """Return a pair, or the list of pairs of a slice. Raises IndexError out of range."""
        if isinstance(index, slice):
            return self._read(range(*index.indices(len(self))))
        index = range(len(self))[index]
        return self._read(range(index, index + 1))[0]

    def __iter__(self) -> Iterator[Pair]:
        """Iterate over all pairs, reading many at a time, which is faster than one by one."""
        for start in range(0, len(self), 16_384):
            yield from self[start : start + 16_384]


def find_split(wanted: str, known: list[str], where: str) -> str:
    """Return the split of that name, or the only one with a usual alternative name."""
    found = matching_splits(wanted, known)
    if len(found) > 1:
        raise ValueError(
            f"{where} has several splits for {wanted!r}: name one of {list_names(found)}."
        )
    if not found:
        raise ValueError(f"{where} has no split {wanted!r}; it has {list_names(known) or 'none'}.")
    return found[0]


def matching_splits(wanted: str, known: list[str]) -> list[str]:
    """Return the split of that name, or else all with a usual alternative name."""
    if wanted in known:
        return [wanted]
    if wanted in VALIDATION_NAMES:
        return [name for name in known if name in VALIDATION_NAMES]
    return [name for name in known if wanted == "test" and name.startswith("test")]


def list_names(names: Iterable[str]) -> str:
    """Return sorted names, separated by commas."""
    return ", ".join(sorted(names))


class SequenceOfPairs(Pairs):
    """Any sequence of (source, target) with `len` and `[i]`, such as a list."""

    def __init__(self, items: Sequence[Pair], name: str):
        """Take the sequence, and its name in errors."""
        self._items, self._name = items, name
        if not len(items):
            raise ValueError(f"{name} must hold at least one pair; it is empty.")

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._items)

    def identity(self) -> list:
        """Return the fingerprint of the sequence if it has one, else a digest of all pairs."""
        if hasattr(self._items, "fingerprint"):
            return [self._given_fingerprint()]
        digest = hashlib.sha256()
        for pair in self:
            digest.update(json.dumps(pair).encode())
        return [digest.hexdigest()]

    def _given_fingerprint(self) -> str:
        given = self._items.fingerprint
        try:
            found = given() if callable(given) else given
        except OSError as error:  # or it would be taken for one of writing the cache
            raise ValueError(
                f"fingerprint of {self._name} must be readable; it raised {error!r}. Start again "
                "once it can be read."
            ) from error
        if not callable(given) or not isinstance(found, str):
            raise ValueError(
                f"fingerprint of {self._name} must be a method that returns a text; got {found!r}."
            )
        return found

    def _read(self, indices: range) -> list[Pair]:
        return [self._checked(i, self._item(i)) for i in indices]

    def _item(self, index: int) -> Any:
        try:
            return self._items[index]
        except (LookupError, TypeError) as error:
            raise ValueError(
                f"{self._name} must hold pairs by their numbers, from 0; {self._name}[{index}] "
                f"raised {error!r}. Make a list of it."
            ) from error
        except OSError as error:  # or it would be taken for one of writing the cache
            raise ValueError(
                f"{self._name} must be readable; {self._name}[{index}] raised {error!r}. Start "
                "again once it can be read."
            ) from error

    def _checked(self, index: int, pair: Any) -> Pair:
        if (
            isinstance(pair, (str, Mapping, Set))
            or not hasattr(pair, "__len__")
            or len(pair) != 2
            or not all(isinstance(side, str) for side in pair)
        ):
            raise ValueError(
                f"{self._name}[{index}] must be a pair of two texts, source and target; got "
                f"{pair!r}."
            )
        for side in pair:
            check_text(side, f"of {self._name}[{index}]")
        return pair[0], pair[1]


def as_pairs(pairs: Any, name: str) -> Pairs:
    """Return any sequence of sentence pairs as `Pairs`.

    Raises ValueError for an object without length or indexing, and for an empty sequence.
    """
    if isinstance(pairs, Pairs):
        return pairs
    is_sequence = hasattr(pairs, "__len__") and hasattr(pairs, "__getitem__")
    if isinstance(pairs, (str, Mapping)) or not is_sequence:
        raise ValueError(
            f"{name} must be a sequence of sentence pairs, with len() and [i]; got "
            f"{type(pairs).__name__}. Make a list of it."
        )
    return SequenceOfPairs(pairs, name)

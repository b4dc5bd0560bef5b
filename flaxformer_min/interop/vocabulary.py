"""The vocabulary of an imported model, reordered so that the special tokens have our ids."""

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_min.tokens import BOS, EOS, PAD, UNK

LOGGER = logging.getLogger("flaxformer_min")

SUPPRESSED = -100.0
"""Bias of an added token's logit: low enough that its probability is negligible, but not so low
that label smoothing over it would dominate the loss in fine-tuning."""

ZEROS = -1
"""The imported id of a token that the model does not have: its embedding is zero."""


class Specials(NamedTuple):
    """Ids of the special tokens in an imported vocabulary; None where it has no such token.

    start: what its decoder reads first; None is an embedding of zeros.
    """

    pad: int | None
    unk: int
    start: int | None
    eos: int


class Vocabulary(NamedTuple):
    """A vocabulary in our order.

    pieces:   by our ids.
    order:    the imported id of each of ours; ZEROS for a token that the model does not have.
    size:     number of imported ids, all of which are in `order`.
    added:    our ids of tokens that the model does not have, or has under another of our ids.
    unnamed:  our ids of embeddings that no piece belongs to.
    symbols:  pieces that are split off a text before it is segmented.
    """

    pieces: list[str]
    order: np.ndarray
    size: int
    added: tuple[int, ...]
    unnamed: tuple[int, ...] = ()
    symbols: tuple[str, ...] = ()

    def reorder(self, values: np.ndarray, axis: int) -> np.ndarray:
        """Return weights with the rows or columns of the vocabulary in our order."""
        reordered = np.take(values, np.maximum(self.order, 0), axis)
        places: list[Any] = [slice(None)] * values.ndim
        places[axis] = self.order == ZEROS
        reordered[tuple(places)] = 0
        return reordered

    def reorder_bias(self, bias: np.ndarray) -> np.ndarray:
        """Return the bias of the logits, with which an added token is never likely."""
        reordered = self.reorder(bias, 0)
        reordered[list(self.added)] = SUPPRESSED
        return reordered

    def our_ids(self, imported: Collection[int]) -> tuple[int, ...]:
        """Return our ids of these, without those of special tokens."""
        return tuple(n for n, old in enumerate(self.order.tolist()) if n > EOS and old in imported)


def make_vocabulary(
    pieces: Sequence[str | None], specials: Specials, symbols: Sequence[str] = ()
) -> Vocabulary:
    """Return the vocabulary with PAD, UNK, BOS and EOS first; the rest keeps its order.

    >>> vocabulary = make_vocabulary(["</s>", "<unk>", "a", "b"], Specials(None, 1, None, 0))
    >>> vocabulary.pieces, vocabulary.order.tolist(), vocabulary.added
    (['<pad>', '<unk>', '<s>', '</s>', 'a', 'b'], [-1, 1, -1, 0, 2, 3], (0, 2))

    pieces: by imported ids; None where an embedding has none.
    """
    first = [ZEROS] * 4
    ours = {EOS: specials.eos, UNK: specials.unk, PAD: specials.pad, BOS: specials.start}
    added: list[int] = []
    for number, old in ours.items():
        if old is None or old in first:
            added.append(number)
        first[number] = ZEROS if old is None else old
    rest = [number for number in range(len(pieces)) if number not in first]
    order = np.array([*first, *rest])
    taken = {*pieces}
    ordered: list[str] = []
    for number, old in enumerate(order.tolist()):
        piece = None if number in added else pieces[old]
        if piece is None:
            name = {PAD: "<pad>", BOS: "<s>"}.get(number, f"<unused{old}>")
            piece = _unique(name, taken)
            taken.add(piece)
        ordered.append(piece)
    unnamed = (n for n, old in enumerate(order.tolist()) if n > EOS and pieces[old] is None)
    return Vocabulary(
        ordered, order, len(pieces), tuple(sorted(added)), tuple(unnamed), tuple(symbols)
    )


def _unique(name: str, taken: Collection[str | None]) -> str:
    """Return `name`, or with the first number that makes it a name that nothing has."""
    numbered = (f"{name[:-1]}{number}>" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def pieces_by_id(content: Mapping[str, Any], path: Path, size: int) -> list[str | None]:
    """Return the pieces of a vocabulary by their ids; None for embeddings behind the last piece.

    Raises ValueError unless each id up to the last comes exactly once, and at least half of the
    `size` embeddings have a piece.
    """
    pieces: dict[int, str] = {}
    for piece, number in content.items():
        if not piece or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in piece):
            raise ValueError(f"{path}: a piece must be text without NUL; got {piece!r}.")
        if type(number) is not int or not 0 <= number < size:
            raise ValueError(
                f"{path}: ids must be whole numbers from 0 to {size - 1:,}, one for each embedding;"
                f" got {number!r} of {piece!r}."
            )
        if number in pieces:
            raise ValueError(
                f"{path}: the id {number} belongs to {pieces[number]!r} and to {piece!r}."
            )
        pieces[number] = piece
    last = max(pieces, default=-1)
    missing = next((number for number in range(last) if number not in pieces), None)
    if missing is None and 2 * (last + 1) < size:
        missing = last + 1
    if missing is not None:
        raise ValueError(f"{path}: no piece has the id {missing}, of {size:,}.")
    if last + 1 < size:
        LOGGER.warning(
            "%s: the last %s of the model's %s embeddings have no piece; they are never produced.",
            path,
            f"{size - last - 1:,}",
            f"{size:,}",
        )
    return [pieces.get(number) for number in range(size)]

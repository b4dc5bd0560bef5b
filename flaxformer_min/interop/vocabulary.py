"""The vocabulary of an imported model, reordered so that the special tokens have our ids."""

import itertools
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxformer_min.data.tokenizer import read_processor
from flaxformer_min.tokens import BOS, EOS, PAD, UNK

LOGGER = logging.getLogger("flaxformer_min")

SUPPRESSED = -100.0
"""Bias of an added token's logit: low enough that its probability is negligible, but not so low
that label smoothing over it would dominate the loss in fine-tuning."""


class Specials(NamedTuple):
    """Ids of the special tokens in the imported model; `start` is what its decoder reads first."""

    pad: int
    unk: int
    start: int
    eos: int


class Vocabulary(NamedTuple):
    """A vocabulary in our order.

    pieces:  by our ids.
    order:   the imported id of each of ours.
    added:   whether BOS is a copy of PAD, which the imported decoder reads first.
    """

    pieces: list[str]
    order: np.ndarray
    added: bool

    def reorder(self, values: np.ndarray, axis: int) -> np.ndarray:
        """Return weights with the rows or columns of the vocabulary in our order."""
        return np.take(values, self.order, axis)

    def our_ids(self, imported: Collection[int]) -> tuple[int, ...]:
        """Return our ids of these, without those of special tokens."""
        return tuple(n for n, old in enumerate(self.order.tolist()) if n > EOS and old in imported)

    def reorder_bias(self, bias: np.ndarray) -> np.ndarray:
        """Return the bias of the logits, with which an added token is never likely."""
        reordered = self.reorder(bias, 0)
        if self.added:
            reordered[BOS] = SUPPRESSED
        return reordered


def make_vocabulary(pieces: Sequence[str], specials: Specials) -> Vocabulary:
    """Return the vocabulary with PAD, UNK, BOS and EOS first; the rest keeps its order.

    >>> pieces = ["</s>", "<unk>", "a", "b", "<pad>"]
    >>> make_vocabulary(pieces, Specials(pad=4, unk=1, start=4, eos=0))[:2]
    (['<pad>', '<unk>', '<s>', '</s>', 'a', 'b'], array([4, 1, 4, 0, 2, 3]))
    """
    first = [0, 0, 0, 0]
    first[PAD], first[UNK], first[BOS], first[EOS] = specials
    rest = [number for number in range(len(pieces)) if number not in specials]
    order = np.array([*first, *rest])
    ordered = [pieces[number] for number in order]
    added = specials.start == specials.pad
    if added:
        names = itertools.chain(["<s>"], (f"<s{number}>" for number in itertools.count(2)))
        ordered[BOS] = next(name for name in names if name not in pieces)
    return Vocabulary(ordered, order, added)


def read_vocabulary(content: dict[str, Any], path: Path, size: int) -> list[str]:
    """Return the pieces of a vocab.json by their ids.

    Raises ValueError unless each id from 0 to `size` - 1 comes exactly once.
    """
    pieces: dict[int, str] = {}
    for piece, number in content.items():
        if not _is_piece(piece):
            raise ValueError(f"{path}: a piece must be text without NUL; got {piece!r}.")
        if type(number) is not int or not 0 <= number < size:
            raise ValueError(
                f"{path}: ids must be whole numbers from 0 to {size - 1:,}, one for each embedding;"
                f" got {number!r} of {piece!r}."
            )
        if number in pieces:
            raise ValueError(
                f"{path}: the id {number} is that of {pieces[number]!r} and of {piece!r}."
            )
        pieces[number] = piece
    if len(pieces) < size:
        missing = next(number for number in range(size) if number not in pieces)
        raise ValueError(f"{path}: no piece has the id {missing}, of {size:,}.")
    return [pieces[number] for number in range(size)]


def _is_piece(piece: str) -> bool:
    return bool(piece) and not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in piece)


def sentencepiece_model(model: bytes, vocabulary: Vocabulary, path: Path) -> bytes:
    """Return a SentencePiece model that segments as `model` does and has the vocabulary's ids.

    Pieces of the vocabulary that `model` lacks belong to the other language: they are marked as
    unused. Those that the vocabulary lacks come behind it.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto

    read_processor(model, path)
    content = proto.ModelProto.FromString(model)
    kinds = proto.ModelProto.SentencePiece.Type
    own = {each.piece: (each.score, each.type) for each in content.pieces}
    if content.trainer_spec.model_type == proto.TrainerSpec.BPE:
        unused = sum(piece not in own for piece in vocabulary.pieces[EOS + 1 :])
        if unused:
            raise ValueError(
                f"{path} is a BPE model, and the vocabulary has {unused:,} pieces that it lacks; "
                "only a unigram model can leave pieces of a joint vocabulary unused."
            )
    del content.pieces[:]
    special = {PAD: kinds.CONTROL, UNK: kinds.UNKNOWN, BOS: kinds.CONTROL, EOS: kinds.CONTROL}
    for number, piece in enumerate(vocabulary.pieces):
        score, kind = own.get(piece, (0.0, kinds.UNUSED))
        if number not in special and kind in (kinds.CONTROL, kinds.UNKNOWN):
            raise ValueError(f"{path}: {piece!r} is a special token of a use that is not known.")
        content.pieces.add(piece=piece, score=score, type=special.get(number, kind))
    known = set(vocabulary.pieces)
    _check_lacking([piece for piece, (_, kind) in own.items() if kind == kinds.NORMAL], known, path)
    for piece, (score, kind) in own.items():
        if piece not in known and kind not in (kinds.CONTROL, kinds.UNKNOWN):
            content.pieces.add(piece=piece, score=score, type=kind)
    _name_specials(content.trainer_spec, vocabulary.pieces)
    return content.SerializeToString(deterministic=True)


def _check_lacking(pieces: list[str], known: set[str], path: Path) -> None:
    """Tell how many pieces of a SentencePiece model the vocabulary lacks; refuse it if most."""
    lacking = sum(piece not in known for piece in pieces)
    if 2 * lacking > len(pieces):
        raise ValueError(
            f"{path} must be the SentencePiece model of the vocabulary, which lacks {lacking:,} of "
            f"its {len(pieces):,} pieces. Is it that of another model, or of the other language?"
        )
    if lacking:
        LOGGER.warning(
            "%s: the vocabulary lacks %s of its %s pieces; what they stand for is read as unknown.",
            path,
            f"{lacking:,}",
            f"{len(pieces):,}",
        )


def _name_specials(trainer_spec: Any, pieces: list[str]) -> None:
    trainer_spec.pad_piece, trainer_spec.pad_id = pieces[PAD], PAD
    trainer_spec.unk_piece, trainer_spec.unk_id = pieces[UNK], UNK
    trainer_spec.bos_piece, trainer_spec.bos_id = pieces[BOS], BOS
    trainer_spec.eos_piece, trainer_spec.eos_id = pieces[EOS], EOS

"""SentencePiece models of an import, rewritten so that their ids are those of its vocabulary."""

import logging
from pathlib import Path
from typing import Any

from flaxformer_min.data.tokenizer import read_processor
from flaxformer_min.interop.vocabulary import Vocabulary
from flaxformer_min.tokens import BOS, EOS, PAD, UNK

LOGGER = logging.getLogger("flaxformer_min")


def sentencepiece_model(model: bytes, vocabulary: Vocabulary, path: Path) -> bytes:
    """Return a SentencePiece model that segments as `model` does and has the vocabulary's ids.

    Pieces of the vocabulary that `model` lacks belong to the other language: they are marked as
    unused. Those that the vocabulary lacks come behind it. The vocabulary's symbols are listed as
    control symbols, which an `ImportedTokenizer` splits off a text.
    """
    from sentencepiece import sentencepiece_model_pb2 as proto

    read_processor(model, path)
    content = proto.ModelProto.FromString(model)
    kinds = proto.ModelProto.SentencePiece.Type
    own = {each.piece: (each.score, each.type) for each in content.pieces}
    for symbol in vocabulary.symbols:
        own.pop(symbol, None)
    # BPE merges to an unused piece, too, and then takes it apart again: last, when this model's own
    # merges are done, which it then leaves as they were.
    last = min((score for score, _ in own.values()), default=0.0) - 1.0
    foreign = last if content.trainer_spec.model_type == content.trainer_spec.BPE else 0.0
    del content.pieces[:]
    special = {PAD: kinds.CONTROL, UNK: kinds.UNKNOWN, BOS: kinds.CONTROL, EOS: kinds.CONTROL}
    for number, piece in enumerate(vocabulary.pieces):
        score, kind = own.get(piece, (foreign, kinds.UNUSED))
        kind = kinds.UNUSED if kind == kinds.UNKNOWN else kind  # there may be only one
        content.pieces.add(piece=piece, score=score, type=special.get(number, kind))
    known = set(vocabulary.pieces)
    _check_lacking([piece for piece, (_, kind) in own.items() if kind == kinds.NORMAL], known, path)
    for piece, (score, kind) in own.items():
        if piece not in known and kind not in (kinds.CONTROL, kinds.UNKNOWN):
            content.pieces.add(piece=piece, score=score, type=kind)
    _name_specials(content.trainer_spec, vocabulary)
    return content.SerializeToString(deterministic=True)


def _check_lacking(pieces: list[str], known: set[str], path: Path) -> None:
    """Tell how many pieces of a SentencePiece model the vocabulary lacks; refuse it if most."""
    lacking = sum(piece not in known for piece in pieces)
    if 2 * lacking > len(pieces):
        raise ValueError(
            f"{path} must be the SentencePiece model of the vocabulary, which lacks {lacking:,} of "
            f"its {len(pieces):,} pieces. Is it of another model, or of the other language?"
        )
    if lacking:
        LOGGER.warning(
            "%s: the vocabulary lacks %s of its %s pieces; what they stand for is read as unknown.",
            path,
            f"{lacking:,}",
            f"{len(pieces):,}",
        )


def _name_specials(trainer_spec: Any, vocabulary: Vocabulary) -> None:
    pieces = vocabulary.pieces
    trainer_spec.pad_piece, trainer_spec.pad_id = pieces[PAD], PAD
    trainer_spec.unk_piece, trainer_spec.unk_id = pieces[UNK], UNK
    trainer_spec.bos_piece, trainer_spec.bos_id = pieces[BOS], BOS
    trainer_spec.eos_piece, trainer_spec.eos_id = pieces[EOS], EOS
    del trainer_spec.control_symbols[:]
    trainer_spec.control_symbols.extend(vocabulary.symbols)

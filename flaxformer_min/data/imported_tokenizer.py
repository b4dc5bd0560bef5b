"""The tokenizer of one side of an imported model: any SentencePiece model, with our special ids."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flaxformer_min.data.tokenizer import (
    TAG,
    Tokenizer,
    check_special_ids,
    check_text,
    read_bytes,
    read_processor,
)
from flaxformer_min.tokens import EOS, UNK

LANGUAGE_TAG = re.compile(">>.*?<<", re.DOTALL)
"""What a text begins with to choose one of several target languages, such as >>deu<<."""


def symbols_of(model: bytes) -> tuple[str, ...]:
    """Return the pieces that an import has listed to be split off a text (its added tokens)."""
    from sentencepiece import sentencepiece_model_pb2 as proto

    return tuple(proto.ModelProto.FromString(model).trainer_spec.control_symbols)


class ImportedTokenizer(Tokenizer):
    """One of two tokenizers that may share a vocabulary; pieces of the other side are never used.

    model:      the bytes of a SentencePiece model that lists the vocabulary in the order of ids.
                Pieces from `vocab_size` on are segmented like the others, and become UNK.
    vocab_size: number of pieces the model has embeddings for.

    Unlike a `Tokenizer` it may normalize texts, and may be unable to spell some. A language tag at
    the beginning of a text is one piece, and so is each of the model's `symbols_of` anywhere; what
    is between them is segmented alone. Raises ValueError unless it has our special ids.
    """

    def __init__(self, model: bytes, vocab_size: int, where: str | Path = "the tokenizer"):
        """Read the model and check its ids."""
        self.model, self._vocab_size = model, vocab_size
        self._processor = read_processor(model, where)
        check_special_ids(self._processor, where)
        if self._processor.vocab_size() < vocab_size:
            raise ValueError(
                f"{where} must have a piece for each of the {vocab_size:,} embeddings of its model;"
                f" it has {self._processor.vocab_size():,}. Copy back the files of one run."
            )
        pieces = [self._processor.id_to_piece(number) for number in range(vocab_size)]
        self._ids = {piece: number for number, piece in enumerate(pieces)}
        self.symbols = tuple(sorted(symbols_of(model), key=len, reverse=True))
        self._tags = {*self.symbols, *filter(TAG.fullmatch, pieces)}
        self._symbols = re.compile("|".join(map(re.escape, self.symbols)) or r"(?!)")

    @classmethod
    def load(cls, path: str | Path, vocab_size: int) -> "ImportedTokenizer":
        """Return the tokenizer that an import wrote. Raises ValueError as the class does."""
        return cls(read_bytes(path), vocab_size, path)

    @property
    def vocab_size(self) -> int:
        """Number of pieces that the model has embeddings for."""
        return self._vocab_size

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text's pieces and EOS."""
        for index, text in enumerate(texts):
            check_text(text, index)
        parts = [self._split(text) for text in texts]
        # By name, because a character that this side does not know may be a piece of the other.
        rests = [rest for each in parts for _, rest in each]
        pieces = iter(self._processor.encode(rests, out_type=str))
        return [
            self._to_ids([piece for whole, _ in each for piece in (*whole, *next(pieces))])
            for each in parts
        ]

    def encode_segmentations(self, text: str, count: int) -> list[list[int]]:
        """Return up to `count` of the likeliest segmentations; the first is `encode`'s.

        A text with a symbol has only that one.
        """
        best, ((tag, rest), *more) = self.encode(text), self._split(text)
        if count == 1 or more:
            return [best]
        others = self._processor.nbest_encode(rest, nbest_size=count, out_type=str)
        encoded = [self._to_ids([*tag, *each]) for each in others]
        return [best, *(ids for ids in encoded if ids != best)][:count]

    def unknown_tags(self, text: str) -> list[str]:
        """Return what looks like a language tag or an added token of the model, but is none."""
        return [tag for tag in TAG.findall(text) if tag not in self._tags] if self._tags else []

    def log_probs(self) -> np.ndarray:
        """Return the unigram log-probability of each piece in nats; 0 where this side has none."""
        scores = super().log_probs()
        return np.minimum(scores, 0.0)

    def _split(self, text: str) -> list[tuple[list[str], str]]:
        """Return whole pieces and the text behind each: a tag or nothing, then a part a symbol."""
        parts, end = [], 0
        whole: list[str] = []
        for match in (*self._symbols.finditer(text), None):
            tag, rest = _split_tag(text[end : match.start() if match else len(text)])
            parts.append(([*whole, *tag], rest))
            whole, end = ([match[0]], match.end()) if match else ([], end)
        return parts

    def _to_ids(self, pieces: list[str]) -> list[int]:
        return [*(self._ids.get(piece, UNK) for piece in pieces), EOS]

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same model."""
        same = isinstance(other, ImportedTokenizer) and self.model == other.model
        return same and self._vocab_size == other._vocab_size

    def __hash__(self) -> int:
        """Return a hash of the model."""
        return hash(self.model)

    def __reduce__(self) -> tuple:
        """Pickle the model's bytes; SentencePiece's object is created from them again."""
        return ImportedTokenizer, (self.model, self._vocab_size)


def _split_tag(text: str) -> tuple[list[str], str]:
    tag = LANGUAGE_TAG.match(text)
    return ([], text) if tag is None else ([tag[0]], text[tag.end() :])

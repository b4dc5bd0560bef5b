"""Tokenization with a SentencePiece unigram model.

`decode(encode(text))` returns the text as the model normalizes it, and with the rule `identity` any
text unchanged: characters that are not in the vocabulary are spelled in bytes. No text becomes a
control token: `</s>` is encoded as four characters.
"""

import contextlib
import hashlib
import io
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from flaxformer_min.system.files import read_file, write_atomically
from flaxformer_min.tokens import BOS, EOS, PAD, UNK

LOGGER = logging.getLogger("flaxformer_min")

SPACE = "\u2581"
"""SentencePiece's sign for a space inside pieces, ▁. It also reads a ▁ in a text as a space."""

INVISIBLE = dict.fromkeys([0xAD, 0x2060, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]) | {
    0x85: " "
}
"""Soft hyphens, joiners and directions, which SentencePiece's rules keep; a line break of EBCDIC.

They are dropped, and the break becomes a space, where a model normalizes at all.
"""

TAG = re.compile(r">>[\w-]{1,40}<<|__[A-Z]+[0-9]*__")
"""A piece of a text that looks like a symbol of some model, such as >>deu<< or __PH1__."""

SPECIAL_IDS = {"PAD": PAD, "UNK": UNK, "BOS": BOS, "EOS": EOS}

TRAINING = {
    "hard_vocab_limit": False,
    "model_type": "unigram",
    "pad_id": PAD,
    "unk_id": UNK,
    "bos_id": BOS,
    "eos_id": EOS,
    "byte_fallback": True,
    "character_coverage": 0.9995,
    "split_digits": True,
    "max_sentence_length": 16_384,
    "num_threads": 4,  # fixed, because the sums of the EM steps, and so the model, depend on it
    "minloglevel": 2,
}
"""Options of SentencePiece's training."""


class Tokenizer:
    """A trained tokenizer. It is pickled and compared by the bytes of its model.

    model: the bytes of a SentencePiece model file.
    where: its name in errors, such as its path.

    Its `symbols` are the pieces that are never split. Raises ValueError unless it is a model of
    SentencePiece with our special ids and byte pieces.
    """

    def __init__(self, model: bytes, where: str | Path = "the tokenizer"):
        """Read the model and check its ids."""
        self.model = model
        self._processor = processor = read_processor(model, where)
        check_special_ids(processor, where)
        self._space_bytes = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        if UNK in self._space_bytes:
            raise ValueError(
                f"{where} must be able to spell any text in bytes; it has no byte pieces. Train it "
                "with train_tokenizer, or with SentencePiece's option --byte_fallback."
            )
        self._symbols = {
            number
            for number in range(processor.vocab_size())
            if processor.get_score(number) == 0
            and not (processor.is_control(number) or processor.is_byte(number))
        } - {UNK}
        self.symbols = tuple(map(processor.id_to_piece, sorted(self._symbols)))
        self._normalizes = "\u00a0" not in processor.normalize("\u00a0")
        # No piece contains a line break, so text after one is segmented as if it were alone.
        self._after_break = len(processor.encode("\n"))
        # A model that reads a line break as a space reads ▁ as one, too.
        self._spells_space = processor.decode(processor.encode("\n")) == "\n"

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Return the tokenizer that `train_tokenizer` wrote.

        Raises ValueError as the class does, and if the file cannot be read.
        """
        return cls(read_bytes(path), path)

    @property
    def vocab_size(self) -> int:
        """Number of pieces, including the 4 special pieces and the 256 bytes."""
        return self._processor.vocab_size()

    @property
    def fingerprint(self) -> str:
        """16 hex digits that identify the model, for caches of what was encoded with it."""
        return hashlib.sha256(self.model).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's pieces and EOS, without BOS (see `shift_right`).

        Raises ValueError for a lone surrogate, which UTF-8 cannot encode.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text, several times faster than one by one."""
        for index, text in enumerate(texts):
            check_text(text, index)
        texts = [self._visible(text) for text in texts]
        batch = self._processor.encode(texts, add_eos=True)
        for index, text in enumerate(texts):
            if self._spells_space and SPACE in text:
                batch[index] = [*self._encode_with_space_signs(text), EOS]
        return batch

    def encode_segmentations(self, text: str, count: int) -> list[list[int]]:
        """Return up to `count` of the likeliest segmentations of a text; the first is `encode`'s.

        A text that contains ▁ has only that one. Raises ValueError as `encode` does.
        """
        best, text = self.encode(text), self._visible(text)
        if SPACE in text or count == 1:
            return [best]
        others = ([*ids, EOS] for ids in self._processor.nbest_encode(text, nbest_size=count))
        # SentencePiece's n best may split symbols.
        kept = [i for i in best if i in self._symbols]
        others = (ids for ids in others if [i for i in ids if i in self._symbols] == kept)
        return [best, *(ids for ids in others if ids != best)][:count]

    def log_probs(self) -> np.ndarray:
        """Return the unigram log-probability of each piece in nats; 0 for special pieces."""
        pieces = range(self.vocab_size)
        return np.array([self._processor.get_score(i) for i in pieces], np.float32)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids before the first EOS, without PAD and BOS.

        Bytes that are not valid UTF-8, which a model may produce, become U+FFFD.
        """
        before_end = itertools.takewhile(lambda i: i != EOS, map(int, ids))
        return self._processor.decode(list(before_end))  # which skips control tokens

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the piece of each id for display: ▁ is a space, <0xEC> a byte."""
        return [self._processor.id_to_piece(int(i)) for i in ids]

    def unknown_tags(self, text: str) -> list[str]:
        """Return what looks like a symbol but is none, if the model has symbols at all."""
        tags = TAG.findall(text) if self.symbols else []
        return [tag for tag in tags if tag not in self.symbols]

    def _visible(self, text: str) -> str:
        return text.translate(INVISIBLE) if self._normalizes and not text.isascii() else text

    def _encode_with_space_signs(self, text: str) -> list[int]:
        """Return the ids of a text whose ▁ is spelled in bytes, to distinguish it from a space."""
        first, *rest = text.split(SPACE)
        ids = self._processor.encode(first)
        for part in rest:
            ids += self._space_bytes
            # After a line break, because SentencePiece prefixes a text with a space.
            ids += self._processor.encode("\n" + part)[self._after_break :]
        return ids

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same model."""
        return isinstance(other, Tokenizer) and self.model == other.model

    def __hash__(self) -> int:
        """Return a hash of the model."""
        return hash(self.model)

    def __reduce__(self) -> tuple:
        """Pickle the model's bytes; SentencePiece's object is created from them again."""
        return Tokenizer, (self.model,)


def train_tokenizer(
    lines: Iterable[str],
    vocab_size: int,
    path: str | Path,
    *,
    normalization: str = "nmt_nfkc",
    symbols: Sequence[str] = (),
    cache: Path | None = None,
    fingerprint: str = "",
) -> Tokenizer:
    """Train a tokenizer on lines of text, write it to `path` atomically, and return it.

    Digits are pieces of their own, so that numbers are copied and not memorized. The same lines
    give the same model. Empty lines and lines of more than 16 kB are ignored.

    normalization: SentencePiece's rule for all text that it reads, here and in use: `nmt_nfkc`,
                 `nfkc` or `identity`. All but `identity` also merge spaces.
    symbols:     pieces that are never split, and read as they are written.
    cache:       folder to store the tokenizer in, under `fingerprint` and the options. The next
                 call returns the stored one without reading `lines`.
    fingerprint: identifies the lines.

    A corpus with too few words for `vocab_size` gets the largest possible vocabulary, and a warning
    is logged. Raises ValueError if there is no text, if `vocab_size` is too small for the
    characters of the text, or if `cache` is given without `fingerprint`.
    """
    if cache and not fingerprint:
        raise ValueError(
            "a cached tokenizer needs a fingerprint that identifies its lines; got none. Pass "
            "fingerprint=, or leave out cache."
        )
    options = TRAINING | {
        "vocab_size": vocab_size,
        "normalization_rule_name": normalization,
        "remove_extra_whitespaces": normalization != "identity",
        "user_defined_symbols": list(symbols),
    }
    parts = (fingerprint, options, sentencepiece.__version__)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:20]
    cached = cache and cache / "tokenizers" / f"{name}.model"
    tokenizer = cached and _load_cached(cached)
    if not tokenizer:
        tokenizer = _train(lines, options, path)
        if cached:
            with contextlib.suppress(OSError):  # a read-only cache
                write_atomically(cached, tokenizer.model)
    if tokenizer.vocab_size < vocab_size:
        LOGGER.warning(
            "The corpus supports a vocabulary of only %d pieces; %d were requested.",
            tokenizer.vocab_size,
            vocab_size,
        )
    write_atomically(Path(path), tokenizer.model)
    return tokenizer


def _load_cached(path: Path) -> Tokenizer | None:
    """Return the tokenizer, or None if it is missing or damaged."""
    try:
        return Tokenizer.load(path)
    except ValueError:
        return None


def _train(lines: Iterable[str], options: dict[str, Any], path: str | Path) -> Tokenizer:
    raised: list[BaseException] = []

    def parts() -> Iterator[str]:
        try:
            # No piece may contain a line break (see Tokenizer); NUL is not text.
            for number, line in enumerate(lines):
                check_text(line, number)
                if options["normalization_rule_name"] != "identity":
                    line = line.translate(INVISIBLE)
                yield from filter(None, re.split("[\n\0]", line))
        except BaseException as error:  # an interrupt, too: SentencePiece reports only its text
            raised.append(error)
            raise

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=parts(), model_writer=model, **options
        )
    except RuntimeError as error:
        if raised:
            raise raised[0] from None
        raise ValueError(_training_error(str(error), options["vocab_size"])) from error
    return Tokenizer(model.getvalue(), path)


def _training_error(error: str, vocab_size: int) -> str:
    too_small = re.search(r"required_chars\. \d+ vs (\d+)", error)
    if too_small:
        return (
            "model.vocab_size must be enough for the 256 bytes, the 4 special pieces and the "
            f"characters of this corpus, {too_small[1]} in total; got {vocab_size}."
        )
    if "sentences_.empty()" in error:
        return (
            "A tokenizer needs at least one line of text that is neither empty nor longer than "
            "16 kB; got none. Check the text, or split its lines into sentences."
        )
    return f"SentencePiece cannot train a vocabulary of {vocab_size} pieces: {error}"


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a tokenizer's file. Raises ValueError if it cannot be read."""
    try:
        return read_file(Path(path))
    except OSError as error:
        raise ValueError(
            f"A tokenizer must be a readable file; {path}: {error.strerror}."
        ) from error


def read_processor(model: bytes, where: str | Path) -> sentencepiece.SentencePieceProcessor:
    """Return SentencePiece's processor. Raises ValueError if `model` is not of SentencePiece."""
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
        processor.id_to_piece([*range(processor.vocab_size())])  # each must be UTF-8
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{where} must be a SentencePiece model, as train_tokenizer writes it; it cannot be "
            "read as one. Is it another file, or truncated?"
        ) from error
    return processor


def check_special_ids(processor: sentencepiece.SentencePieceProcessor, where: str | Path) -> None:
    """Raise ValueError unless PAD, UNK, BOS and EOS have our ids."""
    special = {
        "PAD": processor.pad_id(),
        "UNK": processor.unk_id(),
        "BOS": processor.bos_id(),
        "EOS": processor.eos_id(),
    }
    if special != SPECIAL_IDS:
        raise ValueError(
            f"{where} must have the ids {_ids(SPECIAL_IDS)}; it has {_ids(special)}. Train it "
            "with train_tokenizer, or with SentencePiece's options --pad_id=0 --unk_id=1 "
            "--bos_id=2 --eos_id=3."
        )


def check_text(text: str, which: int | str) -> None:
    """Raise ValueError for a text with a lone surrogate; `which` it is, for the message."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"A text must be valid Unicode; text {which} has a lone surrogate at character "
            f"{error.start}. Read its file as UTF-8, with errors='replace' if necessary."
        ) from error


def _ids(special: dict[str, int]) -> str:
    return ", ".join(f"{name}={i}" for name, i in special.items())

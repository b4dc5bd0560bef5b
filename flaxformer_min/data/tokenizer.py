"""Text to pieces and back: a SentencePiece unigram model that loses nothing.

Any text that UTF-8 can write comes back from `decode(encode(text))` as it was: what the vocabulary
lacks is spelled in bytes, nothing is normalised, spaces are kept. Nothing a user writes becomes a
control token: `</s>` in a text is four characters like any others.
"""

import contextlib
import hashlib
import itertools
import logging
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from flaxformer_min.runtime.files import write_atomically
from flaxformer_min.tokens import BOS, EOS, PAD, UNK

LOGGER = logging.getLogger("flaxformer_min")

SPACE = "\u2581"
"""How SentencePiece writes a space inside pieces: ▁. It takes a ▁ in a text for a space, too."""

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
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "max_sentence_length": 16_384,
    "num_threads": 4,  # fixed, because the sums of the EM steps, and so the bytes, depend on it
    "minloglevel": 2,
}
"""How SentencePiece learns pieces."""


class Tokenizer:
    """A trained vocabulary. It can be pickled and compared; both go by the model's bytes.

    model: the bytes of a SentencePiece model file.
    where: what to call it in errors.

    Raises ValueError if that is no SentencePiece model, or one with other special ids than ours.
    """

    def __init__(self, model: bytes, where: str | Path = "the tokenizer"):
        """Read the model and hold it to our ids."""
        self.model = model
        self._processor = _processor(model, where)
        processor = self._processor
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
        self._space_bytes = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        if UNK in self._space_bytes:
            raise ValueError(
                f"{where} must be able to spell any text in bytes; it has no byte pieces. Train it "
                "with train_tokenizer, or with SentencePiece's option --byte_fallback."
            )
        # A line break is in no piece of ours, so that what follows it is cut as if alone.
        self._after_break = len(processor.encode("\n"))

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer that `train_tokenizer` wrote. Errors as for the class, or no such file."""
        try:
            return cls(Path(path).read_bytes(), path)
        except OSError as error:
            raise ValueError(
                f"A tokenizer must be a readable file; {path}: {error.strerror}."
            ) from error

    @property
    def vocab_size(self) -> int:
        """Pieces, with the four special ones and the 256 bytes."""
        return self._processor.vocab_size()

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the model's bytes: a key for what was encoded with it."""
        return hashlib.sha256(self.model).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """The ids of a text's pieces, and EOS behind them. No BOS: the decoder adds its own.

        Raises ValueError for half a surrogate pair, the one thing in a `str` that is no text.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts at once, several times faster than one by one."""
        for index, text in enumerate(texts):
            _check_text(text, index)
        batch = self._processor.encode(list(texts), add_eos=True)
        for index, text in enumerate(texts):
            if SPACE in text:
                batch[index] = [*self._encode_with_space_signs(text), EOS]
        return batch

    def encode_segmentations(self, text: str, count: int) -> list[list[int]]:
        """The likeliest ways to cut a text into pieces, at most `count`; first that of `encode`.

        A text with the sign ▁ has one. Raises ValueError as `encode` does.
        """
        best = self.encode(text)
        if SPACE in text or count == 1:
            return [best]
        others = ([*ids, EOS] for ids in self._processor.nbest_encode(text, nbest_size=count))
        return [best, *(ids for ids in others if ids != best)][:count]

    def log_probs(self) -> np.ndarray:
        """Of each piece by itself, in nats, by which a cut is chosen; of the special ones 0."""
        pieces = range(self.vocab_size)
        return np.array([self._processor.get_score(i) for i in pieces], np.float32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids up to the first EOS, PAD and BOS left out.

        Bytes that are no UTF-8, which a model may produce, become U+FFFD.
        """
        before_end = itertools.takewhile(lambda i: i != EOS, map(int, ids))
        return self._processor.decode(list(before_end))  # which passes over control tokens

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What each id stands for, all of them, to be looked at: ▁ is a space, <0xEC> a byte."""
        return [self._processor.id_to_piece(int(i)) for i in ids]

    def _encode_with_space_signs(self, text: str) -> list[int]:
        """Ids of a text with the sign ▁ in it, spelled in bytes so as not to be a space."""
        first, *rest = text.split(SPACE)
        ids = self._processor.encode(first)
        for part in rest:
            ids += self._space_bytes
            # Behind a line break, for a text's first piece begins with a space of its own.
            ids += self._processor.encode("\n" + part)[self._after_break :]
        return ids

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same model."""
        return isinstance(other, Tokenizer) and self.model == other.model

    def __hash__(self) -> int:
        """Of the model."""
        return hash(self.model)

    def __reduce__(self) -> tuple:
        """Pickle the bytes; SentencePiece's own object is made anew from them."""
        return Tokenizer, (self.model,)


def train_tokenizer(
    lines: Iterable[str],
    vocab_size: int,
    path: str | Path,
    *,
    cache: Path | None = None,
    fingerprint: str = "",
) -> Tokenizer:
    """Learn a vocabulary from lines of both languages, write it to `path` and return it.

    Digits are pieces of their own, so that numbers are copied and not memorised. The same lines
    give the same bytes. The file appears whole or not at all. Empty lines do not matter; a line of
    more than 16 kB is left out.

    In the folder `cache`, if one is given, it is kept under `fingerprint`, which must name the
    lines: next time it is taken from there, and no line is asked for.

    A corpus with too few words for `vocab_size` gets the largest vocabulary it carries, and a
    warning of the logger "flaxformer_min" says so. Raises ValueError if there is no text, or more
    characters than `vocab_size` has room for, or if a cache is given without a fingerprint.
    """
    if cache and not fingerprint:
        raise ValueError(
            "a tokenizer is kept under the fingerprint of its lines; got a cache and none. Give "
            "fingerprint=, or leave out cache."
        )
    parts = (fingerprint, vocab_size, TRAINING, sentencepiece.__version__)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:20]
    kept = cache and cache / "tokenizers" / f"{name}.model"
    tokenizer = kept and _kept(kept)
    if not tokenizer:
        tokenizer = _train(lines, vocab_size, path)
        if kept:
            with contextlib.suppress(OSError):  # a cache that may only be read
                write_atomically(kept, tokenizer.model)
    if tokenizer.vocab_size < vocab_size:
        LOGGER.warning(
            "The corpus carries a vocabulary of %d pieces; %d were asked for.",
            tokenizer.vocab_size,
            vocab_size,
        )
    write_atomically(Path(path), tokenizer.model)
    return tokenizer


def _kept(path: Path) -> Tokenizer | None:
    """None where there is none, or a damaged one, which is then made again."""
    try:
        return Tokenizer.load(path)
    except ValueError:
        return None


def _train(lines: Iterable[str], vocab_size: int, path: str | Path) -> Tokenizer:
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch, "model")
        with model.open("wb") as file:
            try:
                sentencepiece.SentencePieceTrainer.train(
                    # A line break must be in no piece: see Tokenizer. Nobody types a NUL.
                    sentence_iterator=(
                        part for line in lines for part in re.split("[\n\0]", line) if part
                    ),
                    model_writer=file,
                    vocab_size=vocab_size,
                    **TRAINING,
                )
            except RuntimeError as error:
                raise ValueError(_why_not(str(error), vocab_size)) from error
        return Tokenizer(model.read_bytes(), path)


def _why_not(error: str, vocab_size: int) -> str:
    too_small = re.search(r"required_chars\. \d+ vs (\d+)", error)
    if too_small:
        return (
            f"model.vocab_size must leave room for the 256 bytes, the 4 special pieces and the "
            f"characters of this corpus, {too_small[1]} in all; got {vocab_size}."
        )
    if "sentences_.empty()" in error:
        return (
            "A tokenizer is trained on text; there was not one line that is not empty and not "
            "longer than 16 kB. Look at the text, or cut its lines into sentences."
        )
    return f"SentencePiece could not be trained with a vocabulary of {vocab_size}; it says: {error}"


def _processor(model: bytes, where: str | Path) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
    except RuntimeError as error:
        raise ValueError(
            f"{where} must be a SentencePiece model, as train_tokenizer writes it; it cannot be "
            "read as one. Is it another file, or cut short?"
        ) from error
    return processor


def _check_text(text: str, index: int) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"A text must be valid Unicode; text {index} has half a surrogate pair at character "
            f"{error.start}. Read its file as UTF-8, with errors='replace' if need be."
        ) from error


def _ids(special: dict[str, int]) -> str:
    return ", ".join(f"{name}={i}" for name, i in special.items())

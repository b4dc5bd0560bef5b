"""Encoding: sentence pairs to token ids, cached in memory-mapped files."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from flaxformer_min.data.corpora.pairs import is_empty
from flaxformer_min.data.packing import Packing, group_by_lengths, pack
from flaxformer_min.languages import UNSPACED, is_unspaced
from flaxformer_min.system.files import folder_atomically, write_atomically

FORMAT = 3
"""Version of the cached files; increased when the same text is encoded or packed differently."""

CHUNK = 20_000
"""Pairs encoded at a time: bounds memory, and is enough to keep the encoder busy."""

SEGMENTATIONS = 32
"""Segmentations of each sentence that subword sampling draws from; disk use grows as much."""


class SentenceEncoder(Protocol):
    """The interface of a tokenizer that encoding needs."""

    fingerprint: str

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, ending in EOS."""

    def encode_segmentations(self, text: str, count: int) -> list[list[int]]:
        """Return up to `count` segmentations, first `encode_batch`'s. Used if count > 1."""

    def log_probs(self) -> np.ndarray:
        """Return the log-probability of each piece in nats. Used with several segmentations."""


class Ragged(NamedTuple):
    """Concatenated sentences of different lengths: sentence i is `ids[starts[i]:][:lengths[i]]`."""

    ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


class Counts(NamedTuple):
    """Statistics of a split; words and pieces (with EOS) are those of pairs that are not empty.

    Characters are those of scripts without spaces between words.
    """

    read: int
    empty: int
    too_long: int
    source_words: int
    target_words: int
    source_pieces: int
    target_pieces: int
    source_characters: int = 0
    target_characters: int = 0

    @property
    def kept(self) -> int:
        """Number of pairs that are neither empty nor too long."""
        return self.read - self.empty - self.too_long

    def __str__(self) -> str:
        """Return a one-line summary."""
        ends = self.read - self.empty  # the EOS of each sentence, which is not part of a word
        sides = {"source": (self.source_pieces, self.source_words, self.source_characters)}
        sides["target"] = self.target_pieces, self.target_words, self.target_characters
        rates: dict[str, list[str]] = {}
        for side, (pieces, words, characters) in sides.items():
            unit, count = "word", words
            if is_unspaced(words, characters):
                unit, count = "character", characters
            rates.setdefault(unit, []).append(f"{(pieces - ends) / max(count, 1):.2f} {side}")
        listed = "; ".join(f"pieces per {unit}: {', '.join(each)}" for unit, each in rates.items())
        return (
            f"{self.read:,} pairs read, {self.empty:,} with an empty side and {self.too_long:,} "
            f"longer than a row dropped; {listed}"
        )


class Segmentations(NamedTuple):
    """The encoded segmentations of each sentence of a side.

    candidates: all segmentations of the first sentence, likeliest first, then of the second, ...
    counts:     number of segmentations of each sentence.
    log_probs:  log-probability of each segmentation in nats.
    """

    candidates: Ragged
    counts: np.ndarray
    log_probs: np.ndarray

    def first(self) -> Ragged:
        """Return the likeliest segmentation of each sentence."""
        return self._select(np.cumsum(self.counts) - self.counts)

    def draw(self, alpha: float, rng: np.random.Generator) -> Ragged:
        """Draw a segmentation of each sentence with probability proportional to p ** alpha.

        Kudo 2018, section 3.2. The maximum of log-probabilities plus Gumbel noise is such a draw.
        """
        drawn, first = [], 0
        for begin in range(0, len(self.counts), CHUNK):  # all at once would take gigabytes
            counts = self.counts[begin : begin + CHUNK]
            log_probs = self.log_probs[first : first + counts.sum()]
            noisy = alpha * log_probs + rng.gumbel(size=len(log_probs))
            start = np.cumsum(counts) - counts
            largest = np.repeat(np.maximum.reduceat(noisy, start), counts)
            sentence = np.repeat(np.arange(len(start)), counts)
            winners = np.flatnonzero(noisy == largest)
            drawn.append(first + winners[np.unique(sentence[winners], return_index=True)[1]])
            first += len(log_probs)
        return self._select(np.concatenate(drawn))

    def _select(self, numbers: np.ndarray) -> Ragged:
        ids, starts, lengths = self.candidates
        return Ragged(ids, starts[numbers], lengths[numbers])


@dataclasses.dataclass(frozen=True)
class EncodedPairs:
    """A split as token ids in memory-mapped files. A pickle holds only `folder` and `drawn`.

    digest: digest of all tokens, independent of the files they were read from.
    drawn:  (alpha, seed) of `resample`, or None for the likeliest segmentations.
    """

    folder: Path
    source: Ragged
    target: Ragged
    counts: Counts
    digest: str
    drawn: tuple[float, tuple[int, ...]] | None = None

    def __reduce__(self):
        """Let workers map the files again, instead of receiving their content."""
        return EncodedPairs.load, (self.folder, self.drawn)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.source.starts)

    def resample(self, alpha: float, seed: tuple[int, ...]) -> "EncodedPairs":
        """Return the same text with a segmentation of each sentence drawn at random (Kudo 2018).

        A smaller `alpha` makes the segmentations more equally likely. The same `seed` gives the
        same draw.
        """
        return EncodedPairs.load(self.folder, (alpha, seed))

    def packing(self, row_lengths: tuple[int, int]) -> "Packing":
        """Return the packing of the pairs into rows (see `pack`), cached beside the encoded text.

        That of `resample` is not cached, because each epoch draws another.
        """
        lengths = self.source.lengths, self.target.lengths
        if self.drawn:
            return pack(*lengths, row_lengths)
        file = self.folder / f"packing_{row_lengths[0]}_{row_lengths[1]}.json"
        with contextlib.suppress(OSError, ValueError, TypeError):  # missing or damaged
            groups = json.loads(file.read_text())
            if sum(len(row) * count for row, count in groups) == len(self):
                return Packing(group_by_lengths(*lengths)[0], groups)
        packing = pack(*lengths, row_lengths)
        with contextlib.suppress(OSError):  # a read-only cache
            write_atomically(file, json.dumps(packing.groups))
        return packing

    @classmethod
    def load(
        cls, folder: Path, drawn: tuple[float, tuple[int, ...]] | None = None
    ) -> "EncodedPairs":
        """Map the files that `encode_pairs` wrote. Raises ValueError if they are damaged."""
        about = json.loads((folder / "about.json").read_text())
        segmentations = [_map_side(folder, side) for side in ("source", "target")]
        if drawn is None:
            sides = [side.first() for side in segmentations]
        else:
            rng = np.random.default_rng(drawn[1])
            sides = [side.draw(drawn[0], rng) for side in segmentations]
        return cls(folder, *sides, Counts(**about["counts"]), about["digest"], drawn)


def encode_pairs(
    pairs: Sequence[tuple[str, str]],
    tokenizers: tuple[SentenceEncoder, SentenceEncoder],
    row_lengths: tuple[int, int],
    cache: Path,
    fingerprint: str,
    segmentations: int = 1,
    name: str = "a split",
) -> EncodedPairs:
    """Return an encoded split, from `cache` if it was encoded before.

    A pair with an empty side, or with more tokens (EOS included) than its row, is dropped and
    counted.

    fingerprint:   identifies the text.
    segmentations: most segmentations of each sentence, for `EncodedPairs.resample`; those longer
                   than a row are dropped.
    name:          of the split, in errors.

    Raises ValueError if no pair is left.
    """
    kinds = [(type(each).__name__, each.fingerprint, each.vocab_size) for each in tokenizers]
    parts = (FORMAT, fingerprint, len(pairs), kinds, row_lengths, segmentations)
    folder = cache / "encoded" / hashlib.sha256(repr(parts).encode()).hexdigest()[:20]
    encoded = None
    if folder.exists():
        try:
            encoded = EncodedPairs.load(folder)
        except Exception:  # damaged: numpy raises whatever its parser of headers raises
            shutil.rmtree(folder, ignore_errors=True)
    if encoded is None:
        with folder_atomically(folder, cached=True) as scratch:
            _write(pairs, tokenizers, row_lengths, scratch, segmentations)
        encoded = EncodedPairs.load(folder)
    if not encoded.counts.kept:
        raise ValueError(
            f"{name} must have at least one usable pair; got {encoded.counts}. Check the text, "
            "or raise data.source_row_length and data.target_row_length."
        )
    return encoded


def _write(pairs, tokenizers, row_lengths, folder: Path, segmentations: int) -> None:
    totals = np.zeros(len(Counts._fields), int)
    with contextlib.ExitStack() as files:
        writers = [
            _SideWriter(folder, name, tokenizer, row_length, segmentations, files)
            for name, tokenizer, row_length in zip(
                ("source", "target"), tokenizers, row_lengths, strict=True
            )
        ]
        for start in range(0, len(pairs), CHUNK):
            texts = pairs[start : start + CHUNK]
            full, sides = _encode(texts, tokenizers)
            fits = [
                len(a) <= row_lengths[0] and len(b) <= row_lengths[1]
                for a, b in zip(*sides, strict=True)
            ]
            for side, writer in enumerate(writers):
                kept = [ids for ids, fit in zip(sides[side], fits, strict=True) if fit]
                writer.write(
                    kept, [pair[side] for pair, fit in zip(full, fits, strict=True) if fit]
                )
            words = [sum(len(pair[side].split()) for pair in full) for side in (0, 1)]
            pieces = [sum(map(len, sides[side])) for side in (0, 1)]
            characters = [
                sum(len(UNSPACED.findall(pair[side])) for pair in full) for side in (0, 1)
            ]
            empty = len(texts) - len(full)
            totals += [len(texts), empty, len(fits) - sum(fits), *words, *pieces, *characters]
        digests = [writer.finish() for writer in writers]
    about = {
        "counts": dict(zip(Counts._fields, totals.tolist(), strict=True)),
        "digest": hashlib.sha256("".join(digests).encode()).hexdigest()[:16],
    }
    (folder / "about.json").write_text(json.dumps(about))


def _encode(texts: Sequence[tuple[str, str]], tokenizers) -> tuple[list, list[list[list[int]]]]:
    """Return the pairs with text on both sides, and the ids of each side."""
    full = [pair for pair in texts if not is_empty(pair)]
    sides = [
        tokenizer.encode_batch([pair[side] for pair in full])
        for side, tokenizer in enumerate(tokenizers)
    ]
    # Text of which normalization leaves nothing is empty, too: EOS is all there is.
    some = [min(len(a), len(b)) > 1 for a, b in zip(*sides, strict=True)]
    full = [pair for pair, has_text in zip(full, some, strict=True) if has_text]
    return full, [
        [ids for ids, has_text in zip(side, some, strict=True) if has_text] for side in sides
    ]


class _SideWriter:
    """Writes the four files of one side (see `Segmentations`)."""

    def __init__(self, folder, name, tokenizer, row_length, segmentations, files):
        self._stem, self._tokenizer = folder / name, tokenizer
        self._row_length, self._segmentations = row_length, segmentations
        self._file = files.enter_context(open(f"{self._stem}.bin", "wb"))
        self._digest = hashlib.sha256()
        # The types of the files, because these grow in memory: eight bytes per sentence.
        self._lengths, self._counts = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
        self._log_probs = [np.zeros(0, np.float32)]
        self._piece_log_probs = tokenizer.log_probs() if segmentations > 1 else np.zeros(0)

    def write(self, encoded: list[list[int]], texts: list[str]) -> None:
        candidates = [[ids] for ids in encoded]
        if self._segmentations > 1:
            candidates = [self._candidates(text) for text in texts]
        flat = [ids for each in candidates for ids in each]
        ids, lengths = np.array([i for ids in flat for i in ids], np.int32), list(map(len, flat))
        self._file.write(ids)  # numpy's `tofile` does not say why it fails
        self._digest.update(ids)
        self._lengths.append(np.array(lengths, np.int32))
        self._counts.append(np.array(list(map(len, candidates)), np.int32))
        if self._segmentations > 1 and flat:
            starts = np.cumsum(lengths) - lengths
            log_probs = np.add.reduceat(self._piece_log_probs[ids], starts)
            self._log_probs.append(log_probs.astype(np.float32))

    def _candidates(self, text: str) -> list[list[int]]:
        """Return the segmentations of a text that fit in a row."""
        candidates = self._tokenizer.encode_segmentations(text, self._segmentations)
        return [ids for ids in candidates if len(ids) <= self._row_length]

    def finish(self) -> str:
        """Write the remaining files, and return a digest of all ids (EOS separates sentences)."""
        self._file.close()
        np.save(f"{self._stem}_lengths.npy", np.concatenate(self._lengths))
        np.save(f"{self._stem}_counts.npy", np.concatenate(self._counts))
        np.save(f"{self._stem}_log_probs.npy", np.concatenate(self._log_probs))
        return self._digest.hexdigest()


def _map_side(folder: Path, side: str) -> Segmentations:
    lengths, counts, log_probs = (
        np.load(folder / f"{side}_{name}.npy") for name in ("lengths", "counts", "log_probs")
    )
    lengths = lengths.astype(np.int64)
    file = folder / f"{side}.bin"
    size = file.stat().st_size
    if size != 4 * lengths.sum() or counts.sum() != len(lengths):
        raise ValueError(f"{file} must have {lengths.sum():,} ids; it has {size:,} bytes.")
    ids = np.memmap(file, np.int32, "r") if size else np.zeros(0, np.int32)
    return Segmentations(Ragged(ids, np.cumsum(lengths) - lengths, lengths), counts, log_probs)

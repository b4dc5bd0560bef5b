"""From sentence pairs to token ids, kept in memory-mapped files: encode, drop and count."""

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
from flaxformer_min.runtime.files import folder_atomically, write_atomically

FORMAT = 2
"""Of what is kept: another one once the same text is encoded or packed in another way."""


CHUNK = 20_000  # pairs encoded at a time: bounds memory, and is enough to keep the encoder busy


SEGMENTATIONS = 32
"""To cut a sentence, that subword sampling chooses from: a training set takes so much more disk."""


class Encoder(Protocol):
    """What this module needs of a tokenizer."""

    fingerprint: str

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, ending in EOS."""

    def encode_segmentations(self, text: str, count: int) -> list[list[int]]:
        """The same in up to `count` ways, that of `encode_batch` first. Used where count > 1."""

    def log_probs(self) -> np.ndarray:
        """Of each piece, in nats. Used where there are several ways."""


class Ragged(NamedTuple):
    """Sentences of different lengths, end to end: sentence i is `ids[starts[i]:][:lengths[i]]`."""

    ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


class Counts(NamedTuple):
    """What became of the pairs of a split; words, and pieces with EOS, of those not empty."""

    read: int
    empty: int
    too_long: int
    source_words: int
    target_words: int
    source_pieces: int
    target_pieces: int

    @property
    def kept(self) -> int:
        """Pairs that training or validation sees."""
        return self.read - self.empty - self.too_long

    def __str__(self) -> str:
        """One line for a person."""
        ends = self.read - self.empty  # each sentence's EOS is no piece of a word
        source = (self.source_pieces - ends) / max(self.source_words, 1)
        target = (self.target_pieces - ends) / max(self.target_words, 1)
        return (
            f"{self.read:,} pairs read, {self.empty:,} with an empty side and {self.too_long:,} "
            f"longer than a row left out; pieces a word: {source:.2f} source, {target:.2f} target"
        )


class Segmentations(NamedTuple):
    """All ways to cut each sentence of a side: sentence i has `counts[i]` of them, one by one.

    log_probs: of each way, in nats.
    """

    cuts: Ragged
    counts: np.ndarray
    log_probs: np.ndarray

    def first(self) -> Ragged:
        """The likeliest of each sentence."""
        return self._chosen(np.cumsum(self.counts) - self.counts)

    def draw(self, alpha: float, rng: np.random.Generator) -> Ragged:
        """One for each sentence, with a probability that goes with that of the way, to the `alpha`.

        Kudo 2018, section 3.2. The largest of logarithms with Gumbel noise is such a draw.
        """
        chosen, first = [], 0
        for begin in range(0, len(self.counts), CHUNK):  # of all, it would take gigabytes
            counts = self.counts[begin : begin + CHUNK]
            log_probs = self.log_probs[first : first + counts.sum()]
            noisy = alpha * log_probs + rng.gumbel(size=len(log_probs))
            start = np.cumsum(counts) - counts
            largest = np.repeat(np.maximum.reduceat(noisy, start), counts)
            sentence = np.repeat(np.arange(len(start)), counts)
            winners = np.flatnonzero(noisy == largest)
            chosen.append(first + winners[np.unique(sentence[winners], return_index=True)[1]])
            first += len(log_probs)
        return self._chosen(np.concatenate(chosen))

    def _chosen(self, numbers: np.ndarray) -> Ragged:
        return Ragged(self.cuts.ids, self.cuts.starts[numbers], self.cuts.lengths[numbers])


@dataclasses.dataclass(frozen=True)
class EncodedPairs:
    """A split as token ids, in memory-mapped files. Pickles as its folder, and how it was drawn.

    digest: of all tokens, wherever they came from.
    drawn:  (alpha, seed) of `resample`, or None for the likeliest cuts.
    """

    folder: Path
    source: Ragged
    target: Ragged
    counts: Counts
    digest: str
    drawn: tuple[float, tuple[int, ...]] | None = None

    def __reduce__(self):
        """Workers map the files again instead of receiving their content."""
        return EncodedPairs.load, (self.folder, self.drawn)

    def __len__(self) -> int:
        """Pairs kept."""
        return len(self.source.starts)

    def resample(self, alpha: float, seed: tuple[int, ...]) -> "EncodedPairs":
        """The same text, each sentence in one of the ways that were encoded (Kudo 2018).

        The smaller `alpha`, the more alike all ways; the same `seed` draws the same.
        """
        return EncodedPairs.load(self.folder, (alpha, seed))

    def packing(self, row_lengths: tuple[int, int]) -> "Packing":
        """How the pairs fit such rows: see `pack`. Kept beside them for the next start.

        That of `resample` is not kept, for each epoch draws another.
        """
        lengths = self.source.lengths, self.target.lengths
        if self.drawn:
            return pack(*lengths, row_lengths)
        file = self.folder / f"packing_{row_lengths[0]}_{row_lengths[1]}.json"
        with contextlib.suppress(OSError, ValueError, TypeError):  # not there, or damaged
            groups = json.loads(file.read_text())
            if sum(len(row) * count for row, count in groups) == len(self):
                return Packing(group_by_lengths(*lengths)[0], groups)
        packing = pack(*lengths, row_lengths)
        with contextlib.suppress(OSError):  # a cache that may only be read
            write_atomically(file, json.dumps(packing.groups))
        return packing

    @classmethod
    def load(
        cls, folder: Path, drawn: tuple[float, tuple[int, ...]] | None = None
    ) -> "EncodedPairs":
        """Map what `encode_pairs` wrote. Raises ValueError where that is damaged."""
        about = json.loads((folder / "about.json").read_text())
        ways = [_map_side(folder, side) for side in ("source", "target")]
        if drawn is None:
            sides = [side.first() for side in ways]
        else:
            rng = np.random.default_rng(drawn[1])
            sides = [side.draw(drawn[0], rng) for side in ways]
        return cls(folder, *sides, Counts(**about["counts"]), about["digest"], drawn)


def encode_pairs(
    pairs: Sequence[tuple[str, str]],
    tokenizers: tuple[Encoder, Encoder],
    row_lengths: tuple[int, int],
    cache: Path,
    fingerprint: str,
    ways: int = 1,
) -> EncodedPairs:
    """Encode a split once and keep it in `cache`; the next start maps it from there.

    A pair with an empty side, or with more tokens (EOS included) than a row has places, is left out
    and counted. `fingerprint` names the text; with the tokenizers' own it names the result. Each
    sentence is encoded in up to so many `ways` that fit a row, for `EncodedPairs.resample`.

    Raises ValueError when no pair is left.
    """
    parts = (FORMAT, fingerprint, *(t.fingerprint for t in tokenizers), row_lengths, ways)
    folder = cache / "encoded" / hashlib.sha256(repr(parts).encode()).hexdigest()[:20]
    encoded = None
    if folder.exists():
        try:
            encoded = EncodedPairs.load(folder)
        except (FileNotFoundError, ValueError, KeyError, TypeError, EOFError):  # damaged
            shutil.rmtree(folder)
    if encoded is None:
        with folder_atomically(folder) as scratch:
            _write(pairs, tokenizers, row_lengths, scratch, ways)
        encoded = EncodedPairs.load(folder)
    if not encoded.counts.kept:
        raise ValueError(
            f"a split must hold at least one usable pair; got {encoded.counts}. Look at the text, "
            "or raise data.source_row_length and data.target_row_length."
        )
    return encoded


def _write(pairs, tokenizers, row_lengths, folder: Path, ways: int) -> None:
    totals = np.zeros(len(Counts._fields), int)
    with contextlib.ExitStack() as files:
        writers = [
            _SideWriter(folder, name, tokenizer, row_length, ways, files)
            for name, tokenizer, row_length in zip(
                ("source", "target"), tokenizers, row_lengths, strict=True
            )
        ]
        for start in range(0, len(pairs), CHUNK):
            texts = pairs[start : start + CHUNK]
            full = [pair for pair in texts if not is_empty(pair)]
            sides = [
                tokenizer.encode_batch([pair[side] for pair in full])
                for side, tokenizer in enumerate(tokenizers)
            ]
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
            empty = len(texts) - len(full)
            totals += [len(texts), empty, len(fits) - sum(fits), *words, *pieces]
        digests = [writer.finish() for writer in writers]
    about = {
        "counts": dict(zip(Counts._fields, totals.tolist(), strict=True)),
        "digest": hashlib.sha256("".join(digests).encode()).hexdigest()[:16],
    }
    (folder / "about.json").write_text(json.dumps(about))


class _SideWriter:
    """Writes one side: ids end to end; the length and log-probability of each way; their counts."""

    def __init__(self, folder, name, tokenizer, row_length, ways, files):
        self._stem, self._tokenizer = folder / name, tokenizer
        self._row_length, self._ways = row_length, ways
        self._file = files.enter_context(open(f"{self._stem}.bin", "wb"))
        self._digest = hashlib.sha256()
        # Of the files' own types: these are what grows in memory, eight bytes a sentence.
        self._lengths, self._counts = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
        self._log_probs = [np.zeros(0, np.float32)]
        self._of_piece = tokenizer.log_probs() if ways > 1 else np.zeros(0)

    def write(self, encoded: list[list[int]], texts: list[str]) -> None:
        cuts = [[ids] for ids in encoded]
        if self._ways > 1:
            ways = (self._tokenizer.encode_segmentations(text, self._ways) for text in texts)
            cuts = [[ids for ids in each if len(ids) <= self._row_length] for each in ways]
        flat = [ids for each in cuts for ids in each]
        ids, lengths = np.array([i for ids in flat for i in ids], np.int32), list(map(len, flat))
        ids.tofile(self._file)
        self._digest.update(ids)
        self._lengths.append(np.array(lengths, np.int32))
        self._counts.append(np.array(list(map(len, cuts)), np.int32))
        if self._ways > 1 and flat:
            starts = np.cumsum(lengths) - lengths
            of_way = np.add.reduceat(self._of_piece[ids], starts)
            self._log_probs.append(of_way.astype(np.float32))

    def finish(self) -> str:
        """Close the file, write the others; gives a digest of all ids, whose EOS part them."""
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
        raise ValueError(f"{file} must hold {lengths.sum():,} ids; it has {size:,} bytes.")
    ids = np.memmap(file, np.int32, "r") if size else np.zeros(0, np.int32)
    return Segmentations(Ragged(ids, np.cumsum(lengths) - lengths, lengths), counts, log_probs)

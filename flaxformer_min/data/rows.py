"""From sentence pairs to batches of rows: encode, drop and count, shuffle, pack, batch, prefetch.

All is a function of (seed, epoch, batch number). So the state of the iterator is two integers, it
resumes exactly, and every process and worker computes its own share without talking to the others.
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grain
import numpy as np

from flaxformer_min.data.corpus import is_empty
from flaxformer_min.files import folder_atomically, write_atomically
from flaxformer_min.tokens import Batch, Tokens

FORMAT = 2
"""Of what is kept: another one once the same text is encoded or packed in another way."""

CHUNK = 20_000  # pairs encoded at a time: bounds memory, and is enough to keep the encoder busy

WAYS = 32
"""To cut a sentence, that subword sampling chooses from: a training set takes so much more disk."""

ATTEMPTS, SHAPES = 10, 10_000
"""To fill a row: so many attempts, or fewer, that a corpus of many lengths takes no longer."""


class Encoder(Protocol):
    """What this module needs of a tokenizer."""

    fingerprint: str

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, ending in EOS."""

    def encode_ways(self, text: str, count: int) -> list[list[int]]:
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


class Ways(NamedTuple):
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
                return Packing(_shapes(*lengths)[0], groups)
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
            ways = (self._tokenizer.encode_ways(text, self._ways) for text in texts)
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


def _map_side(folder: Path, side: str) -> Ways:
    lengths, counts, log_probs = (
        np.load(folder / f"{side}_{name}.npy") for name in ("lengths", "counts", "log_probs")
    )
    lengths = lengths.astype(np.int64)
    file = folder / f"{side}.bin"
    size = file.stat().st_size
    if size != 4 * lengths.sum() or counts.sum() != len(lengths):
        raise ValueError(f"{file} must hold {lengths.sum():,} ids; it has {size:,} bytes.")
    ids = np.memmap(file, np.int32, "r") if size else np.zeros(0, np.int32)
    return Ways(Ragged(ids, np.cumsum(lengths) - lengths, lengths), counts, log_probs)


class Plan(NamedTuple):
    """Which pairs stand in which row: row r holds `pairs[starts[r]:starts[r + 1]]`."""

    pairs: np.ndarray
    starts: np.ndarray


class Packing(NamedTuple):
    """How the lengths of a split fit together; who of a length stands where is drawn later.

    length_of_pair: a number for each pair; pairs of the same lengths have the same.
    groups:         of equal rows, each as (the numbers in a row, how many such rows).
    """

    length_of_pair: np.ndarray
    groups: list[tuple[list[int], int]]

    def plan(self, rng: np.random.Generator | None = None) -> Plan:
        """Which pairs share a row, and in which order rows come, is drawn by `rng`, if given."""
        slots = np.concatenate([np.tile(row, count) for row, count in self.groups])
        row_sizes = np.concatenate([np.full(count, len(row)) for row, count in self.groups])
        pairs = len(self.length_of_pair)
        order = np.arange(pairs) if rng is None else rng.permutation(pairs)
        by_length = order[np.argsort(self.length_of_pair[order], kind="stable")]
        placed = np.empty(pairs, np.int64)
        placed[np.argsort(slots, kind="stable")] = by_length
        starts = np.concatenate([[0], np.cumsum(row_sizes)])
        if rng is None:
            return Plan(placed, starts)
        rows = rng.permutation(len(row_sizes))
        picked = _ranges(starts[rows], row_sizes[rows])
        return Plan(placed[picked], np.concatenate([[0], np.cumsum(row_sizes[rows])]))


def pack(
    source_lengths: np.ndarray, target_lengths: np.ndarray, row_lengths: tuple[int, int]
) -> Packing:
    """Fit pairs into few rows. The same lengths give the same rows.

    It works on the histogram of lengths instead of on pairs (after Krell et al. 2021, "Efficient
    sequence packing without cross-contamination"), so that large corpora take seconds.

    >>> plan = pack(np.array([3, 5, 2]), np.array([3, 5, 2]), (5, 5)).plan()
    >>> [plan.pairs[a:b].tolist() for a, b in zip(plan.starts, plan.starts[1:])]
    [[1], [0, 2]]
    """
    number, sizes, counts = _shapes(source_lengths, target_lengths)
    return Packing(number, _pack_shapes(sizes, counts, np.array(row_lengths)))


def _shapes(
    source_lengths: np.ndarray, target_lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The number of each pair's shape, the two lengths of each shape, and its pairs."""
    base = target_lengths.max() + 1
    shapes, number, counts = np.unique(
        source_lengths * base + target_lengths, return_inverse=True, return_counts=True
    )
    return number, np.stack(np.divmod(shapes, base), axis=1), counts


def _pack_shapes(
    sizes: np.ndarray, counts: np.ndarray, row: np.ndarray
) -> list[tuple[list[int], int]]:
    """Groups of equal rows, each as (the shapes in it, how many such rows).

    Each time the longest shape that is left is completed to a row, the best of a few attempts, and
    that row is repeated until one of its shapes is used up: there are no more groups than shapes.
    """
    counts, groups, rng = counts.copy(), [], np.random.default_rng(0)
    attempts = max(1, min(ATTEMPTS, SHAPES // len(sizes)))
    small = 1.5 * (counts @ sizes).min() / counts.sum()
    for longest in np.lexsort((-sizes.sum(1), -sizes.max(1))):
        while counts[longest]:
            rows = [_fill(longest, sizes, counts, row, small, rng) for _ in range(attempts)]
            pattern = min(rows, key=lambda shapes: -sizes[shapes].sum())
            used, times = np.unique(pattern, return_counts=True)
            count = int((counts[used] // times).min())
            counts[used] -= count * times
            groups.append((list(map(int, pattern)), count))
    return groups


def _fill(
    first: int,
    sizes: np.ndarray,
    counts: np.ndarray,
    row: np.ndarray,
    small: float,
    rng: np.random.Generator,
) -> list[int]:
    """A row with `first` in it: shapes drawn as often as they occur, and what fits best in the end.

    The end begins when less than `small` places are left on a side.
    """
    left, free, shapes = counts.copy(), row - sizes[first], [first]
    left[first] -= 1
    while True:
        fitting = np.flatnonzero((left > 0) & (sizes <= free).all(1))
        if not len(fitting):
            return shapes
        if free.min() < small:
            shape = fitting[sizes[fitting].sum(1).argmax()]
        else:
            share = np.cumsum(left[fitting])
            shape = fitting[np.searchsorted(share, rng.random() * share[-1], side="right")]
        left[shape] -= 1
        free = free - sizes[shape]
        shapes.append(int(shape))


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`arange(start, start + length)` for each, end to end."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


@dataclasses.dataclass(frozen=True)
class EpochBatches:
    """One pass over a split as a random-access sequence of batches; the last may have empty rows.

    With several processes each has the same number of batches, and its own share of their rows.
    """

    encoded: EncodedPairs
    plan: Plan
    rows: int
    row_lengths: tuple[int, int]
    process: int = 0
    processes: int = 1

    def __len__(self) -> int:
        """Batches in the pass."""
        return -(-(len(self.plan.starts) - 1) // self.rows)

    def __getitem__(self, number: int) -> Batch:
        """This process's rows of batch `number`, as numpy arrays."""
        share = self.rows // self.processes
        first = number * self.rows + self.process * share
        starts = self.plan.starts[first : first + share + 1]
        if not len(starts):
            starts = self.plan.starts[-1:]
        pairs = self.plan.pairs[starts[0] : starts[-1]]
        in_row = np.diff(starts)
        row = np.repeat(np.arange(len(in_row)), in_row)
        segment = _ranges(np.ones_like(in_row), in_row)
        source, target = self.encoded.source, self.encoded.target
        return Batch(
            _lay(source, pairs, row, segment, (share, self.row_lengths[0])),
            _lay(target, pairs, row, segment, (share, self.row_lengths[1])),
        )

    def padding(self) -> float:
        """Share of the places of all batches that hold no token, source and target together."""
        places = len(self) * self.rows * sum(self.row_lengths)
        return 1 - (self.encoded.source.lengths.sum() + self.encoded.target.lengths.sum()) / places

    def even_row_lengths(self) -> tuple[int, int]:
        """The least that no pair is too long for and whose two sides the text fills alike.

        As multiples of what both lengths are multiples of, 128 or 2: some attention wants that.
        """
        source, target = self.row_lengths
        ratio = self.encoded.target.lengths.sum() / self.encoded.source.lengths.sum()
        unit = 2 if source % 128 or target % 128 else 128
        longer = (unit * round(length / unit) for length in (target / ratio, source * ratio))
        return tuple(map(max, self.row_lengths, longer))


def _lay(side: Ragged, pairs, row, segment, shape: tuple[int, int]) -> Tokens:
    """Put sentences side by side into their rows."""
    lengths = side.lengths[pairs]
    before = np.cumsum(lengths) - lengths
    first_of_row = segment == 1
    start = before - np.repeat(before[first_of_row], np.bincount(row)[np.unique(row)])
    places = (np.repeat(row, lengths), _ranges(start, lengths))
    columns = []
    for values in (
        side.ids[_ranges(side.starts[pairs], lengths)],
        _ranges(np.zeros_like(lengths), lengths),
        np.repeat(segment, lengths),
    ):
        column = np.zeros(shape, np.int32)
        column[places] = values
        columns.append(column)
    return Tokens(*columns)


class TrainingRows(Iterator[Batch]):
    """Batches without end, epoch after epoch, each in an order of its own.

    `get_state` is all that is needed to go on: it does not depend on the number of devices,
    processes or workers.
    """

    def __init__(
        self,
        encoded: EncodedPairs,
        row_lengths: tuple[int, int],
        rows: int,
        seed: int,
        workers: int = 0,
        process: int = 0,
        processes: int = 1,
        subword_sampling: float = 0.0,
    ):
        """Start at epoch 0. `rows` is what one step reads on all devices and processes together.

        `subword_sampling` above 0 is the alpha by which the pairs are cut anew for each epoch.
        """
        if rows % processes:
            raise ValueError(
                "the rows of a step must divide evenly among processes; got "
                f"{rows} rows and {processes} processes."
            )
        self._encoded, self._row_lengths, self._rows = encoded, row_lengths, rows
        self._seed, self._workers = seed, workers
        self._process, self._processes, self._alpha = process, processes, subword_sampling
        self._packing: Packing | None = None
        self._planned: tuple[int, EpochBatches] | None = None
        self._batches: grain.DatasetIterator | None = None
        self.set_state({"epoch": 0, "batch": 0})

    def epoch(self, number: int) -> EpochBatches:
        """All batches of one epoch; the newest one asked for is kept, not planned again."""
        if self._planned is None or self._planned[0] != number:
            self._planned = None  # or two would be in memory for a while
            self._planned = number, self._plan(number)
        return self._planned[1]

    def _plan(self, number: int) -> EpochBatches:
        rng = np.random.default_rng((self._seed, number))
        encoded = self._encoded
        if self._alpha:
            encoded = encoded.resample(self._alpha, (self._seed, number))
        if self._packing is None or self._alpha:
            self._packing = encoded.packing(self._row_lengths)
        plan = self._packing.plan(rng)
        share = (self._process, self._processes)
        return EpochBatches(encoded, plan, self._rows, self._row_lengths, *share)

    def get_state(self) -> dict[str, Any]:
        """The epoch, how many of its batches were delivered, and which text that was."""
        text = self._encoded.digest
        return {"epoch": self._epoch, "batch": self._delivered, "text": text}

    def is_of_other_text(self, state: dict[str, Any]) -> bool:
        """Whether that state is of an iterator over other text: the same place is another one."""
        return state.get("text", self._encoded.digest) != self._encoded.digest

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on as the iterator did that gave this state."""
        self.close()
        self._epoch, self._delivered = state["epoch"], state["batch"]

    def close(self) -> None:
        """Let the thread or the worker processes go."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None

    def __next__(self) -> Batch:
        """The next batch, of the next epoch if this one is through."""
        while True:
            if self._batches is None:
                epoch = self.epoch(self._epoch)
                # Ctrl-C goes to the workers, too, and would end them; they inherit that it waits.
                with _waiting_interrupt(self._workers > 0):
                    self._batches = self._prefetched(epoch)
                    batch = next(self._batches, None)
            else:
                batch = next(self._batches, None)
            if batch is not None:
                self._delivered += 1
                return batch
            self.set_state({"epoch": self._epoch + 1, "batch": 0})

    def _prefetched(self, batches: EpochBatches) -> grain.DatasetIterator:
        """What is left of an epoch, assembled ahead by a thread or by worker processes."""
        left = grain.MapDataset.source(batches)[self._delivered :]
        threads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        dataset = left.to_iter_dataset(threads)
        if self._workers:
            from absl import flags

            if not flags.FLAGS.is_parsed():  # grain's workers read absl flags
                flags.FLAGS.mark_as_parsed()
            workers = grain.MultiprocessingOptions(num_workers=self._workers)
            dataset = dataset.mp_prefetch(workers, _end_with_parent)
        return iter(dataset)


@contextlib.contextmanager
def _waiting_interrupt(waits: bool) -> Iterator[None]:
    """SIGINT waits for the end of the body, and for ever in processes that are started there."""
    if waits:
        resource_tracker.ensure_running()  # it lets SIGINT through where it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if waits else ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent(worker: int, workers: int) -> None:
    """In a worker process: a killed parent cannot end it."""

    def watch() -> None:
        multiprocessing.parent_process().join()  # returns at once where it was killed already
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def single_pass(
    encoded: EncodedPairs,
    row_lengths: tuple[int, int],
    rows: int,
    process: int = 0,
    processes: int = 1,
) -> EpochBatches:
    """A split once, in a fixed order, for measuring the loss."""
    plan = encoded.packing(row_lengths).plan()
    return EpochBatches(encoded, plan, rows, row_lengths, process, processes)


def split_over_devices(batch: Batch, devices: int, accumulation: int = 1) -> Batch:
    """[rows length] -> [devices accumulation rows length], for `train_step`.

    Raises ValueError when the rows do not divide evenly.
    """
    rows = batch.source.ids.shape[0]
    if rows % (devices * accumulation):
        raise ValueError(
            "the rows of a step must divide evenly among devices and accumulated batches; got "
            f"{rows} rows, {devices} devices, {accumulation} batches. Change data.rows_per_batch."
        )

    def split(column: np.ndarray) -> np.ndarray:
        return column.reshape(devices, accumulation, -1, column.shape[-1])

    return Batch(
        Tokens(*(split(column) for column in batch.source)),
        Tokens(*(split(column) for column in batch.target)),
    )

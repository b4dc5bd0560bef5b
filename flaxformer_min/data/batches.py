"""From sentence pairs to batches of rows: encode, drop and count, shuffle, pack, batch, prefetch.

All is a function of (seed, epoch, batch number). So the state of the iterator is two integers, it
resumes exactly, and every process and worker computes its own share without talking to the others.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

import grain
import numpy as np

from flaxformer_min.data.encoding import EncodedPairs, Ragged
from flaxformer_min.data.packing import Packing, Plan, ranges
from flaxformer_min.tokens import Batch, Tokens


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
        segment = ranges(np.ones_like(in_row), in_row)
        source, target = self.encoded.source, self.encoded.target
        return Batch(
            _materialize(source, pairs, row, segment, (share, self.row_lengths[0])),
            _materialize(target, pairs, row, segment, (share, self.row_lengths[1])),
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


def _materialize(side: Ragged, pairs, row, segment, shape: tuple[int, int]) -> Tokens:
    """Put sentences side by side into their rows."""
    lengths = side.lengths[pairs]
    before = np.cumsum(lengths) - lengths
    first_of_row = segment == 1
    start = before - np.repeat(before[first_of_row], np.bincount(row)[np.unique(row)])
    places = (np.repeat(row, lengths), ranges(start, lengths))
    columns = []
    for values in (
        side.ids[ranges(side.starts[pairs], lengths)],
        ranges(np.zeros_like(lengths), lengths),
        np.repeat(segment, lengths),
    ):
        column = np.zeros(shape, np.int32)
        column[places] = values
        columns.append(column)
    return Tokens(*columns)


class TrainingBatches(Iterator[Batch]):
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


def shard_batch(batch: Batch, devices: int, accumulation: int = 1) -> Batch:
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

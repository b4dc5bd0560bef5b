"""Batches of packed rows: shuffled, assembled ahead of use, and exactly resumable.

Each batch is a function of (seed, epoch, batch number). So the state of the iterator is two
integers, and every process and worker computes its own share without communication.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
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
    """The batches of one epoch, with random access; the last may have empty rows.

    Each process has the same number of batches, and its own share of their rows.

    rows: rows of a batch on all processes together.
    """

    encoded: EncodedPairs
    plan: Plan
    rows: int
    row_lengths: tuple[int, int]
    process: int = 0
    processes: int = 1

    def __post_init__(self):
        """Raise ValueError unless the processes divide the rows evenly."""
        _check_rows(self.rows, self.processes)

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-(len(self.plan.starts) - 1) // self.rows)

    def __getitem__(self, number: int) -> Batch:
        """Return this process's rows of batch `number`, as numpy arrays."""
        number = range(len(self))[number]
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
            _materialize_rows(source, pairs, row, segment, (share, self.row_lengths[0])),
            _materialize_rows(target, pairs, row, segment, (share, self.row_lengths[1])),
        )

    def padding(self) -> float:
        """Return the share of padding in all positions of source and target, 0 to 1."""
        positions = len(self) * self.rows * sum(self.row_lengths)
        tokens = self.encoded.source.lengths.sum() + self.encoded.target.lengths.sum()
        return 1 - tokens / positions

    def even_row_lengths(self) -> tuple[int, int]:
        """Return the least row lengths, from these up, that fill both sides to the same share.

        Multiples of 128 if both of these are, else even, because some attention needs that.
        """
        source, target = self.row_lengths
        ratio = self.encoded.target.lengths.sum() / self.encoded.source.lengths.sum()
        unit = 2 if source % 128 or target % 128 else 128
        longer = (unit * round(length / unit) for length in (target / ratio, source * ratio))
        return tuple(map(max, self.row_lengths, longer))


def _materialize_rows(side: Ragged, pairs, row, segment, shape: tuple[int, int]) -> Tokens:
    """Return the rows of `shape` with these sentences side by side."""
    lengths = side.lengths[pairs]
    before = np.cumsum(lengths) - lengths
    first_of_row = segment == 1
    start = before - np.repeat(before[first_of_row], np.bincount(row)[np.unique(row)])
    where = (np.repeat(row, lengths), ranges(start, lengths))
    columns = []
    for values in (
        side.ids[ranges(side.starts[pairs], lengths)],
        ranges(np.zeros_like(lengths), lengths),
        np.repeat(segment, lengths),
    ):
        column = np.zeros(shape, np.int32)
        column[where] = values
        columns.append(column)
    return Tokens(*columns)


def _check_rows(rows: int, processes: int) -> None:
    if rows % processes:
        raise ValueError(
            "the rows of a step must divide evenly among the processes; got "
            f"{rows} rows and {processes} processes."
        )


class TrainingBatches(Iterator[Batch]):
    """An endless iterator over batches; each epoch has its own order.

    `get_state` suffices to continue. It does not depend on the number of devices, processes or
    workers.
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
        """Start at epoch 0.

        rows:             rows of a batch on all processes together.
        subword_sampling: the alpha of `EncodedPairs.resample` in each epoch; 0: no sampling.

        Raises ValueError unless the processes divide the rows evenly.
        """
        _check_rows(rows, processes)
        self._encoded, self._row_lengths, self._rows = encoded, row_lengths, rows
        self._seed, self._workers = seed, workers
        self._process, self._processes, self._alpha = process, processes, subword_sampling
        self._packing: Packing | None = None
        self._planned: tuple[int, EpochBatches] | None = None
        self._batches: grain.DatasetIterator | None = None
        self.set_state({"epoch": 0, "batch": 0})

    def epoch(self, number: int) -> EpochBatches:
        """Return the batches of an epoch. The last one returned is cached."""
        if self._planned is None or self._planned[0] != number:
            self._planned = None  # so that two are never in memory
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
        """Return the epoch, the number of its batches returned so far, and a digest of the text."""
        return {"epoch": self._epoch, "batch": self._delivered, "text": self._encoded.digest}

    def is_of_other_text(self, state: dict[str, Any]) -> bool:
        """Return whether the state belongs to an iterator over other text."""
        return state.get("text", self._encoded.digest) != self._encoded.digest

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue after the batches that were returned before `get_state`."""
        self.close()
        self._epoch, self._delivered = state["epoch"], state["batch"]

    def close(self) -> None:
        """End the thread or the worker processes."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None

    def __next__(self) -> Batch:
        """Return the next batch, of the next epoch if this one has ended."""
        while True:
            if self._batches is None:
                epoch = self.epoch(self._epoch)
                # Ctrl-C and a closed terminal also signal the workers and would end them; they
                # inherit the block.
                with _blocked_interrupt(self._workers > 0):
                    self._batches = self._prefetched(epoch)
                    batch = next(self._batches, None)
            else:
                batch = next(self._batches, None)
            if batch is not None:
                self._delivered += 1
                return batch
            self.set_state({"epoch": self._epoch + 1, "batch": 0})

    def _prefetched(self, batches: EpochBatches) -> grain.DatasetIterator:
        """Return the remaining batches of an epoch, prefetched by a thread or worker processes."""
        left = grain.MapDataset.source(batches)[self._delivered :]
        threads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        dataset = left.to_iter_dataset(threads)
        if self._workers:
            from absl import flags

            if not flags.FLAGS.is_parsed():  # grain's workers read absl flags
                flags.FLAGS.mark_as_parsed()
            # Shared memory that a worker allocated and nobody read would leak at exit. Batches are
            # small enough for a pipe.
            through_pipe = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            dataset = grain.experimental.WithOptionsIterDataset(dataset, through_pipe)
            workers = grain.MultiprocessingOptions(num_workers=self._workers)
            dataset = dataset.mp_prefetch(workers, _end_with_parent)
        return iter(dataset)


@contextlib.contextmanager
def _blocked_interrupt(blocked: bool) -> Iterator[None]:
    """Block SIGINT and SIGHUP in the body, and for good in processes that are started there."""
    if blocked:
        resource_tracker.ensure_running()  # starting it would unblock SIGINT
    signals = {signal.SIGINT, signal.SIGHUP} if blocked else ()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent(worker: int, workers: int) -> None:
    """End this worker process when its parent ends, which cannot end it if it is killed."""

    def watch() -> None:
        multiprocessing.parent_process().join()  # returns at once if it has ended already
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def single_pass(
    encoded: EncodedPairs,
    row_lengths: tuple[int, int],
    rows: int,
    process: int = 0,
    processes: int = 1,
) -> EpochBatches:
    """Return one pass over a split in a fixed order, to measure the loss."""
    plan = encoded.packing(row_lengths).plan()
    return EpochBatches(encoded, plan, rows, row_lengths, process, processes)


def shard_batch(batch: Batch, devices: int, accumulation: int = 1) -> Batch:
    """Reshape a batch for `train_step`: [rows length] to [devices accumulation rows length].

    Raises ValueError unless the rows divide evenly.
    """
    rows = batch.source.ids.shape[0]
    if rows % (devices * accumulation):
        raise ValueError(
            "the rows of a step must divide evenly among devices and accumulated batches; got "
            f"{rows} rows, {devices} devices, {accumulation} batches. Change data.rows_per_batch."
        )

    def split(tokens: Tokens) -> Tokens:
        shape = devices, accumulation, -1, tokens.ids.shape[-1]
        return Tokens(*(column.reshape(shape) for column in tokens))

    return Batch(*map(split, batch))

"""Scheduling of a search: which sentences are in a pool, in which shape, and when others join.

Nothing here is compiled; `pool` has the programs, `batching` the devices that run them.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from flaxformer_min.decoding.pool import Newcomers, PoolShape, Report, Rules, move, run
from flaxformer_min.decoding.search import Hypotheses
from flaxformer_min.tokens import PAD

LENGTHS = (16, 24, 40, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens that sentences are padded to; no source may be longer than the last."""

LONGEST_PREFIX = 2 * LENGTHS[-1]
"""Most tokens of a forced prefix."""

BATCHES = (1, 8, 16, 32, 64)
"""Sentences that a pool has, on each device; the configured batch size is the last."""

IDLE_SHARE = 8
"""A pool returns for more newcomers once one of so many slots is idle."""

MAX_BATCH_TOKENS = 64 * 128
"""Most source tokens of a batch on one device: long sentences come in smaller batches."""


@dataclasses.dataclass(frozen=True)
class Options(Rules):
    """How to search, and for how long; the defaults are the paper's (section 6.1)."""

    max_extra_tokens: int = 50
    seed: int = 0

    def __post_init__(self):
        """Raise ValueError for numbers of another type or out of range."""
        object.__setattr__(self, "suppressed", tuple(self.suppressed))
        least = {"beam_size": 1, "n_best": 1, "max_extra_tokens": 1, "min_length": 0, "seed": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number; got {value!r}.")
            if value < minimum:
                raise ValueError(f"{name} must be at least {minimum}; got {value}.")


@dataclasses.dataclass
class Usage:
    """What searches have computed: one lane is one hypothesis of one sentence.

    steps:    of pools.
    computed: lanes in all steps.
    needed:   lanes with a hypothesis that was alive, of sentences that were not begun again.
    """

    steps: int = 0
    computed: int = 0
    needed: int = 0

    def add_steps(self, steps: np.ndarray, shape: PoolShape, rules: Rules) -> None:
        """Count the steps that the pool took on each device, after newcomers took their first."""
        self.steps += int(steps.sum())
        self.computed += int(steps.sum()) * shape.slots * rules.beam_size
        if rules.competing:
            self.computed += len(steps) * shape.slots

    @property
    def share(self) -> float:
        """Return the share of the lanes that were needed."""
        return self.needed / max(self.computed, 1)


@dataclasses.dataclass(frozen=True)
class Job:
    """What a call of `BatchRunner.search` is asked for.

    prefix: tokens that prefixes are padded to.
    roomy:  whether caches have room for the longest translations.
    """

    runner: Any
    sources: dict[int, list[int]]
    prefixes: dict[int, list[int]]
    options: Options
    prefix: int
    roomy: bool = False

    @property
    def rules(self) -> Rules:
        """What programs are compiled for."""
        fields = dataclasses.fields(Rules)
        return Rules(**{field.name: getattr(self.options, field.name) for field in fields})

    def length(self, line: int) -> int:
        """Return the tokens of a source."""
        return len(self.sources[line])

    def limit(self, line: int) -> int:
        """Return the most tokens of a translation, prefix and EOS included."""
        limit = self.length(line) + self.options.max_extra_tokens
        return min(limit, self.runner.max_positions or limit)

    def newcomers(self, of_devices: list[list[int]], shape: PoolShape) -> Newcomers:
        """Return the arrays of the lines that join the pool of each device."""
        each = [self._newcomers(lines, shape) for lines in of_devices]
        return jax.tree.map(lambda *arrays: np.stack(arrays), *each)

    def _newcomers(self, lines: list[int], shape: PoolShape) -> Newcomers:
        rows = shape.slots
        numbers = [(self.limit(line), line) for line in lines] + [(1, 0)] * (rows - len(lines))
        limits, numbers = np.ascontiguousarray(np.array(numbers, np.int32).T)
        seed = prefix = None
        if self.options.sampling is not None:
            # An argument of the program: as a constant, each seed would need its own compilation.
            key = np.asarray(jax.random.key_data(jax.random.key(self.options.seed)))
            seed = np.broadcast_to(key, (rows, *key.shape))
        if shape.prefix:
            prefix = padded([self.prefixes[line] for line in lines], rows, shape.prefix)
        source = padded([self.sources[line] for line in lines], rows, shape.width)
        return Newcomers(np.int32(len(lines)), source, limits, numbers, seed, prefix)


class Lanes:
    """The sentences that one core, or all accelerators, search together."""

    def __init__(self, job: Job, waiting: deque[int]):
        """Take lines from `waiting`, longest sources first."""
        self.job, self.waiting = job, waiting
        self.shape: PoolShape | None = None
        self.lines: list[list[int | None]] = []

    def admit(self) -> bool:
        """Choose who joins next; return whether there is anything to do."""
        self._fit_shape()
        if self.shape is None:
            return False
        self.joining: list[list[int]] = [[] for _ in self.lines]
        while self._may_admit() and len(self.joining[-1]) < self.shape.slots:
            for of_device in self.joining:
                if self._may_admit():
                    of_device.append(self.waiting.popleft())
        self._prepare()
        return True

    def _prepare(self) -> None:
        """Prepare `run`. Programs are compiled here, in one thread, so that none is twice."""
        runner, shape, rules = self.job.runner, self.shape, self.job.rules
        self.newcomers = self.job.newcomers(self.joining, shape)
        least = -(-shape.slots // IDLE_SHARE) if self._may_admit() else shape.slots
        self.least_idle = np.full(len(runner.devices), least, np.int32)
        begin = runner.begin(rules, shape)
        program = partial(run, runner.models, begin=begin, rules=rules, shape=shape)
        arrays = self.pool, self.newcomers, self.least_idle
        self.program = runner.compiled(("run", rules, shape), program, *arrays, donate=(1,))

    def _may_admit(self) -> bool:
        """Return whether the next line may join those that are alive."""
        return bool(self.waiting) and self._fits(self.waiting[0], self.shape.width)

    def _fits(self, line: int, width: int) -> bool:
        """Return whether a line is not so short that a pool of this width would be wasted on it."""
        return 4 * bucket(self.job.length(line), self.job.runner.lengths) >= width

    def _fit_shape(self) -> None:
        """Make, or change, the pool according to what is alive and what waits."""
        lengths = [
            self.job.length(line) for free in self.lines for line in free if line is not None
        ]
        runner = self.job.runner
        if not lengths:
            self.shape, self.pool, self.lines = None, None, []
            if self.waiting:
                self._make()
            return
        longest = max(*lengths, self._next_length())
        is_narrower = bucket(longest, runner.lengths) < self.shape.width
        if len(self.waiting) < self.shape.slots or not is_narrower:
            return
        shape = self._shape_of_waiting(longest)
        if shape.slots >= self.shape.slots:
            key = ("move", self.job.rules, self.shape, shape)
            moved = runner.compiled(key, lambda params, pool: move(pool, shape), self.pool)
            self.pool, self.shape = moved(runner.params, self.pool), shape
            for free in self.lines:
                free += [None] * (shape.slots - len(free))

    def _make(self) -> None:
        runner = self.job.runner
        self.shape = self._shape_of_waiting(self._next_length())
        self.lines = [[None] * self.shape.slots for _ in runner.devices]
        nobody = self.job.newcomers([[]], self.shape)
        self.pool = runner.empty_pool(self.job.rules, self.shape, nobody)

    def _next_length(self) -> int:
        return self.job.length(self.waiting[0]) if self.waiting else 0

    def _shape_of_waiting(self, longest: int) -> PoolShape:
        """Return the shape for sources up to `longest`, and for those that wait and may join."""
        runner = self.job.runner
        width = bucket(longest, runner.lengths)
        # More than two rounds of the largest pool make no difference.
        first = itertools.islice(self.waiting, 2 * runner.batch_size * len(runner.devices))
        joining = sum(self._fits(line, width) for line in first)
        return runner.shape(self.job, longest, joining)

    def run(self) -> Report:
        """Search until the newcomers have joined and some sentences are done; all if none waits."""
        arguments = self.job.runner.params, self.pool, self.newcomers, self.least_idle
        self.pool, report = self.program(*arguments)
        return jax.device_get(report)

    def collect(self, report: Report, outgrown: list[int]) -> tuple[list[int], Hypotheses]:
        """Return lines that are done and their hypotheses; those that outgrew go to their list."""
        rows, batch = [], []
        usage = self.job.runner.usage
        usage.add_steps(report.steps, self.shape, self.job.rules)
        for device, (old, new) in enumerate(zip(self.lines, self.joining, strict=True)):
            lines = dict(enumerate(old)) | dict(enumerate(new, start=self.shape.slots))
            outcome = jax.tree.map(lambda array, device=device: array[device], report.outcome)
            for row, line in lines.items():
                if line is None or not outcome.done[row]:
                    continue
                lines[row] = None
                if outcome.outgrown[row]:
                    outgrown.append(line)
                else:
                    usage.needed += int(outcome.lanes[row])
                    rows.append((device, row))
                    batch.append(line)
            self.lines[device] = [lines[row] for row in report.holds[device].tolist()]
        index = tuple(np.array(rows, int).reshape(-1, 2).T)
        return batch, jax.tree.map(lambda array: array[index], report.outcome.finished)


def padded(sentences: list[list[int]], rows: int, width: int) -> np.ndarray:
    """Return token ids as rows, PAD where there is none."""
    ids = np.full((rows, width), PAD, np.int32)
    for row, sentence in zip(ids, sentences, strict=False):
        row[: len(sentence)] = sentence
    return ids


def bucket(length: int, sizes: Sequence[int]) -> int:
    """Return the first of the increasing `sizes` that is at least `length`.

    >>> bucket(13, LENGTHS)
    16
    """
    return next(size for size in sizes if size >= length)

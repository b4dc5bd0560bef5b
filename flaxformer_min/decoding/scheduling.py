"""Scheduling of a search: which sentences are in a pool, in which shape, and who joins next.

Nothing here is compiled; `pool` has the programs, `batching` the devices that run them.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from flaxformer_min.decoding.pool import (
    Newcomers,
    PoolShape,
    Report,
    Rules,
    can_resize,
    move,
    run,
)
from flaxformer_min.decoding.search import Hypotheses
from flaxformer_min.tokens import PAD

LENGTHS = (16, 24, 40, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens that sentences are padded to; no source may be longer than the last."""

LONGEST_PREFIX = 2 * LENGTHS[-1]
"""Most tokens of a forced prefix."""

BATCHES = (1, 8, 16, 32, 64, 128, 256)
"""Sentences that a pool has, on each device; the configured batch size is the last."""

USUAL_BATCH = {"cpu": 64, "accelerator": 256}
"""Most sentences at once on each device, unless a number is configured."""

WIDEST = 4
"""A sentence is computed in at most so many times its own width."""

LONGEST_OF_A_FULL_BATCH = 128
"""Source tokens with which the usual batch is still full; longer sentences come in smaller ones."""


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

    def add_steps(self, report: Report, shape: PoolShape, rules: Rules) -> None:
        """Count the steps that the pool took on each device, after newcomers took their first."""
        self.steps += int(report.steps.sum())
        self.computed += int(report.slots.sum()) * rules.beam_size
        if rules.competing:
            self.computed += len(report.steps) * shape.slots

    @property
    def share(self) -> float:
        """Return the share of the lanes that were needed."""
        return self.needed / max(self.computed, 1)


@dataclasses.dataclass(frozen=True)
class Job:
    """What a call of `BatchRunner.search` is asked for.

    prefix: tokens that prefixes are padded to.
    """

    runner: Any
    sources: dict[int, list[int]]
    prefixes: dict[int, list[int]]
    options: Options
    prefix: int

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

    def rooms(self, tokens: int) -> tuple[int, ...]:
        """Return the capacities for so many tokens: one that is rarely too small, and the most.

        Hypotheses that compete share most of their tokens.
        """
        most = tokens * self.options.beam_size
        return (min(2 * tokens, most), most) if self.rules.competing else (most,)

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
    """The sentences that one core, or all accelerators, search together.

    Short ones come first. A translation that outgrows its cache begins again as soon as there is a
    pool with room for it, so it need not go on alone after all others.
    """

    def __init__(self, job: Job, lines: Sequence[int]):
        """Take these lines, shortest sources first."""
        self.job = job
        # The last of each is the next.
        self.waiting = [*reversed(lines)]
        self.outgrown: list[int] = []
        self.outgrew: dict[int, int] = {}
        self.shape: PoolShape | None = None
        self.lines: list[list[int | None]] = []

    def admit(self) -> bool:
        """Choose who joins next; return whether there is anything to do."""
        alive = [line for slots in self.lines for line in slots if line is not None]
        if not alive and not self._count_waiting():
            return False
        if self._count_waiting() and not self._next(self.shape):
            self._change_shape(alive)
        self.joining: list[list[int]] = [[] for _ in self.lines]
        while self._next(self.shape) and len(self.joining[-1]) < self.shape.slots:
            for of_device in self.joining:
                if queue := self._next(self.shape):
                    of_device.append(queue.pop())
        self._prepare()
        return True

    def _count_waiting(self) -> int:
        return len(self.waiting) + len(self.outgrown)

    def _next(self, shape: PoolShape | None) -> list[int]:
        """Return the queue whose next line may join a pool: it has room there, and few lanes idle.

        Those that outgrew a pool are first, because they take long.
        """
        for queue in (self.outgrown, self.waiting):
            if shape is None or not queue:
                continue
            line = queue[-1]
            has_room = queue is self.waiting or self._room(line) <= shape.capacity
            if has_room and self._width(line) <= shape.width <= WIDEST * self._width(line):
                return queue
        return []

    def _width(self, line: int) -> int:
        return bucket(self.job.length(line), self.job.runner.lengths)

    def _room(self, line: int) -> int:
        """Return the capacity with which a line begins again."""
        return bucket(self.outgrew.get(line, 0) + 1, self.job.rooms(self.job.limit(line)))

    def _prepare(self) -> None:
        """Prepare `run`. Programs are compiled here, in one thread, so that none is twice."""
        runner, shape, rules = self.job.runner, self.shape, self.job.rules
        self.newcomers = self.job.newcomers(self.joining, shape)
        self.least_idle = np.full(len(runner.devices), self._least_idle(), np.int32)
        begin = runner.begin(rules, shape)
        program = partial(run, runner.models, begin=begin, rules=rules, shape=shape)
        arrays = self.pool, self.newcomers, self.least_idle
        self.program = runner.compiled(("run", rules, shape), program, *arrays, donate=(1,))

    def _least_idle(self) -> int:
        """Return how many slots must be idle before more newcomers come, or another shape."""
        slots = self.shape.slots
        waiting = self._count_waiting()
        if not waiting or not any(self.joining):
            return slots
        if waiting < slots * len(self.lines) and not self._next(self.shape):
            return slots - slots // 4  # for a larger shape takes longer for each that is alive
        return -(-slots // 16)

    def _change_shape(self, alive: list[int]) -> None:
        """Make a pool for the next line, or move those that are alive to one, if it suits them.

        If no line that waits suits them, they go on among themselves.
        """
        runner = self.job.runner
        widest = WIDEST * min(map(self._width, alive), default=LENGTHS[-1])
        following = [
            queue[-1]
            for queue in (self.waiting, self.outgrown)
            if queue and self._width(queue[-1]) <= widest
        ]
        shape = self._shape_for(alive, following[:1])
        if not alive:
            self.shape = shape
            self.lines = [[None] * shape.slots for _ in runner.devices]
            nobody = self.job.newcomers([[]], shape)
            self.pool = runner.empty_pool(self.job.rules, shape, nobody)
        elif (
            shape != self.shape
            and (self._next(shape) or not following)
            and self._fullest() <= shape.slots
            and shape.width <= widest
            and (shape.width == self.shape.width or can_resize(self.pool))
        ):
            self._move(shape)

    def _shape_for(self, alive: list[int], following: list[int]) -> PoolShape:
        """Return the shape of a pool for those alive, who comes next, and those that come later."""
        runner, job, devices = self.job.runner, self.job, len(self.job.runner.devices)
        width = max(map(self._width, [*alive, *following]))
        # A pool of its own would be compiled for little if only few lines had this width.
        few = self.waiting[-(runner.batch_size * devices // 4) :]
        widths = [self._width(line) for line in few]
        width = max([width, *(each for each in widths if each <= WIDEST * width)])
        waiting = [*self.waiting, *self.outgrown]
        fitting = [line for line in waiting if self._width(line) <= width]
        fullest = self._fullest()
        least = max(fullest, runner.batch_size // 4) if fullest else 0
        shape = runner.shape(job, width, len(fitting) + len(alive), least)
        room = self.shape.capacity if fullest else 0
        near = [line for line in self.waiting if self._width(line) <= WIDEST * width]
        is_last = len(near) <= runner.batch_size // 4 * devices
        if is_last:
            room = max([room, *map(self._room, fitting)])
        capacity = bucket(room, (shape.capacity, *job.rooms(shape.steps)))
        return dataclasses.replace(shape, capacity=capacity, last=is_last and shape.slots > 1)

    def _fullest(self) -> int:
        """Return the most sentences that are alive on one device."""
        return max((sum(line is not None for line in slots) for slots in self.lines), default=0)

    def _move(self, shape: PoolShape) -> None:
        runner, old = self.job.runner, self.shape
        order = np.full((len(self.lines), shape.slots), old.slots, np.int32)
        for device, slots in enumerate(self.lines):
            kept = [slot for slot, line in enumerate(slots) if line is not None]
            order[device, : len(kept)] = kept
            lines = [slots[slot] for slot in kept]
            self.lines[device] = lines + [None] * (shape.slots - len(lines))
        key, arrays = ("move", self.job.rules, old, shape), (self.pool, order)
        moved = runner.compiled(key, lambda _, pool, order: move(pool, order, shape), *arrays)
        self.pool, self.shape = moved(runner.params, *arrays), shape

    def run(self) -> Report:
        """Search until the newcomers have joined and some sentences are done; all if none waits."""
        arguments = self.job.runner.params, self.pool, self.newcomers, self.least_idle
        self.pool, report = self.program(*arguments)
        return jax.device_get(report)

    def collect(self, report: Report) -> tuple[list[int], Hypotheses]:
        """Return lines that are done and their hypotheses; those that outgrew wait again."""
        rows, batch = [], []
        usage = self.job.runner.usage
        usage.add_steps(report, self.shape, self.job.rules)
        for device, (old, new) in enumerate(zip(self.lines, self.joining, strict=True)):
            lines = dict(enumerate(old)) | dict(enumerate(new, start=self.shape.slots))
            outcome = jax.tree.map(lambda array, device=device: array[device], report.outcome)
            for row, line in lines.items():
                if line is None or not outcome.done[row]:
                    continue
                lines[row] = None
                if outcome.outgrown[row]:
                    self.outgrown.append(line)
                    self.outgrew[line] = self.shape.capacity
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

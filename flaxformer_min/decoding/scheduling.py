"""Scheduling of a search: which sentences are in a pool, in which shape, and who joins next.

Nothing here is compiled; `programs` is, and `batching` has the devices that run it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_min.decoding.job import Job
from flaxformer_min.decoding.moves import Rows, arrangement, leaving, rows
from flaxformer_min.decoding.pool import Pool, PoolShape
from flaxformer_min.decoding.programs import Report, finish, run
from flaxformer_min.decoding.search import Hypotheses
from flaxformer_min.decoding.shapes import WIDEST, bucket, last_shape, most_last, rooms


@dataclasses.dataclass
class Usage:
    """What searches have computed: one lane is one hypothesis of one sentence.

    steps:       of pools.
    computed:    lanes in all steps.
    needed:      lanes with a hypothesis that was alive.
    cache_bytes: read in all steps. A step reads the caches of its pool as a whole: of the source
                 and of the tokens so far, entries that are masked included.
    """

    steps: int = 0
    computed: int = 0
    needed: int = 0
    cache_bytes: int = 0

    def add_steps(self, report: Report, pool: Pool) -> None:
        """Count the steps that the pool took on each device."""
        steps, devices = int(report.steps.sum()), report.steps.size
        self.steps += steps
        self.computed += int(report.computed.sum())
        caches = sum(leaf.nbytes for leaf in jax.tree.leaves(pool.state.cache))
        self.cache_bytes += steps * caches // devices

    @property
    def share(self) -> float:
        """Return the share of the lanes that were needed."""
        return self.needed / max(self.computed, 1)


class Paused(NamedTuple):
    """A sentence that waits for a larger pool: its rows, and their capacity."""

    capacity: int
    rows: list[np.ndarray]


class PoolScheduler:
    """Decides which sentences one core, or all accelerators, search together, and in which pool.

    A sentence that outgrows its cache pauses until the others move to a larger pool, so that it
    need not go on alone after them.
    """

    def __init__(self, job: Job, lines: Sequence[int]):
        """Take these lines, in the order of the job."""
        self.job = job
        self.waiting = [*reversed(lines)]  # the last is the next
        self.paused: dict[int, Paused] = {}
        self.shape: PoolShape | None = None
        self.ending: PoolShape | None = None  # of the `run` whose last sentences go on
        # Who moves to each of the pools that are made next, and their shapes and types.
        self.groups: list[list[list[Rows]]] = []
        self.arrays: Callable[[], Sequence[Pool]] = tuple
        self.moving: list[Callable[[], Pool]] = []  # what `run` makes them by
        self.lines: list[list[int | None]] = [[] for _ in job.runner.devices]

    def admit(self) -> bool:
        """Choose who joins next; return whether there is anything to do."""
        alive = [line for slots in self.lines for line in slots if line is not None]
        if not (alive or self.waiting or self.paused):
            return False
        if self.shape is not None and self._fullest() <= self._most_last(alive):
            self._prepare_finish()
            return True
        if self._is_crowded() or not self._can_join():
            self._change_shape(alive)
        self.joining: list[list[int]] = [[] for _ in self.lines]
        while not self._is_crowded() and self._can_join():
            of_device = min(self.joining, key=len)
            if len(of_device) == self.shape.newcomers:
                break
            of_device.append(self.waiting.pop())
        self._prepare(alive)
        return True

    def _following(self, alive: list[int]) -> list[int]:
        """Return the next line that may join those alive; none if all are too long for them."""
        waiting, paused, widest = self.waiting[-1:], [*self.paused], self._widest(alive)
        lines = paused + waiting if self._is_crowded() else waiting + paused
        return [line for line in lines if self.job.width(line) <= widest][:1]

    def _widest(self, alive: list[int]) -> int:
        """Return the largest width in which those alive may go on."""
        return WIDEST * min(map(self.job.own_width, alive), default=self.job.runner.lengths[-1])

    def _is_crowded(self) -> bool:
        """Return whether so many sentences pause that no others may begin: they take memory."""
        if self.shape is None:
            return False
        return 2 * len(self.paused) >= self.shape.newcomers * len(self.lines)

    def _can_join(self) -> bool:
        """Return whether the pool suits the next line that waits."""
        if self.shape is None or not self.waiting:
            return False
        return self._suits(self.shape.width, self.waiting[-1])

    def _suits(self, width: int, line: int) -> bool:
        return self.job.width(line) <= width <= WIDEST * self.job.own_width(line)

    def _room(self, line: int) -> int:
        """Return the capacity with which a line can go on."""
        needed = self.paused[line].capacity + 1 if line in self.paused else 0
        return bucket(needed, (*rooms(self.job.limit(line), self.job.rules), needed))

    def _prepare(self, alive: list[int]) -> None:
        """Prepare `run`."""
        runner, shape, rules, self.ending = self.job.runner, self.shape, self.job.rules, None
        least_idle = self._least_idle(sum(self.joining, alive))
        least_idle = np.full(len(runner.devices), least_idle, np.int32)
        self.arguments = self.job.newcomers(self.joining, shape), least_idle
        begin = runner.begin(rules, shape)
        program = partial(run, runner.models, begin=begin, rules=rules, shape=shape)
        self._wanted = ("run", rules, shape), program

    def _most_last(self, alive: list[int]) -> int:
        """Return how many may be alive for `finish`; -1 while others may follow them."""
        widest, resumed = self._widest(alive), self._resumed_last()
        follows = any(self.job.width(line) <= widest for line in self.waiting[-1:])
        if follows or not (alive or resumed):
            return -1
        slots, in_turn = (self.ending or self.shape).slots, self.job.runner.suits_few()
        most = most_last(slots, in_turn)
        # In turn, those that find no room go on in a further `finish` of the same shape.
        return most if in_turn and most else max(most - len(resumed), -1)

    def _resumed_last(self) -> list[int]:
        """Return the lines that pause and go on with the last of this pool."""
        return [line for line in self.paused if self._suits(self.shape.width, line)]

    def _prepare_finish(self) -> None:
        """Prepare `finish` for those that are left, as `_prepare` does `run`.

        They get so much room that hardly any will pause again.
        """
        runner, rules, resumed = self.job.runner, self.job.rules, self._resumed_last()
        old = self.ending = self.ending or self.shape
        room = max([old.capacity, *(self.paused[line].capacity + 1 for line in resumed)])
        capacity = bucket(room, (*rooms(old.steps, rules), room))
        shape = last_shape(old, capacity, runner.suits_few(), rules.beam_size)
        arrays = runner.last_arrays(rules, shape, self.pool)
        sizes = [each.paused.shape[1] for each in arrays]
        self._build(shape, resumed, sizes, lambda: arrays)
        rows, self.lines = self.lines, [each[: shape.slots] for each in self.lines]
        # Those alive are the first in the rows.
        self.joining = [[line for line in each[shape.slots :] if line is not None] for each in rows]
        self.arguments = ()
        program = partial(finish, runner.models, rules=rules, shape=shape)
        self._wanted = ("finish", rules, shape), program

    def _least_idle(self, alive: list[int]) -> int:
        """Return how many slots must be idle before more newcomers come, or another shape."""
        slots, waiting = self.shape.slots, len(self.waiting) + len(self.paused)
        if (last := self._most_last(alive)) > 0 or not self._following(alive):
            return slots - max(last, 0)
        if not any(self.joining):
            # Those that could go on here found no idle slot, so at least one step is taken.
            if any(self._can_resume(line, self.shape) for line in self.paused):
                return min(-(-self.shape.newcomers // 4), -(-slots // 2))
            return slots - self._fullest() // 2  # the next shape may have room for half of them
        if waiting < self.shape.newcomers * len(self.lines) and not self._can_join():
            return -(-slots // 2)  # for a larger shape takes longer for each that is alive
        return 1

    def _change_shape(self, alive: list[int]) -> None:
        """Make a pool for the next line, or move those that are alive to one, if it suits them.

        Those that pause go on there if they have room. If no line that waits suits those alive,
        they go on among themselves.
        """
        following, widest = self._following(alive), self._widest(alive)
        shape = self._shape_for(alive, following)
        if alive and not (
            all(self._suits(shape.width, line) for line in following)
            and self._fullest() <= shape.slots
            and shape.width <= widest
        ):
            shape = self.shape
        resumed = [line for line in self.paused if self._can_resume(line, shape)]
        if shape != self.shape or (resumed and self._fullest() < shape.slots):
            self._build(shape, resumed, [shape.slots], lambda: [self.job.pool_arrays(shape)])

    def _can_resume(self, line: int, shape: PoolShape) -> bool:
        """Return whether a line that pauses can go on in a pool of this shape."""
        return self.paused[line].capacity < shape.capacity and self._suits(shape.width, line)

    def _shape_for(self, alive: list[int], following: list[int]) -> PoolShape:
        """Return the shape of a pool for those alive, who comes next, and those that come later."""
        runner, job, devices = self.job.runner, self.job, len(self.job.runner.devices)
        fullest = self._fullest()
        width = max(map(self.job.width, [*alive, *following]))
        if fullest:
            width = max(width, self.shape.width)
        quarter = runner.most_sentences() // 4
        fitting = [line for line in (*self.waiting, *self.paused) if self._suits(width, line)]
        least = max(fullest, quarter) if fullest else 0
        shape = runner.shape(job, width, len(fitting) + len(alive), least)
        room = self.shape.capacity if fullest else 0
        near = [line for line in self.waiting if self.job.width(line) <= WIDEST * width]
        if len(near) <= quarter * devices:  # the last ones
            room = max([room, *map(self._room, fitting)])
        elif self._is_crowded():
            room = max([room, *(self._room(line) for line in fitting if line in self.paused)])
        # `room` itself, because a model of one's own may ask for more than all tokens need.
        capacity = bucket(room, (shape.capacity, *rooms(shape.steps, job.rules), room))
        return dataclasses.replace(shape, capacity=capacity)

    def _fullest(self) -> int:
        """Return the most sentences that are alive on one device."""
        return max((sum(line is not None for line in slots) for slots in self.lines), default=0)

    def _build(
        self,
        shape: PoolShape,
        resumed: list[int],
        sizes: list[int],
        arrays: Callable[[], Sequence[Pool]],
    ) -> None:
        """Let `run` make a pool of this shape, of the sentences alive and of those resumed.

        sizes:  of the devices' pools, and of others for those that have no slot.
        arrays: returns shapes and types of these. It may load a program, so no sooner than needed.
        """
        lines = [[line for line in slots if line is not None] for slots in self.lines]
        moving: list[list[Any]] = [
            [slot for slot, line in enumerate(slots) if line is not None] for slots in self.lines
        ]
        for line in resumed:
            device = min(range(len(lines)), key=lambda device: len(lines[device]))
            if len(lines[device]) < sum(sizes):
                lines[device].append(line)
                moving[device].append(self.paused.pop(line).rows)
        self.groups, self.arrays = [], arrays
        for size in sizes:
            self.groups.append(
                [self._rows(device, each[:size]) for device, each in enumerate(moving)]
            )
            moving = [each[size:] for each in moving]
        self.pool = None  # frees its memory before `run` makes the next one
        self.lines = [each + [None] * (sum(sizes) - len(each)) for each in lines]
        self.shape = shape

    def _rows(self, device: int, moving: list[Any]) -> list[Rows]:
        """Return the rows of those that move: in slots of a device, or such that paused."""
        slots = [each for each in moving if isinstance(each, int)]
        paused = [each for each in moving if not isinstance(each, int)]
        return [leaving(self.pool, device, slots, self.job.runner), *paused] if slots else paused

    def needs_program(self) -> bool:
        """Return whether the next program must still be compiled or loaded."""
        return not self.job.runner.has_compiled(self._wanted[0])

    def compile(self) -> None:
        """Get that program. In one thread, so that none is compiled twice."""
        runner = self.job.runner
        pools = self.arrays() if self.groups else [self.pool]
        self.program = runner.compiled(*self._wanted, *pools, *self.arguments, donate=(1,))
        moves = zip(self.groups, pools, strict=False)  # none if the pool stays
        self.moving = [arrangement(groups, pool, runner) for groups, pool in moves]
        self.groups = []

    def run(self, launched: Event) -> Report:
        """Search until the newcomers have joined and some sentences, or most or all, are done.

        Sets `launched` once the devices compute.
        """
        runner = self.job.runner
        if self.moving:  # not before, because other cores run beside this
            self.pool, *others = [move() for move in self.moving]
            self.arguments, self.moving = (*others, *self.arguments), []
        self.pool, report = self.program(runner.params, self.pool, *self.arguments)
        launched.set()
        return jax.device_get(report)

    def collect(self, report: Report) -> tuple[list[int], Hypotheses]:
        """Return lines that are done and their hypotheses; those that outgrew the pool pause."""
        done, batch, not_joined = [], [], []
        usage = self.job.runner.usage
        usage.add_steps(report, self.pool)
        for device, (old, new) in enumerate(zip(self.lines, self.joining, strict=True)):
            lines = dict(enumerate(old)) | dict(enumerate(new, start=self.shape.slots))
            outcome = jax.tree.map(lambda array, device=device: array[device], report.outcome)
            not_joined += new[int(report.joined[device]) :]
            for row, line in lines.items():
                if line is not None and outcome.done[row]:
                    lines[row] = None
                    usage.needed += int(outcome.lanes[row])
                    done.append((device, row))
                    batch.append(line)
            self.lines[device] = [lines[row] for row in report.holds[device].tolist()]
            self._pause(device, np.flatnonzero(report.paused[device]).tolist())
        self.waiting += sorted(not_joined, key=self.job.order, reverse=True)
        index = tuple(np.array(done, int).reshape(-1, 2).T)
        found = jax.tree.map(lambda array: array[index], report.outcome.finished)
        return batch, found if self.job.rules.scores else _without_scores(found)

    def _pause(self, device: int, slots: list[int]) -> None:
        """Take the sentences in these slots out of the pool."""
        if not slots:
            return
        arrays = [*rows(self.pool, device, slots)]
        for row, slot in enumerate(slots):
            line = self.lines[device][slot]
            self.paused[line] = Paused(
                self.shape.capacity, [array[row : row + 1] for array in arrays]
            )
            self.lines[device][slot] = None


def _without_scores(found: Hypotheses) -> Hypotheses:
    """Return the hypotheses with NaN for their log-probabilities and scores."""
    unknown = np.where(found.log_prob > -np.inf, np.nan, -np.inf).astype(np.float32)
    return found._replace(log_prob=unknown, score=unknown)

"""The programs that search in a pool: `run`, while sentences join it, and `finish`.

They run on one device; `scheduling` decides what they are given.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from flaxformer_min.decoding.ensemble import search_of
from flaxformer_min.decoding.pool import Begin, Newcomers, Pool, PoolShape, taken, with_room, zeros
from flaxformer_min.decoding.search import Hypotheses, Rules, Search, State
from flaxformer_min.model.target import target_platform

OPTIONS = {
    "cpu": {"xla_disable_hlo_passes": "tree_reduction_rewriter"},
    "cuda": {
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE"
        )
    },
}
"""Options of the compiler for a platform.

On a CPU that pass splits each sum into two operations, to reduce rounding errors. Sums over
features or keys are short, and each operation takes time and memory of its own. On an NVIDIA GPU,
CONDITIONAL and WHILE make a graph of each loop, which would otherwise wait for the host at each
turn, for a quarter of a step.
"""

SINGLE_THREADED = {"xla_cpu_multi_thread_eigen": False}
"""A further one for programs that run beside each other, one on each core."""

JOINING = 32
"""Most newcomers that join at once on an NVIDIA GPU, where a turn of a loop is tens of kernels."""


def compiler_options(cores: int) -> dict[str, Any]:
    """Return the options to compile with for so many cores, less those that XLA_FLAGS sets."""
    options = OPTIONS.get(target_platform(), {}) | (SINGLE_THREADED if cores > 1 else {})
    chosen = {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if f"--{name}" not in chosen}


class Outcome(NamedTuple):
    """How far the search for each sentence has come; `finished` counts for those `done`."""

    done: Bool[Array, " sentences"]
    lanes: Int[Array, " sentences"]
    finished: Hypotheses


class Report(NamedTuple):
    """What `run` or `finish` did.

    Its sentences are those that were in the slots before, and behind them the newcomers.

    computed: hypotheses with which a step was taken, or could have been, summed over the steps.
    joined:   how many newcomers have a slot.
    holds:    the sentence that is in each slot now.
    paused:   those slots whose sentences must go on in a larger pool.
    """

    steps: Int[Array, ""]
    computed: Int[Array, ""]
    joined: Int[Array, ""]
    holds: Int[Array, " slots"]
    paused: Bool[Array, " slots"]
    outcome: Outcome


class _Begun(NamedTuple):
    """Sentences that are begun and join next; `first` is the number of the first of them."""

    first: Int[Array, ""]
    pool: Pool


class _Call(NamedTuple):
    """A call of `run` or `finish` on its way."""

    pool: Pool
    begun: _Begun | None
    report: Report


def run(
    models: Sequence[Any],
    params: Sequence[Any],
    pool: Pool,
    newcomers: Newcomers,
    least_idle: Int[Array, ""],
    *,
    begin: Begin,
    rules: Rules,
    shape: PoolShape,
) -> tuple[Pool, Report]:
    """Search until all newcomers have joined and `least_idle` slots have no active sentence.

    A newcomer joins as soon as a slot is idle. Sentences that paused in an earlier call have left.
    """
    none = jnp.zeros(shape.part, jnp.int32)

    def begin_next(begun: _Begun) -> _Begun:
        first = begun.first + shape.part
        state = begin(params, taken(newcomers, first, shape.part))
        return _Begun(first, Pool(state, none.astype(bool), none))

    before_all = _Begun(jnp.int32(-shape.part), None)
    nobody = zeros(jax.eval_shape(begin_next, before_all).pool, shape.part)
    return _search(
        search_of(models, params, rules),
        _leave(pool),
        before_all._replace(pool=nobody),
        newcomers.count,
        least_idle,
        shape,
        begin_next,
    )


def finish(
    models: Sequence[Any],
    params: Sequence[Any],
    pool: Pool,
    others: Pool | None = None,
    *,
    rules: Rules,
    shape: PoolShape,
) -> tuple[Pool, Report]:
    """Search to the end in few slots.

    others: as many sentences as there are newcomers, those alive first. They have no slot yet, and
            join as those of the pool end. None: there are none.
    """
    search, nobody = search_of(models, params, rules), jnp.int32(0)
    begun = None if others is None else _Begun(nobody, others)
    count = nobody if others is None else _count_active(others)
    return _search(search, pool, begun, count, jnp.int32(shape.slots), shape)


def _search(
    search: Search,
    pool: Pool,
    begun: _Begun | None,
    count: Int[Array, ""],
    least_idle: Int[Array, ""],
    shape: PoolShape,
    begin_next: Callable[[_Begun], _Begun] | None = None,
) -> tuple[Pool, Report]:
    """Search until `count` sentences have joined and `least_idle` slots are idle or pause.

    begun:      None: nobody joins.
    begin_next: begins those after all that are begun; None: nobody is left.
    """

    def joins(now: _Call) -> Bool[Array, ""]:
        return (now.report.joined < count) & (_count_idle(now.pool) > 0)

    def join(now: _Call) -> _Call:
        if begin_next is not None:
            now = now._replace(begun=_with_next(now, begin_next, shape))
        if target_platform() == "cuda":
            return _join_together(now, count, shape)
        return _join(now, shape)

    def step(now: _Call) -> _Call:
        if begun is not None:
            now = jax.lax.while_loop(joins, join, now)
        return _step(search, now, shape)

    def is_busy(now: _Call) -> Bool[Array, ""]:
        active, idle = _count_active(now.pool), _count_idle(now.pool)
        can_join = (now.report.joined < count) & (active + idle > 0)
        return can_join | (active > shape.slots - least_idle)

    now = _Call(pool, begun, _empty_report(pool, shape.newcomers))
    now = jax.lax.while_loop(is_busy, step, now)
    report = _record(now, jnp.arange(shape.slots, dtype=jnp.int32))
    return now.pool, report._replace(paused=now.pool.paused)


def _step(search: Search, now: _Call, shape: PoolShape) -> _Call:
    """Take a step with all sentences of the pool but those that pause."""
    pool = now.pool
    alive = (pool.state.progress.alive.log_prob > -jnp.inf).sum(-1, dtype=jnp.int32)
    lanes = pool.lanes + jnp.where(pool.paused, 0, alive)
    after = Pool(search.step(pool.state), pool.paused, lanes)
    if shape.capacity < shape.steps * search.rules.beam_size:
        after = _pause_outgrown(pool, after)
    report = now.report._replace(
        steps=now.report.steps + 1,
        computed=now.report.computed + pool.state.progress.alive.token.size,
    )
    return now._replace(pool=after, report=report)


def _with_next(now: _Call, begin_next: Callable[[_Begun], _Begun], shape: PoolShape) -> _Begun:
    """Return those that are begun, or the next ones if all of them have joined."""
    have_joined = now.report.joined - shape.part
    # A loop of one turn at most: the branches of a condition may copy what is begun.
    return jax.lax.while_loop(lambda begun: begun.first == have_joined, begin_next, now.begun)


def _join(now: _Call, shape: PoolShape) -> _Call:
    """Let the next of the sentences that are begun take an idle slot."""
    slot = jnp.argmin(now.pool.state.is_alive()).astype(jnp.int32)
    report = _record(now, slot[None])
    holds = report.holds.at[slot].set(shape.slots + report.joined)
    row = with_room(taken(now.begun.pool, report.joined - now.begun.first, 1), shape)
    pool = _put(now.pool, row, slot)
    return now._replace(pool=pool, report=report._replace(holds=holds, joined=report.joined + 1))


def _join_together(now: _Call, count: Int[Array, ""], shape: PoolShape) -> _Call:
    """Let the next `JOINING` of the sentences that are begun take idle slots, if any.

    count: how many join in all.
    """
    alive, begun = now.pool.state.is_alive(), now.begun
    numbers = now.report.joined + jnp.arange(min(JOINING, shape.slots), dtype=jnp.int32)
    slots = jnp.argsort(alive, stable=True)[: numbers.size].astype(jnp.int32)  # idle ones first
    behind = jnp.minimum(count, begun.first + begun.pool.paused.size)
    joins = ~alive[slots] & (numbers < behind)
    # Beyond the last slot nothing is written; what is read there is the last itself, whose outcome
    # so far may be recorded once more.
    slots = jnp.where(joins, slots, shape.slots + jnp.arange(numbers.size, dtype=jnp.int32))
    report = _record(now, slots)
    holds = report.holds.at[slots].set(shape.slots + numbers, mode="drop")
    rows = jax.tree.map(lambda leaf: leaf[numbers - begun.first], begun.pool)
    rows = with_room(rows, shape)
    pool = jax.tree.map(
        lambda old, new: old.at[slots].set(new, mode="drop", unique_indices=True), now.pool, rows
    )
    joined = report.joined + joins.sum(dtype=jnp.int32)
    return now._replace(pool=pool, report=report._replace(holds=holds, joined=joined))


def _put(tree: Any, rows: Any, first: Int[Array, ""]) -> Any:
    """Return the arrays with these rows in place of theirs."""
    put = partial(jax.lax.dynamic_update_slice_in_dim, allow_negative_indices=False)
    return jax.tree.map(lambda old, new: put(old, new, first, 0), tree, rows)


def _count_active(pool: Pool) -> Int[Array, ""]:
    return pool.is_active().sum(dtype=jnp.int32)


def _count_idle(pool: Pool) -> Int[Array, ""]:
    return (~pool.state.is_alive()).sum(dtype=jnp.int32)


def _empty_report(pool: Pool, newcomers: int) -> Report:
    slots, zero = pool.paused.size, jnp.int32(0)
    nothing = zeros(_outcome(pool), slots + newcomers)
    return Report(zero, zero, zero, jnp.arange(slots, dtype=jnp.int32), pool.paused, nothing)


def _outcome(pool: Pool) -> Outcome:
    return Outcome(~pool.state.is_alive(), pool.lanes, pool.state.progress.finished)


def _record(now: _Call, slots: Int[Array, " some"]) -> Report:
    """Return the report with the outcome, so far, of the sentences in these slots."""
    report = now.report
    outcome = jax.tree.map(
        lambda old, new: old.at[report.holds[slots]].set(new[slots]),
        report.outcome,
        _outcome(now.pool),
    )
    return report._replace(outcome=outcome)


def _pause_outgrown(before: Pool, after: Pool) -> Pool:
    """Return the pool after a step, in which sentences that paused before it are as they were."""
    paused = before.paused

    def keep(old: Any, new: Any) -> Any:
        if hasattr(new, "keep"):
            return new.keep(paused, old)
        return jax.tree.map(
            lambda old, new: jnp.where(paused.reshape(-1, *[1] * (new.ndim - 1)), old, new),
            old,
            new,
        )

    caches = [
        (cross, keep(old, new))
        for (_, old), (cross, new) in zip(before.state.cache, after.state.cache, strict=True)
    ]
    progress = keep(before.state.progress, after.state.progress)
    state = State(after.state.rows, progress, caches)
    is_full = jnp.stack([cache.is_full() for _, cache in caches]).any(axis=0)
    return after._replace(state=state, paused=state.is_alive() & is_full)


def _leave(pool: Pool) -> Pool:
    """Return the pool without the sentences that paused: their slots are idle."""
    progress = pool.state.progress
    log_prob = jnp.where(pool.paused[:, None], -jnp.inf, progress.alive.log_prob)
    progress = progress._replace(alive=progress.alive._replace(log_prob=log_prob))
    return Pool(pool.state._replace(progress=progress), jnp.zeros_like(pool.paused), pool.lanes)

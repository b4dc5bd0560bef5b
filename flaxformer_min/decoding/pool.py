"""Continuous batching: a pool of sentences in which the next takes the place of one that is done.

The programs here run on one device; `batching` decides what they are given. Each sentence has rows
of its own in every array of the pool, and its own position in them, so what it gets depends neither
on the others nor on when it began.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from flaxformer_min.decoding.ensemble import log_mean_probability, search_of
from flaxformer_min.decoding.search import Hypotheses, Prefix, Rules, Search, State
from flaxformer_min.model.target import target_platform
from flaxformer_min.model.transformer import first_tokens
from flaxformer_min.tokens import PAD, one_sentence_per_row

JOINING = 32
"""Most newcomers that join at once on an NVIDIA GPU, where a turn of a loop is tens of kernels."""


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """The sizes that a pool is compiled for, on each device.

    slots:     sentences at once.
    newcomers: most newcomers of a call.
    width:     tokens that sources are padded to.
    capacity:  new tokens that the cache of a sentence has room for, all hypotheses together.
    steps:     most new tokens of any sentence.
    prefix:    tokens that forced prefixes are padded to.
    """

    slots: int
    newcomers: int
    width: int
    capacity: int
    steps: int
    prefix: int = 0

    @property
    def part(self) -> int:
        """How many newcomers are begun at once, as the first of them joins."""
        part = max(self.newcomers // 4, 8)
        return part if self.newcomers % part == 0 else self.newcomers


class Newcomers(NamedTuple):
    """Sentences that are begun together and join the pool as its slots become idle.

    count: how many there are; the rows behind are padding.
    seed:  data of the random key of the whole search; each line has a key of its own.
    """

    count: Int[Array, ""]
    source: Int[Array, "newcomers width"]
    max_length: Int[Array, " newcomers"]
    line: Int[Array, " newcomers"]
    seed: UInt32[Array, "newcomers words"] | None
    prefix: Int[Array, "newcomers prefix"] | None


class Pool(NamedTuple):
    """Sentences that are searched together.

    paused: whether a sentence waits because its cache has no room for the next token.
    lanes:  hypotheses that were alive, summed over the steps of each sentence.
    """

    state: State
    paused: Bool[Array, " slots"]
    lanes: Int[Array, " slots"]

    def is_active(self) -> Bool[Array, " slots"]:
        """Return which sentences take steps."""
        return self.state.is_alive() & ~self.paused


Begin = Callable[[Sequence[Any], Newcomers], State]
"""`begin` for the models, rules and shape of a pool."""


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
        state = begin(params, _taken(newcomers, first, shape.part))
        return _Begun(first, Pool(state, none.astype(bool), none))

    before_all = _Begun(jnp.int32(-shape.part), None)
    nobody = _zeros(jax.eval_shape(begin_next, before_all).pool, shape.part)
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
            # A loop of one turn at most: the branches of a condition would copy what is begun.
            have_joined = now.report.joined - shape.part
            begun = jax.lax.while_loop(
                lambda begun: begun.first == have_joined, begin_next, now.begun
            )
            now = now._replace(begun=begun)
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


def last_pools(pool: Pool, shape: PoolShape, capacity: int) -> tuple[Pool, ...]:
    """Return shapes and types of the devices' pools that `finish` takes.

    capacity: of the caches of those that have no slot yet.
    """

    def resized(pool: Pool, rows: int, capacity: int) -> Pool:
        return _with_room(_zeros(pool, rows), dataclasses.replace(shape, capacity=capacity))

    sizes = [(shape.slots, shape.capacity), (shape.newcomers, capacity)]
    return tuple(
        jax.eval_shape(jax.vmap(partial(resized, rows=rows, capacity=capacity)), pool)
        for rows, capacity in sizes
        if rows
    )


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


def _taken(tree: Any, first: Int[Array, ""] | int, rows: int) -> Any:
    """Return so many rows of the arrays, and scalars as they are."""

    def take(array: Array) -> Array:
        if not jnp.ndim(array):
            return array
        return jax.lax.dynamic_slice_in_dim(array, first, rows, allow_negative_indices=False)

    return jax.tree.map(take, tree)


def _put(tree: Any, rows: Any, first: Int[Array, ""]) -> Any:
    """Return the arrays with these rows in place of theirs."""
    put = partial(jax.lax.dynamic_update_slice_in_dim, allow_negative_indices=False)
    return jax.tree.map(lambda old, new: put(old, new, first, 0), tree, rows)


def _zeros(tree: Any, rows: int) -> Any:
    """Return zeros with so many rows, otherwise shaped as the arrays."""
    return jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), tree)


def begin(
    models: Sequence[Any],
    params: Sequence[Any],
    newcomers: Newcomers,
    *,
    rules: Rules,
    shape: PoolShape,
) -> State:
    """Return the state of newcomers: sources encoded, prefixes read, the search begun.

    Their caches have room for one token (see `_with_room`).
    """
    tokens, prefix = one_sentence_per_row(newcomers.source), newcomers.prefix
    if prefix is None:  # jax 0.11 cannot compile an argument without elements
        prefix = jnp.zeros((newcomers.source.shape[0], 0), jnp.int32)
    caches, log_probs = [], []
    for model, weights in zip(models, params, strict=True):
        apply = partial(model.apply, {"params": weights})
        cross = apply(apply(tokens, method="encode"), tokens, method="precompute_cross_attention")
        cache, of_prefix = apply(cross, rules.beam_size, 1, prefix, method="prefill")
        caches.append((cross, cache))
        log_probs.append(of_prefix)
    key = None
    if rules.sampling is not None:
        key = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(newcomers.seed), newcomers.line)
    given = Prefix(
        first_tokens(prefix),
        (prefix != PAD).sum(1, dtype=jnp.int32),
        log_mean_probability(log_probs).sum(1),
    )
    search = search_of(models, params, rules)
    return search.begin(caches, given, newcomers.max_length, shape.steps, key)


def empty_pool(
    params: Sequence[Any], newcomers: Newcomers, *, begin: Begin, shape: PoolShape
) -> Pool:
    """Return a pool of zeros, for its shapes and types, which are those of newcomers."""
    state = begin(params, _taken(newcomers, 0, shape.part))
    none = jnp.zeros(shape.part, jnp.int32)
    return _zeros(_with_room(Pool(state, none.astype(bool), none), shape), shape.slots)


def _join(now: _Call, shape: PoolShape) -> _Call:
    """Let the next of the sentences that are begun take an idle slot."""
    slot = jnp.argmin(now.pool.state.is_alive()).astype(jnp.int32)
    report = _record(now, slot[None])
    holds = report.holds.at[slot].set(shape.slots + report.joined)
    row = _with_room(_taken(now.begun.pool, report.joined - now.begun.first, 1), shape)
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
    rows = _with_room(rows, shape)
    pool = jax.tree.map(
        lambda old, new: old.at[slots].set(new, mode="drop", unique_indices=True), now.pool, rows
    )
    joined = report.joined + joins.sum(dtype=jnp.int32)
    return now._replace(pool=pool, report=report._replace(holds=holds, joined=joined))


def _with_room(pool: Pool, shape: PoolShape) -> Pool:
    """Return the sentences with caches of the capacity of `shape`."""
    caches = [
        (cross, cache.resize(shape.prefix + shape.capacity)) for cross, cache in pool.state.cache
    ]
    return pool._replace(state=pool.state._replace(cache=caches))


def _count_active(pool: Pool) -> Int[Array, ""]:
    return pool.is_active().sum(dtype=jnp.int32)


def _count_idle(pool: Pool) -> Int[Array, ""]:
    return (~pool.state.is_alive()).sum(dtype=jnp.int32)


def _empty_report(pool: Pool, newcomers: int) -> Report:
    slots, zero = pool.paused.size, jnp.int32(0)
    nothing = _zeros(_outcome(pool), slots + newcomers)
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

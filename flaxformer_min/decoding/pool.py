"""Continuous batching: a pool of sentences in which the next takes the place of one that is done.

The programs here run on one device; `batching` decides what they are given. Each sentence has rows
of its own in every array of the pool, and its own position in them, so what it gets depends neither
on the others nor on when it began.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from flaxformer_min.decoding.search import Hypotheses, Prefix, Rules, Search, State
from flaxformer_min.model.attention import resize_axis
from flaxformer_min.model.transformer import first_tokens
from flaxformer_min.tokens import PAD, one_sentence_per_row

FEWER = (4, 16)
"""The parts of its slots in which the last pool goes on when so few sentences are left."""


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """The sizes that a pool is compiled for, on each device.

    slots:    sentences at once, and most newcomers of a call.
    width:    tokens that sources are padded to.
    capacity: new tokens that the cache of a sentence has room for, all hypotheses together.
    steps:    most new tokens of any sentence.
    prefix:   tokens that forced prefixes are padded to.
    last:     whether the last sentences go on in fewer slots, which takes longer to compile.
    """

    slots: int
    width: int
    capacity: int
    steps: int
    prefix: int = 0
    last: bool = False


class Newcomers(NamedTuple):
    """Sentences that are begun together and join the pool one by one.

    count: how many there are; the rows behind are padding.
    seed:  data of the random key of the whole search; each line has a key of its own.
    """

    count: Int[Array, ""]
    source: Int[Array, "slots width"]
    max_length: Int[Array, " slots"]
    line: Int[Array, " slots"]
    seed: UInt32[Array, "slots words"] | None
    prefix: Int[Array, "slots prefix"] | None


class Pool(NamedTuple):
    """Sentences that are searched together.

    outgrown: whether a sentence was stopped because the cache has no room for its next token.
    lanes:    hypotheses that were alive, summed over the steps of each sentence.
    """

    state: State
    outgrown: Bool[Array, " slots"]
    lanes: Int[Array, " slots"]


Begin = Callable[[Sequence[Any], Newcomers], State]
"""`begin` for the models, rules and shape of a pool."""


class Outcome(NamedTuple):
    """How the search for each sentence ended; `finished` counts for those `done`, not outgrown."""

    done: Bool[Array, " sentences"]
    outgrown: Bool[Array, " sentences"]
    lanes: Int[Array, " sentences"]
    finished: Hypotheses


class Report(NamedTuple):
    """What `run` did.

    Its sentences are those that were in the slots before, and behind them the newcomers.

    slots: with which a step was taken, summed over the steps.
    holds: the sentence that is in each slot now.
    """

    steps: Int[Array, ""]
    slots: Int[Array, ""]
    holds: Int[Array, " slots"]
    outcome: Outcome


class _Call(NamedTuple):
    """A call of `run` on its way: so many newcomers have joined."""

    pool: Pool
    report: Report
    joined: Int[Array, ""]


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
    """Search until all newcomers have joined and `least_idle` slots have no sentence alive.

    A newcomer joins as soon as a slot is idle.
    """
    search = Search(partial(decode_step, models, params), _reorder, rules)
    begun = begin(params, newcomers)
    # Where hypotheses compete, a first step of one hypothesis is taken already.
    begun = Pool(begun, jnp.zeros(shape.slots, bool), begun.progress.length)

    def step(now: _Call) -> _Call:
        idle = shape.slots - _count_alive(now.pool)
        joining = jnp.minimum(idle, newcomers.count - now.joined)
        now = jax.lax.fori_loop(0, joining, lambda _, now: _join(now, begun, shape), now)
        return _step(search, now, shape)

    most_alive = shape.slots - least_idle
    fewer = [shape.slots // part for part in FEWER if shape.last and shape.slots >= part]
    enough = jnp.maximum(most_alive, max(fewer, default=0))

    def is_busy(now: _Call) -> Array:
        return (now.joined < newcomers.count) | (_count_alive(now.pool) > enough)

    nobody = _Call(pool, _empty_report(pool), jnp.int32(0))
    now = jax.lax.while_loop(is_busy, step, nobody)
    for slots, next_slots in pairwise([*fewer, 0]):
        now = _go_on_in(slots, search, now, jnp.maximum(most_alive, next_slots), shape)
    return now.pool, _record(now, jnp.arange(shape.slots, dtype=jnp.int32))


def _step(search: Search, now: _Call, shape: PoolShape) -> _Call:
    """Take a step with all sentences of the pool."""
    pool = now.pool
    alive = (pool.state.progress.alive.log_prob > -jnp.inf).sum(-1, dtype=jnp.int32)
    pool = Pool(search.step(pool.state), pool.outgrown, pool.lanes + alive)
    report = now.report._replace(
        steps=now.report.steps + 1, slots=now.report.slots + pool.outgrown.size
    )
    return now._replace(pool=_stop_outgrown(pool, shape), report=report)


def _go_on_in(
    slots: int, search: Search, now: _Call, most_alive: Int[Array, ""], shape: PoolShape
) -> _Call:
    """Search in fewer slots, where a step takes less time, until at most so many are alive."""

    def is_busy(now: _Call) -> Array:
        return _count_alive(now.pool) > most_alive

    # A loop of one turn, because the branches of a `cond` would copy the pool.
    def go_on(now: _Call) -> _Call:
        order = jnp.argsort(~now.pool.state.is_alive())[:slots]
        few = now._replace(pool=jax.tree.map(lambda leaf: leaf[order], now.pool))
        few = jax.lax.while_loop(is_busy, lambda few: _step(search, few, shape), few)
        pool = jax.tree.map(lambda old, new: old.at[order].set(new), now.pool, few.pool)
        return few._replace(pool=pool)

    return jax.lax.while_loop(is_busy, go_on, now)


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
    search = Search(partial(decode_step, models, params), _reorder, rules)
    return search.begin(caches, given, newcomers.max_length, shape.steps, key)


def empty(begin: Begin, params: Sequence[Any], newcomers: Newcomers, shape: PoolShape) -> Pool:
    """Return a pool without sentences, as numpy arrays; shapes are those of `newcomers`."""
    none = np.zeros(shape.slots, np.int32)

    def make(params: Sequence[Any], newcomers: Newcomers) -> Pool:
        return _with_room(Pool(begin(params, newcomers), none.astype(bool), none), shape)

    shapes = jax.eval_shape(make, params, newcomers)
    pool = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    pool.state.progress.alive.log_prob[:] = -np.inf
    return pool


def can_resize(pool: Pool) -> bool:
    """Return whether the models' encoded sources can be moved to a pool of another width."""
    return all(hasattr(cross, "resize") for cross, _ in pool.state.cache)


def move(pool: Pool, order: Int[Array, " slots"], shape: PoolShape) -> Pool:
    """Return the pool in another shape, in which all sentences that are alive have room.

    `order` has the former slot of each sentence, and their number for a slot without one.
    """
    nobody = order >= pool.outgrown.size
    pool = jax.tree.map(lambda leaf: jnp.take(leaf, order, axis=0, mode="clip"), pool)
    caches = _with_room(pool, shape).state.cache
    if can_resize(pool):
        caches = [(cross.resize(shape.width), cache) for cross, cache in caches]
    progress = pool.state.progress
    alive, finished = (
        each._replace(ids=resize_axis(each.ids, shape.steps, axis=2, fill=PAD))
        for each in (progress.alive, progress.finished)
    )
    progress = progress._replace(alive=alive, finished=finished)
    pool = pool._replace(state=State(pool.state.rows, progress, caches))
    return _with_log_prob(pool, jnp.where(nobody[:, None], -jnp.inf, progress.alive.log_prob))


def decode_step(models, params, tokens, caches):
    """Take a step of each model; return the log of their mean probability."""
    logits, after = [], []
    for model, weights, (cross, cache) in zip(models, params, caches, strict=True):
        of_model, cache = model.apply(
            {"params": weights}, tokens, cross, cache, method="decode_step"
        )
        logits.append(of_model if len(models) == 1 else jax.nn.log_softmax(of_model))
        after.append((cross, cache))
    return log_mean_probability(logits), after


def log_mean_probability(log_probs: list) -> Any:
    """Return the logarithm of the models' mean probability."""
    if len(log_probs) == 1:
        return log_probs[0]
    return jax.nn.logsumexp(jnp.stack(log_probs), axis=0) - math.log(len(log_probs))


def _reorder(caches, parents):
    return [(cross, cache.reorder(parents)) for cross, cache in caches]


def _join(now: _Call, begun: Pool, shape: PoolShape) -> _Call:
    """Let the next of the sentences that are begun take an idle slot."""
    slot = jnp.argmin(now.pool.state.is_alive()).astype(jnp.int32)
    report = _record(now, slot[None])
    holds = report.holds.at[slot].set(shape.slots + now.joined)
    row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, now.joined, 1), begun)
    pool = jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, slot, 0),
        now.pool,
        _with_room(row, shape),
    )
    return _Call(pool, report._replace(holds=holds), now.joined + 1)


def _with_room(pool: Pool, shape: PoolShape) -> Pool:
    """Return the sentences with caches of the capacity of `shape`."""
    caches = [
        (cross, cache.resize(shape.prefix + shape.capacity)) for cross, cache in pool.state.cache
    ]
    return pool._replace(state=pool.state._replace(cache=caches))


def _count_alive(pool: Pool) -> Int[Array, ""]:
    return pool.state.is_alive().sum(dtype=jnp.int32)


def _empty_report(pool: Pool) -> Report:
    slots = pool.outgrown.size
    outcome = _outcome(pool)
    nothing = jax.tree.map(lambda x: jnp.zeros((2 * slots, *x.shape[1:]), x.dtype), outcome)
    return Report(jnp.int32(0), jnp.int32(0), jnp.arange(slots, dtype=jnp.int32), nothing)


def _outcome(pool: Pool) -> Outcome:
    finished = pool.state.progress.finished
    return Outcome(~pool.state.is_alive(), pool.outgrown, pool.lanes, finished)


def _record(now: _Call, slots: Int[Array, " some"]) -> Report:
    """Return the report with the outcome, so far, of the sentences in these slots."""
    report = now.report
    outcome = jax.tree.map(
        lambda old, new: old.at[report.holds[slots]].set(new[slots]),
        report.outcome,
        _outcome(now.pool),
    )
    return report._replace(outcome=outcome)


def _stop_outgrown(pool: Pool, shape: PoolShape) -> Pool:
    progress = pool.state.progress
    if shape.capacity >= shape.steps * progress.alive.token.shape[1]:
        return pool
    is_full = jnp.stack([cache.is_full() for _, cache in pool.state.cache]).any(axis=0)
    outgrown = pool.state.is_alive() & is_full
    pool = pool._replace(outgrown=pool.outgrown | outgrown)
    return _with_log_prob(pool, jnp.where(outgrown[:, None], -jnp.inf, progress.alive.log_prob))


def _with_log_prob(pool: Pool, log_prob: Float[Array, "slots beam"]) -> Pool:
    progress = pool.state.progress
    progress = progress._replace(alive=progress.alive._replace(log_prob=log_prob))
    return pool._replace(state=pool.state._replace(progress=progress))

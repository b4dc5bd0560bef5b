"""Continuous batching: a pool of sentences in which the next takes the place of one that is done.

The programs here run on one device; `batching` decides what they are given. Each sentence has rows
of its own in every array of the pool, and its own position in them, so what it gets depends neither
on the others nor on when it began.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from flaxformer_min.decoding.search import Hypotheses, Prefix, Rules, Search, State
from flaxformer_min.model.attention import resize_axis
from flaxformer_min.model.transformer import first_tokens
from flaxformer_min.tokens import PAD, one_sentence_per_row


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """The sizes that a pool is compiled for, on each device.

    slots:     sentences at once.
    newcomers: most sentences that are admitted together.
    width:     tokens that sources are padded to.
    capacity:  new tokens that the cache has room for.
    steps:     most new tokens of any sentence.
    prefix:    tokens that forced prefixes are padded to.
    """

    slots: int
    newcomers: int
    width: int
    capacity: int
    steps: int
    prefix: int = 0


class Newcomers(NamedTuple):
    """Sentences to be admitted; a slot behind the last one is that of padding.

    seed: data of the random key of the whole search; each line has a key of its own.
    """

    slots: Int[Array, " new"]
    source: Int[Array, "new width"]
    max_length: Int[Array, " new"]
    line: Int[Array, " new"]
    seed: UInt32[Array, "new words"] | None
    prefix: Int[Array, "new prefix"] | None


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


class Report(NamedTuple):
    """What `run` did; `finished` counts for the sentences that are done and not outgrown."""

    steps: Int[Array, ""]
    done: Bool[Array, " slots"]
    outgrown: Bool[Array, " slots"]
    lanes: Int[Array, " slots"]
    finished: Hypotheses


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
    """Admit sentences, then search until `least_idle` slots have none that is alive."""
    search = Search(partial(decode_step, models, params), _reorder, rules)
    pool = _admit(pool, newcomers, begin(params, newcomers))

    def is_busy(looped: tuple[Pool, Array]) -> Array:
        alive = looped[0].state.is_alive().sum(dtype=jnp.int32)
        return alive > shape.slots - least_idle

    def step(looped: tuple[Pool, Array]) -> tuple[Pool, Array]:
        pool, steps = looped
        alive = (pool.state.progress.alive.log_prob > -jnp.inf).sum(-1, dtype=jnp.int32)
        pool = Pool(search.step(pool.state), pool.outgrown, pool.lanes + alive)
        return _stop_outgrown(pool, shape), steps + 1

    pool, steps = jax.lax.while_loop(is_busy, step, (pool, jnp.int32(0)))
    finished = jax.tree.map(jnp.copy, pool.state.progress.finished)
    report = Report(steps, ~pool.state.is_alive(), pool.outgrown | False, pool.lanes + 0, finished)
    return pool, report


def begin(
    models: Sequence[Any],
    params: Sequence[Any],
    newcomers: Newcomers,
    *,
    rules: Rules,
    shape: PoolShape,
) -> State:
    """Return the state of newcomers: sources encoded, prefixes read, the search begun."""
    tokens, prefix = one_sentence_per_row(newcomers.source), newcomers.prefix
    if prefix is None:  # jax 0.11 cannot compile an argument without elements
        prefix = jnp.zeros((newcomers.source.shape[0], 0), jnp.int32)
    caches, log_probs = [], []
    for model, weights in zip(models, params, strict=True):
        apply = partial(model.apply, {"params": weights})
        cross = apply(apply(tokens, method="encode"), tokens, method="precompute_cross_attention")
        cache, of_prefix = apply(cross, rules.beam_size, shape.capacity, prefix, method="prefill")
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
    shapes = jax.eval_shape(begin, params, newcomers)
    state = jax.tree.map(lambda leaf: np.zeros((shape.slots, *leaf.shape[1:]), leaf.dtype), shapes)
    state.progress.alive.log_prob[:] = -np.inf
    none = np.zeros(shape.slots, np.int32)
    return Pool(state, none.astype(bool), none)


def move(pool: Pool, shape: PoolShape) -> Pool:
    """Return the pool in another shape, in which all its sentences have room."""
    caches = [
        (
            cross.resize(shape.width) if hasattr(cross, "resize") else cross,
            cache.resize(shape.prefix + shape.capacity),
        )
        for cross, cache in pool.state.cache
    ]
    progress = pool.state.progress
    alive, finished = (
        each._replace(ids=resize_axis(each.ids, shape.steps, axis=2, fill=PAD))
        for each in (progress.alive, progress.finished)
    )
    progress = progress._replace(alive=alive, finished=finished)
    pool = pool._replace(state=State(pool.state.rows, progress, caches))
    before = pool.outgrown.size
    pool = jax.tree.map(lambda leaf: resize_axis(leaf, shape.slots, axis=0), pool)
    is_new = jnp.arange(shape.slots, dtype=jnp.int32) >= before
    return _with_log_prob(
        pool, jnp.where(is_new[:, None], -jnp.inf, pool.state.progress.alive.log_prob)
    )


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


def _admit(pool: Pool, newcomers: Newcomers, begun: State) -> Pool:
    """Store the newcomers' rows in their slots."""
    new = begun.progress.length.shape[0]
    # Where hypotheses compete, a first step of one hypothesis is taken already.
    begun = Pool(begun, jnp.zeros(new, bool), begun.progress.length)
    return jax.tree.map(
        lambda old, rows: old.at[newcomers.slots].set(rows, mode="drop"), pool, begun
    )


def _stop_outgrown(pool: Pool, shape: PoolShape) -> Pool:
    if shape.capacity >= shape.steps:
        return pool
    progress = pool.state.progress
    outgrown = pool.state.is_alive() & (progress.length >= shape.capacity)
    pool = pool._replace(outgrown=pool.outgrown | outgrown)
    return _with_log_prob(pool, jnp.where(outgrown[:, None], -jnp.inf, progress.alive.log_prob))


def _with_log_prob(pool: Pool, log_prob: Float[Array, "slots beam"]) -> Pool:
    progress = pool.state.progress
    progress = progress._replace(alive=progress.alive._replace(log_prob=log_prob))
    return pool._replace(state=pool.state._replace(progress=progress))

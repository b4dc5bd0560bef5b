"""Continuous batching: a pool of sentences in which the next takes the place of one that is done.

`programs` searches in it, on one device, and `scheduling` decides who joins. Each sentence has rows
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
from flaxformer_min.decoding.search import Prefix, Rules, State
from flaxformer_min.model.transformer import Transformer, first_tokens
from flaxformer_min.runtime.generator import GENERATOR
from flaxformer_min.tokens import PAD, one_sentence_per_row


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """The sizes that a pool is compiled for, on each device.

    slots:     sentences at once.
    newcomers: most newcomers of a call.
    width:     tokens that sources are padded to.
    capacity:  new tokens that the cache of a sentence has room for, all hypotheses together.
    steps:     most new tokens of any sentence.
    prefix:    tokens that forced prefixes are padded to.
    narrow:    tokens that a part is padded to while it is encoded, if all of it is so short; 0:
               always `width`.
    """

    slots: int
    newcomers: int
    width: int
    capacity: int
    steps: int
    prefix: int = 0
    narrow: int = 0

    @property
    def part(self) -> int:
        """How many newcomers are begun at once, as the first of them joins.

        A quarter of a pool: on an accelerator few take as long as many. Small pools of a CPU have
        several times as many newcomers, of whom 16 at once need less padding and memory.
        """
        part = min(max(self.newcomers // 4, 8), max(self.slots // 4, 16))
        return part if self.newcomers % part == 0 else self.newcomers


class Newcomers(NamedTuple):
    """Sentences that are begun, a part at a time, and join the pool as its slots become idle.

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


def taken(tree: Any, first: Int[Array, ""] | int, rows: int) -> Any:
    """Return so many rows of the arrays, and scalars as they are."""

    def take(array: Array) -> Array:
        if not jnp.ndim(array):
            return array
        return jax.lax.dynamic_slice_in_dim(array, first, rows, allow_negative_indices=False)

    return jax.tree.map(take, tree)


def zeros(tree: Any, rows: int) -> Any:
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

    Their caches have room for one token (see `with_room`).
    """
    prefix = newcomers.prefix
    if prefix is None:  # jax 0.11 cannot compile an argument without elements
        prefix = jnp.zeros((newcomers.source.shape[0], 0), jnp.int32)
    caches, log_probs = [], []
    for model, weights in zip(models, params, strict=True):
        apply = partial(model.apply, {"params": weights})
        # A model of one's own may return what has neither `resize` nor `suited_to`.
        is_own = type(model) is not Transformer
        cross = _encoded(apply, newcomers.source, 0 if is_own else shape.narrow)
        cross = cross if is_own else cross.suited_to(rules.beam_size)
        cache, of_prefix = apply(cross, rules.beam_size, 1, prefix, method="prefill")
        caches.append((cross, cache))
        log_probs.append(of_prefix)
    key = None
    if rules.sampling is not None:
        seed = jax.random.wrap_key_data(newcomers.seed, impl=GENERATOR)
        key = jax.vmap(jax.random.fold_in)(seed, newcomers.line)
    given = Prefix(
        first_tokens(prefix),
        (prefix != PAD).sum(1, dtype=jnp.int32),
        log_mean_probability(log_probs).sum(1),
    )
    search = search_of(models, params, rules)
    return search.begin(caches, given, newcomers.max_length, shape.steps, key)


def _encoded(apply: Callable[..., Any], source: Int[Array, "newcomers width"], narrow: int) -> Any:
    """Return what cross-attention reads; sources are cut to `narrow` tokens if none has more."""

    def encoded(source: Int[Array, "newcomers length"]) -> Any:
        tokens = one_sentence_per_row(source)
        return apply(apply(tokens, method="encode"), tokens, method="precompute_cross_attention")

    if not narrow:
        return encoded(source)
    return jax.lax.cond(
        (source[:, narrow:] == PAD).all(),
        lambda: encoded(source[:, :narrow]).resize(source.shape[1]),
        lambda: encoded(source),
    )


def empty_pool(
    params: Sequence[Any], newcomers: Newcomers, *, begin: Begin, shape: PoolShape
) -> Pool:
    """Return a pool of zeros, for its shapes and types, which are those of newcomers."""
    state = begin(params, taken(newcomers, 0, shape.part))
    none = jnp.zeros(shape.part, jnp.int32)
    return zeros(with_room(Pool(state, none.astype(bool), none), shape), shape.slots)


def last_pools(pool: Pool, shape: PoolShape) -> tuple[Pool, ...]:
    """Return shapes and types of the devices' pools that `finish` takes.

    The second is of those that have no slot yet. Its caches are as large as if they had one: so
    it has the same shape whether some of them have outgrown a smaller cache or not.
    """

    def resized(pool: Pool, rows: int) -> Pool:
        return with_room(zeros(pool, rows), shape)

    return tuple(
        jax.eval_shape(jax.vmap(partial(resized, rows=rows)), pool)
        for rows in (shape.slots, shape.newcomers)
        if rows
    )


def with_room(pool: Pool, shape: PoolShape) -> Pool:
    """Return the sentences with caches of the capacity of `shape`."""
    caches = [
        (cross, cache.resize(shape.prefix + shape.capacity)) for cross, cache in pool.state.cache
    ]
    return pool._replace(state=pool.state._replace(cache=caches))

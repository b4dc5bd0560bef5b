"""Sentences that move from one pool to another, as numpy arrays.

A program for each pair of shapes would take longer to compile than all moves take.
"""

from collections.abc import Sequence

import jax
import numpy as np

from flaxformer_min.decoding.pool import Pool


def rows(pool: Pool, device: int, slots: Sequence[int]) -> list[np.ndarray]:
    """Return the arrays of the sentences in some slots of a device."""

    def take(leaf: jax.Array) -> np.ndarray:
        shards = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
        return np.asarray(shards[device])[0, slots]

    return [take(leaf) for leaf in jax.tree.leaves(pool)]


def arrange(groups: Sequence[Sequence[list[np.ndarray]]], arrays: Pool) -> Pool:
    """Return a pool, as numpy arrays, of the `rows` that each device is given from other pools.

    Each axis is cut, or continued with zeros.
    """
    leaves = [np.zeros((len(groups), *x.shape), x.dtype) for x in jax.tree.leaves(arrays)]
    pool = jax.tree.unflatten(jax.tree.structure(arrays), leaves)
    pool.state.progress.alive.log_prob[:] = -np.inf
    for device, group in enumerate(groups):
        first = 0
        for sentences in group:
            behind = first + len(sentences[0])
            for new, old in zip(leaves, sentences, strict=True):
                corner = tuple(map(slice, np.minimum(new.shape[2:], old.shape[1:])))
                new[(device, slice(first, behind), *corner)] = old[(slice(None), *corner)]
            first = behind
    pool.paused[:] = False
    return pool

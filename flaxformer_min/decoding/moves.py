"""Sentences that move from one pool to another, as numpy arrays.

A program for each pair of shapes would take longer to compile than all moves take.
"""

from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from flaxformer_min.decoding.pool import Pool
from flaxformer_min.runtime.devices import divided_among


def rows(pool: Pool, device: int, slots: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the arrays of the sentences in some slots of a device, each when it is asked for.

    Those that were yielded are not kept: without other references to the pool their memory is free.
    """
    leaves = jax.tree.leaves(pool)[::-1]
    del pool
    while leaves:
        leaf = leaves.pop()
        shards = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
        yield np.asarray(shards[device])[0, slots]


def arrange(
    groups: Sequence[Sequence[Iterable[np.ndarray]]], arrays: Pool, devices: list[jax.Device]
) -> Pool:
    """Return a pool on the devices, of the `rows` that each is given from other pools.

    Each axis is cut, or continued with zeros. One array is moved after the other, because numpy's
    copies of all of them would take as much memory as both pools.
    """
    sharding, log_prob = divided_among(devices), arrays.state.progress.alive.log_prob
    moving = [[iter(sentences) for sentences in group] for group in groups]
    leaves = []
    for leaf in jax.tree.leaves(arrays):
        nobody = -np.inf if leaf is log_prob else 0
        array = np.full(leaf.shape, nobody, leaf.dtype)
        for device, group in enumerate(moving):
            given = [next(sentences) for sentences in group]
            if leaf is not arrays.paused:  # all go on in the new pool
                _fill(array[device], given)
        # Not in numpy's memory, because the program writes into it.
        leaves.append(jax.device_put(array, sharding, may_alias=False))
    return jax.tree.unflatten(jax.tree.structure(arrays), leaves)


def _fill(new: np.ndarray, groups: list[np.ndarray]) -> None:
    """Write these rows into the first ones of an array."""
    first = 0
    for old in groups:
        corner = tuple(map(slice, np.minimum(new.shape[1:], old.shape[1:])))
        new[(slice(first, first + len(old)), *corner)] = old[(slice(None), *corner)]
        first += len(old)

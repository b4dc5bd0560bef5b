"""Sentences that move from one pool to another.

On a CPU they are numpy arrays: a program for each pair of shapes would take longer to compile than
all moves take. An accelerator has such programs, because its pools are gigabytes, which the host
would read and write back. Only sentences that paused wait in numpy arrays there, too.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from flaxformer_min.decoding.pool import Pool
from flaxformer_min.runtime.devices import divided_among

LARGE = 1 << 17
"""Bytes of an array from which it is put on its devices alone, so that numpy's copy is freed at
once. A program takes smaller ones from numpy, which is several times faster than putting each."""


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


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """The `rows` of a pool that stay on its device unless they are asked for.

    All of the pool is kept until they have moved.
    """

    pool: Pool
    device: int
    slots: Sequence[int]

    def __iter__(self) -> Iterator[np.ndarray]:
        """Return the rows."""
        return rows(self.pool, self.device, self.slots)


Rows = Iterable[np.ndarray]
"""Sentences that move: their `rows`, or `OnDevice`."""


def leaving(pool: Pool, device: int, slots: Sequence[int], runner: Any) -> Rows:
    """Return the sentences in some slots of a device as they move on this runner's devices.

    Those of a CPU are read at once: its pool is freed before the next program is loaded.
    """
    return [*rows(pool, device, slots)] if runner.kind == "cpu" else OnDevice(pool, device, slots)


def arrangement(groups: Sequence[Sequence[Rows]], arrays: Pool, runner: Any) -> Callable[[], Pool]:
    """Return what makes a pool on the runner's devices, of the sentences that each is given.

    Each axis is cut, or continued with zeros. A program is compiled here, if one is needed. If any
    sentence is in numpy arrays, all go by way of them.
    """
    given = [each for group in groups for each in group]
    if runner.kind == "cpu" or not all(isinstance(each, OnDevice) for each in given):
        return partial(_in_numpy, groups, arrays, runner.devices)
    slots = np.full(arrays.paused.shape, -1, np.int32)
    for each in given:  # at most one for each device
        slots[each.device, : len(each.slots)] = each.slots
    old = jax.tree.leaves(given[0].pool) if given else []
    shapes = tuple(leaf.shape for leaf in [*old, *jax.tree.leaves(arrays)])
    program = runner.compiled(("move", shapes), partial(_moved, arrays=arrays), old, slots)
    return partial(program, runner.params, old, slots)


def _moved(params: Any, old: list[Array], slots: Int[Array, " slots"], *, arrays: Pool) -> Pool:
    """Return a pool of one device with the sentences of these slots of the old one; -1 is none.

    arrays: shapes and types of the pools of all devices.
    """
    log_prob = arrays.state.progress.alive.log_prob

    def move(leaf: jax.ShapeDtypeStruct, rows: Array | None) -> Array:
        nobody = jnp.full(leaf.shape[1:], -jnp.inf if leaf is log_prob else 0, leaf.dtype)
        if rows is None or leaf is arrays.paused:  # all go on in the new pool
            return nobody
        corner = tuple(map(min, nobody.shape[1:], rows.shape[1:]))
        rows = rows[(jnp.maximum(slots, 0), *map(slice, corner))]
        more = [(0, whole - part) for whole, part in zip(nobody.shape[1:], corner, strict=True)]
        is_given = (slots >= 0).reshape(-1, *[1] * len(corner))
        return jnp.where(is_given, jnp.pad(rows, [(0, 0), *more]), nobody)

    leaves, structure = jax.tree.flatten(arrays)
    moved = [move(*each) for each in zip(leaves, old or [None] * len(leaves), strict=True)]
    return jax.tree.unflatten(structure, moved)


def _in_numpy(groups: Sequence[Sequence[Rows]], arrays: Pool, devices: list[jax.Device]) -> Pool:
    """Return the pool of an arrangement, its large arrays on the devices, one after the other.

    numpy's copies of all of them would take as much memory as both pools.
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
        if array.nbytes > LARGE:
            # Not in numpy's memory, because the program writes into it.
            array = jax.device_put(array, sharding, may_alias=False)
        leaves.append(array)
    return jax.tree.unflatten(jax.tree.structure(arrays), leaves)


def _fill(new: np.ndarray, groups: list[np.ndarray]) -> None:
    """Write these rows into the first ones of an array."""
    first = 0
    for old in groups:
        corner = tuple(map(slice, np.minimum(new.shape[1:], old.shape[1:])))
        new[(slice(first, first + len(old)), *corner)] = old[(slice(None), *corner)]
        first += len(old)

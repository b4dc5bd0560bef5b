"""Shares of the parameters: each device updates its own (ZeRO stage 1, Rajbhandari et al. 2020).

A device's share of an array is a block of its rows, along the first axis; where the rows do not
divide evenly, zeros follow the last. Gradients are summed by shares, so a device holds and computes
Adam's moments for its share alone, and the updated shares are gathered. Scalars are not divided.
All functions but `like_shares`, `divide` and `join` run within `pmap`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Tree = Any


def shape_of_share(shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """Return the shape of a device's share of an array.

    >>> shape_of_share((8, 3), 2), shape_of_share((5, 3), 2), shape_of_share((), 2)
    ((4, 3), (3, 3), ())
    """
    return (-(-shape[0] // devices), *shape[1:]) if shape else ()


def like_shares(tree: Tree, devices: int) -> Tree:
    """Return zeros that are shaped as the shares of the arrays."""
    return jax.tree.map(lambda x: jnp.zeros(shape_of_share(x.shape, devices), x.dtype), tree)


def own(array: Array) -> Array:
    """Return this device's share of an array that all devices have."""
    if not array.ndim:
        return array
    padded, rows = _padded(array)
    return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index("devices") * rows, rows)


def sum_of_share(array: Array) -> Array:
    """Return this device's share of the sum of an array over all devices."""
    if not array.ndim:
        return jax.lax.psum(array, "devices")
    return jax.lax.psum_scatter(_padded(array)[0], "devices", tiled=True)


def gathered(share: Array, like: Array) -> Array:
    """Return the whole array, shaped as `like`, of which each device has a share."""
    if not like.ndim:
        return share
    return jax.lax.all_gather(share, "devices", tiled=True)[: like.shape[0]]


def norm(shares: Tree) -> Float[Array, ""]:
    """Return the norm of a tree of arrays of which each device has its shares."""
    devices = jax.lax.axis_size("devices")
    # All devices have the same scalars.
    squares = [jnp.square(x).sum() / (1 if x.ndim else devices) for x in jax.tree.leaves(shares)]
    return jnp.sqrt(jax.lax.psum(jnp.stack(squares).sum(), "devices"))


def _padded(array: Array) -> tuple[Array, int]:
    """Return the array with zeros after it, and the rows of a share."""
    devices = jax.lax.axis_size("devices")
    rows = shape_of_share(array.shape, devices)[0]
    missing = rows * devices - array.shape[0]
    if not missing:
        return array, rows
    return jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)), rows


def _for_moments(function: Callable, opt_state: Tree, params: Tree) -> Tree:
    """Apply `function(moment, parameter)` to the subtrees that are built as `params` are."""
    structure = jax.tree.structure(params)

    def is_moments(tree: Tree) -> bool:
        return jax.tree.structure(tree) == structure

    def of(tree: Tree) -> Tree:
        return jax.tree.map(function, tree, params) if is_moments(tree) else tree

    return jax.tree.map(of, opt_state, is_leaf=is_moments)


def divide(opt_state: Tree, params: Tree, local: int | None = None) -> Tree:
    """Return an optimizer's state with the share of each device, [local ...].

    `local` devices of this process, all by default.
    """
    return _divided(opt_state, params, np.zeros(local or jax.local_device_count(), np.int32))


def join(opt_state: Tree, params: Tree) -> Tree:
    """Return the whole state, which `divide` was given, on all devices."""
    return _joined(opt_state, params) if jax.tree.leaves(opt_state) else opt_state


@partial(jax.pmap, axis_name="devices", in_axes=(None, None, 0))
def _divided(opt_state: Tree, params: Tree, _: Array) -> Tree:
    return _for_moments(lambda moment, _: own(moment), opt_state, params)


@partial(jax.pmap, axis_name="devices", in_axes=(0, None), out_axes=None)
def _joined(opt_state: Tree, params: Tree) -> Tree:
    return _for_moments(gathered, opt_state, params)

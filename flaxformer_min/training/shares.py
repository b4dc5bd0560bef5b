"""Shares of the parameters: each device updates its own (ZeRO stage 1, Rajbhandari et al. 2020).

A device's share of an array is a block of its rows, along the first axis; where the rows do not
divide evenly, zeros follow the last. Gradients are summed by shares, so a device holds and computes
Adam's moments for its share alone, and the updated shares are gathered. All vectors are divided as
one, because an accelerator takes longer to begin with a bias than to update it.

`own`, `sum_of_share`, `gathered` and `norm` run within `pmap`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from flaxformer_min.model.target import in_few_kernels, target_platform

Tree = Any


Packed = list[Array]
"""A tree of parameters, or of what belongs to each, as it is divided: its arrays in their order
and, if it has any float32 vectors and scalars, all of these as one vector behind them."""


def _is_in_vector(array: Array) -> bool:
    return array.ndim < 2 and array.dtype == jnp.float32


def packed(tree: Tree) -> Packed:
    """Return the arrays of a tree as they are divided."""
    leaves = jax.tree.leaves(tree)
    arrays = [jnp.atleast_1d(x) for x in leaves if not _is_in_vector(x)]
    vectors = [jnp.reshape(x, -1) for x in leaves if _is_in_vector(x)]
    return [*arrays, jnp.concatenate(vectors)] if vectors else arrays


def unpacked(whole: Packed, like: Tree) -> Tree:
    """Return the tree that was packed, shaped as `like`; rows and values beyond are padding."""
    leaves, structure = jax.tree.flatten(like)
    in_vector = [leaf for leaf in leaves if _is_in_vector(leaf)]
    ends = np.cumsum([leaf.size for leaf in in_vector])
    parts = [whole[-1][end - leaf.size : end] for leaf, end in zip(in_vector, ends, strict=True)]
    arrays, vectors = iter(whole), iter(in_few_kernels(parts))

    def part(leaf: Array) -> Array:
        padded = next(vectors if _is_in_vector(leaf) else arrays)
        return padded[: leaf.shape[0] if leaf.ndim else 1].reshape(leaf.shape)

    return structure.unflatten(map(part, leaves))


def shape_of_share(shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """Return the shape of a device's share of an array.

    >>> shape_of_share((8, 3), 2), shape_of_share((5, 3), 2)
    ((4, 3), (3, 3))
    """
    return (-(-shape[0] // devices), *shape[1:])


def like_shares(tree: Tree, devices: int) -> Packed:
    """Return zeros that are shaped as the shares of the arrays."""
    return jax.tree.map(
        lambda x: jnp.zeros(shape_of_share(x.shape, devices), x.dtype), packed(tree)
    )


def own(tree: Tree) -> Packed:
    """Return this device's share of arrays that all devices have."""

    def share(array: Array) -> Array:
        padded, rows = _padded(array)
        return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index("devices") * rows, rows)

    return jax.tree.map(share, packed(tree))


def sum_of_share(tree: Tree) -> Packed:
    """Return this device's share of the sum of arrays over all devices."""

    def share(array: Array) -> Array:
        return jax.lax.psum_scatter(_padded(array)[0], "devices", tiled=True)

    return jax.tree.map(share, packed(tree))


def gathered(shares: Packed, like: Tree) -> Tree:
    """Return whole arrays, shaped as `like`, of which each device has a share."""
    gather = partial(jax.lax.all_gather, axis_name="devices", tiled=True)
    return unpacked(jax.tree.map(gather, shares), like)


def norm(shares: Packed) -> Float[Array, ""]:
    """Return the norm of a tree of arrays of which each device has its shares."""
    squares = [jnp.square(x).sum(range(1, x.ndim)) for x in in_few_kernels(jax.tree.leaves(shares))]
    squares = jnp.concatenate(squares)
    if target_platform() == "cuda":
        # XLA would sum up each array on its own, in a kernel more for each.
        squares = jax.lax.optimization_barrier(squares)
    return jnp.sqrt(jax.lax.psum(squares.sum(), "devices"))


def _padded(array: Array) -> tuple[Array, int]:
    """Return the array with zeros after it, and the rows of a share."""
    devices = jax.lax.axis_size("devices")
    rows = shape_of_share(array.shape, devices)[0]
    missing = rows * devices - array.shape[0]
    if not missing:
        return array, rows
    return jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)), rows


def _for_moments(function: Callable[[Tree], Tree], opt_state: Tree, like: Tree) -> Tree:
    """Apply `function` to the subtrees that are built as `like` is: Adam's moments."""
    structure = jax.tree.structure(like)

    def is_moments(tree: Tree) -> bool:
        return jax.tree.structure(tree) == structure

    def of(tree: Tree) -> Tree:
        return function(tree) if is_moments(tree) else tree

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
    return _for_moments(own, opt_state, params)


@partial(jax.pmap, axis_name="devices", in_axes=(0, None), out_axes=None)
def _joined(opt_state: Tree, params: Tree) -> Tree:
    return _for_moments(partial(gathered, like=params), opt_state, packed(params))

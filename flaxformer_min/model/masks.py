"""Attention masks (section 3.2.3): comparisons of two columns of integers; True = may attend.

Written for one sentence or row; the batched versions are at the end.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def padding_mask(
    queries: Int[Array, " queries"], keys: Int[Array, " keys"]
) -> Bool[Array, "queries keys"]:
    """Return the mask by which every query may attend to every key that is not padding.

    Takes ids or segments, because both are 0 for padding.

    >>> padding_mask(jnp.array([5, 6]), jnp.array([7, 8, 0])).astype(int)
    Array([[1, 1, 0],
           [1, 1, 0]], dtype=int32)
    """
    return jnp.broadcast_to(keys[None, :] != 0, (queries.shape[0], keys.shape[0]))


def segment_mask(
    query_segments: Int[Array, " queries"], key_segments: Int[Array, " keys"]
) -> Bool[Array, "queries keys"]:
    """Return the mask of packed rows: a token may attend to its own sentence, not to padding.

    >>> segment_mask(jnp.array([1, 2]), jnp.array([1, 2, 0])).astype(int)
    Array([[1, 0, 0],
           [0, 1, 0]], dtype=int32)
    """
    keys = key_segments[None, :]
    return (query_segments[:, None] == keys) & (keys > 0)


def look_ahead_mask(
    query_positions: Int[Array, " queries"], key_positions: Int[Array, " keys"]
) -> Bool[Array, "queries keys"]:
    """Return the causal mask: a token may attend to itself and to earlier tokens only.

    >>> look_ahead_mask(jnp.arange(3), jnp.arange(3)).astype(int)
    Array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]], dtype=int32)
    """
    return query_positions[:, None] >= key_positions[None, :]


def check_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a mask has this shape, which ends in (queries, keys), of booleans."""
    if mask.shape != shape or mask.dtype != bool:
        raise ValueError(
            f"a mask must have the shape {shape} and the type bool, True where a query may attend; "
            f"got {mask.shape} of {mask.dtype}."
        )


batched_segment_mask = jax.vmap(segment_mask)
batched_look_ahead_mask = jax.vmap(look_ahead_mask)

"""Keys and values to attend to, and how a step of decoding stores new ones (section 3.2.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flaxformer_min.kernels.backend import backend


class KeyValue(NamedTuple):
    """Keys and values to attend to: of a sentence in training, of the tokens so far in decoding."""

    keys: Float[Array, "batch heads positions d_k"]
    values: Float[Array, "batch heads positions d_v"]

    def store(self, new: "KeyValue", positions: Int[Array, "batch new"]) -> "KeyValue":
        """Return a copy with `new` stored at the positions given for each sentence.

        >>> empty, new = (KeyValue(*(jnp.full((1, 1, n, 1), n - 1.0),) * 2) for n in (1, 2))
        >>> empty.resize(3).store(new, jnp.array([[2, 0]])).values.ravel().tolist()
        [1.0, 0.0, 1.0]
        """
        update = _update_everywhere if backend() == "tpu" else _update
        return KeyValue(*(update(*each, positions) for each in zip(self, new, strict=True)))

    def resize(self, positions: int) -> "KeyValue":
        """Return the first `positions`, padded with zeros if there are fewer."""
        return KeyValue(*(resize_axis(each, positions, axis=2) for each in self))


def _update(
    cache: Float[Array, "batch heads positions d"],
    new: Float[Array, "batch heads new d"],
    positions: Int[Array, "batch new"],
) -> Float[Array, "batch heads positions d"]:
    """Return the cache with `new` at `positions`; those beyond its end are not stored."""

    def of_sentence(cache: Array, new: Array, positions: Array) -> Array:
        # Positions repeat only beyond the end.
        return cache.at[:, positions].set(new, mode="drop", unique_indices=True)

    return jax.vmap(of_sentence)(cache, new, positions)


def _update_everywhere(
    cache: Float[Array, "batch heads positions d"],
    new: Float[Array, "batch heads new d"],
    positions: Int[Array, "batch new"],
) -> Float[Array, "batch heads positions d"]:
    """Return the same as `_update`, writing the whole cache.

    A TPU would store sentence by sentence, in a loop. A mask instead of this product takes 4.76
    instead of 3.78 ms for a step of the search, by the compiler's estimate for a v5e.
    """
    numbers = jnp.arange(cache.shape[2], dtype=jnp.int32)
    is_here = positions[:, :, None] == numbers[None, None, :]
    # Exact: each sum has at most one summand that is not zero.
    placed = jnp.einsum("bhnd,bnp->bhpd", new, is_here.astype(new.dtype), precision="highest")
    return jnp.where(is_here.any(axis=1)[:, None, :, None], placed, cache)


def resize_axis(x: Array, size: int, axis: int) -> Array:
    """Return `x` cut, or padded with zeros, to this size of an axis.

    >>> x = jnp.array([1, 2])
    >>> resize_axis(x, 1, axis=0), resize_axis(x, 3, axis=0)
    (Array([1], dtype=int32), Array([1, 2, 0], dtype=int32))
    """
    x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, size - x.shape[axis]
    return jnp.pad(x, widths)

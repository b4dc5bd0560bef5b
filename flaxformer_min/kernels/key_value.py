"""Keys and values, in the layouts that attention reads (3.2.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flaxformer_min.model.target import store_at, target_platform


class KeyValue(NamedTuple):
    """Keys and values to attend to: of a sentence in training, of the tokens so far in decoding.

    Keys are stored transposed, as equation 1 reads them. A decoding step of several hypotheses
    would otherwise transpose the whole cache, which costs a CPU more than attention itself.
    """

    stored_keys: Float[Array, "batch heads d_k positions"]
    values: Float[Array, "batch heads positions d_k"]

    POSITIONS = 3  # the axis of the stored keys that they have

    @classmethod
    def of(
        cls,
        keys: Float[Array, "batch heads positions d_k"],
        values: Float[Array, "batch heads positions d_k"],
    ) -> "KeyValue":
        """Build from keys and values of the same layout."""
        return cls(keys.swapaxes(2, cls.POSITIONS), values)

    @property
    def keys(self) -> Float[Array, "batch heads positions d_k"]:
        """Return the keys in the layout of the values."""
        return self.stored_keys.swapaxes(2, self.POSITIONS)

    def suited_to(self, queries: int) -> "KeyValue":
        """Return them as this platform reads them fastest for so many queries at once."""
        if queries > 1 or target_platform() != "cpu":
            return self
        return KeyValueOfOneQuery.of(self.keys, self.values)

    def store(self, new: "KeyValue", entries: Int[Array, "batch new"]) -> "KeyValue":
        """Return a copy with `new` of each sentence stored at positions of its own.

        >>> empty, new = (KeyValue.of(*(jnp.full((1, 1, n, 1), n - 1.0),) * 2) for n in (1, 2))
        >>> empty.resize(3).store(new, jnp.array([[2, 0]])).values.ravel().tolist()
        [1.0, 0.0, 1.0]
        """
        new = self.of(new.keys, new.values)
        keys = store_at(self.stored_keys, new.stored_keys, entries, axis=self.POSITIONS - 1)
        return self._replace(
            stored_keys=keys, values=store_at(self.values, new.values, entries, axis=1)
        )

    def resize(self, positions: int) -> "KeyValue":
        """Return the first `positions`, after which zeros follow if there are fewer."""
        return self._replace(
            stored_keys=resize_axis(self.stored_keys, positions, axis=self.POSITIONS),
            values=resize_axis(self.values, positions, axis=2),
        )


class KeyValueOfOneQuery(KeyValue):
    """Keys and values for one query at a time, with keys stored as values are.

    So a CPU reads keys faster for one query, but slower for several. And a new key is written to
    few lines of memory, where a transposed one has each of its features in another.
    """

    __slots__ = ()

    POSITIONS = 2


def resize_axis(x: Array, size: int, axis: int) -> Array:
    """Return `x` cut, or continued with zeros, to this size of an axis.

    >>> x = jnp.array([1, 2])
    >>> resize_axis(x, 1, axis=0), resize_axis(x, 3, axis=0)
    (Array([1], dtype=int32), Array([1, 2, 0], dtype=int32))
    """
    x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, size - x.shape[axis]
    return jnp.pad(x, widths)

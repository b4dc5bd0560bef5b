"""Dropout (section 5.4)."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from flaxformer_min.kernels.dropout import keep_mask

Rows = Int[Array, " rows"] | None
"""The number of each row, which decides its masks; None: its place in the batch."""


class Dropout(nn.Module):
    """Dropout, which zeroes a share of the values and scales up the rest.

    Active if `rngs` has a key "dropout"; otherwise this is the identity. The first axis of `x` are
    rows: the mask of a row depends on the key and its number alone, so it is the same on any number
    of devices.
    """

    rate: float

    @nn.compact
    def __call__(self, x: Float[Array, "..."], rows: Rows = None) -> Float[Array, "..."]:
        """Return `x` with each value either zeroed or divided by the share that is kept."""
        if self.rate == 0 or not self.has_rng("dropout"):
            return x
        if rows is None:
            rows = jnp.arange(x.shape[0], dtype=jnp.int32)
        keep = keep_mask(self.make_rng("dropout"), self.rate, x.shape, rows)
        return jnp.where(keep, x / (1 - self.rate), 0).astype(x.dtype)

"""The linear layer of figures 1 and 2, over tokens (sections 3.2.2-3.4)."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from flaxformer_min.kernels.linear import from_heads, linear, to_heads
from flaxformer_min.model.parameters import parameter


class Linear(nn.Module):
    """x W + b, applied to each token, with values of `dtype`."""

    features: int
    dtype: str = "float32"

    def __call__(self, x: Float[Array, "*batch d_in"]) -> Float[Array, "*batch d_out"]:
        """Return `features` values for each token."""
        return linear(jnp.asarray(x, self.dtype), *self.weights(x.shape[-1]), self.dtype)

    def to_heads(
        self, x: Float[Array, "batch length d_in"], heads: int
    ) -> Float[Array, "batch heads length d_k"]:
        """Return the layer's output divided among heads: head i has the i-th of equal parts."""
        return to_heads(jnp.asarray(x, self.dtype), *self.weights(x.shape[-1]), heads, self.dtype)

    def from_heads(
        self, heads: Float[Array, "batch heads length d_v"]
    ) -> Float[Array, "batch length d_out"]:
        """Return the layer's output for the features of all heads side by side."""
        weights = self.weights(heads.shape[1] * heads.shape[3])
        return from_heads(jnp.asarray(heads, self.dtype), *weights, self.dtype)

    @nn.compact
    def weights(self, d_in: int) -> tuple[Float[Array, "d_in d_out"], Float[Array, " d_out"]]:
        """Return the kernel and the bias."""
        shape = (d_in, self.features)
        kernel = parameter(self, "kernel", nn.initializers.xavier_uniform(), shape)
        return kernel, parameter(self, "bias", nn.initializers.zeros, (self.features,))

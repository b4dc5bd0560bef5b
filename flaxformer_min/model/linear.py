"""Linear layers over tokens (sections 3.2.2-3.4)."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float


def project(
    x: Float[Array, "*batch d_in"], kernel: Float[Array, "d_in d_out"], dtype: Any = jnp.float32
) -> Float[Array, "*batch d_out"]:
    """Return x · kernel as `dtype`.

    Tokens are flattened to one axis, so that the kernel's gradient is a single matrix product too.
    Over several axes XLA transposes the operands first, which makes a CPU step a fifth slower.
    """
    flat = jnp.matmul(x.reshape(-1, x.shape[-1]), kernel, preferred_element_type=dtype)
    return flat.reshape(*x.shape[:-1], kernel.shape[-1])


class Linear(nn.Module):
    """x W + b, applied to each token."""

    features: int
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "*batch d_in"]) -> Float[Array, "*batch d_out"]:
        """Return `features` values for each token."""
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.xavier_uniform(), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        x, kernel, bias = (jnp.asarray(each, self.dtype) for each in (x, kernel, bias))
        return project(x, kernel, self.dtype) + bias.reshape(*[1] * (x.ndim - 1), -1)

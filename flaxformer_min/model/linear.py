"""Linear layers over tokens, wherever a box of figure 1 has weights (sections 3.2.2-3.4)."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float


def project(
    x: Float[Array, "*batch d_in"], kernel: Float[Array, "d_in d_out"], dtype: Any = jnp.float32
) -> Float[Array, "*batch d_out"]:
    """x · kernel as `dtype`.

    All tokens stand in one column meanwhile, so that the gradient of the kernel is one product too:
    over several axes XLA transposes its operands first, and a step takes a fifth longer on a CPU.
    """
    flat = jnp.matmul(x.reshape(-1, x.shape[-1]), kernel, preferred_element_type=dtype)
    return flat.reshape(*x.shape[:-1], kernel.shape[-1])


class Linear(nn.Module):
    """x W + b, each token on its own."""

    features: int
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "*batch d_in"]) -> Float[Array, "*batch d_out"]:
        """`features` values for each token."""
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.xavier_uniform(), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        x, kernel, bias = (jnp.asarray(each, self.dtype) for each in (x, kernel, bias))
        return project(x, kernel, self.dtype) + bias.reshape(*[1] * (x.ndim - 1), -1)

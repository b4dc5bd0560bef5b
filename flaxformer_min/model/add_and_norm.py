"""Residual connection and layer norm around each sub-layer (sections 3.1 and 5.4)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.kernels.backend import compute_dtype
from flaxformer_min.kernels.remat import residual
from flaxformer_min.model.dropout import Dropout, Rows
from flaxformer_min.model.parameters import parameter


class LayerNorm(nn.Module):
    """Layer norm (Ba et al. 2016), computed in float32, with a scale and a bias."""

    epsilon: float
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        """Return `x` with mean 0 and variance 1 over d_model, scaled and shifted."""
        scale = parameter(self, "scale", nn.initializers.ones, x.shape[-1:])
        bias = parameter(self, "bias", nn.initializers.zeros, x.shape[-1:])
        x = x.astype(jnp.float32)
        mean, mean_square = x.mean(-1, keepdims=True), jnp.square(x).mean(-1, keepdims=True)
        variance = jnp.maximum(0.0, mean_square - jnp.square(mean))
        factor = jax.lax.rsqrt(variance + self.epsilon) * _for_tokens(scale, x)
        return ((x - mean) * factor + _for_tokens(bias, x)).astype(self.dtype)


def _for_tokens(vector: Float[Array, " d_model"], x: Array) -> Array:
    """Return a vector with the axes of `x`."""
    return vector.reshape(*[1] * (x.ndim - 1), -1)


def layer_norm(config: ModelConfig) -> LayerNorm:
    """Return the layer norm that the settings describe."""
    return LayerNorm(config.norm_epsilon, compute_dtype(config.dtype))


class AddAndNorm(nn.Module):
    """The residual connection around a sub-layer, with its dropout and layer norm.

    norm="post", the paper:                 LayerNorm(x + Dropout(Sublayer(x)))
    norm="pre" (Xiong et al. 2020):         x + Dropout(Sublayer(LayerNorm(x)))

    Used as `x = box.add(x, sublayer(box.before(x)))`.
    """

    config: ModelConfig

    def setup(self):
        """Create the norm and the dropout."""
        self.norm = layer_norm(self.config)
        self.dropout = Dropout(self.config.dropout)

    def before(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        """Return the input of the sub-layer."""
        return self.norm(x) if self.config.norm == "pre" else x

    def add(
        self,
        x: Float[Array, "*batch d_model"],
        output: Float[Array, "*batch d_model"],
        rows: Rows = None,
    ) -> Float[Array, "*batch d_model"]:
        """Return the residual sum of `x` and the sub-layer's `output`, normed if post-norm."""
        total = residual(x + self.dropout(output, rows))
        return total if self.config.norm == "pre" else self.norm(total)

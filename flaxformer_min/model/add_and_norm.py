"""Residual connection and layer norm around each sub-layer (sections 3.1 and 5.4)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.dropout import Dropout
from flaxformer_min.model.parameters import for_tokens, vector
from flaxformer_min.model.recomputation import stored
from flaxformer_min.model.target import compute_dtype


class LayerNorm(nn.Module):
    """Layer norm (Ba et al. 2016), computed in float32, with a scale and a bias."""

    epsilon: float
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        """Return `x` with mean 0 and variance 1 over d_model, scaled and shifted."""
        scale = vector(self, "scale", nn.initializers.ones, x.shape[-1])
        bias = vector(self, "bias", nn.initializers.zeros, x.shape[-1])
        x = x.astype(jnp.float32)
        # In the order of Flax's own layer norm: with others XLA computes parts twice on a CPU.
        squares, mean = jnp.square(x), stored(x.mean(-1))
        variance = jnp.maximum(0.0, squares.mean(-1) - jnp.square(mean))
        centred = x - mean[..., None]
        factor = stored(jax.lax.rsqrt(variance[..., None] + self.epsilon))
        scaled = centred * (factor * for_tokens(scale, x.shape))
        return (scaled + for_tokens(bias, x.shape)).astype(self.dtype)


class AddAndNorm(nn.Module):
    """The residual connection around a sub-layer, with its dropout and layer norm.

    norm="post", the paper:                 LayerNorm(x + Dropout(Sublayer(x)))
    norm="pre" (Xiong et al. 2020):         x + Dropout(Sublayer(LayerNorm(x)))

    Used as `x = box.add(x, sublayer(box.before(x)))`.
    """

    config: ModelConfig

    def setup(self):
        """Create the norm and the dropout."""
        self.norm = LayerNorm(epsilon=self.config.norm_epsilon, dtype=compute_dtype(self.config))
        self.dropout = Dropout(self.config.dropout)

    def before(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        """Return the input of the sub-layer."""
        return self.norm(x) if self.config.norm == "pre" else x

    def add(
        self, x: Float[Array, "*batch d_model"], output: Float[Array, "*batch d_model"]
    ) -> Float[Array, "*batch d_model"]:
        """Return the residual sum of `x` and the sub-layer's `output`, normed if post-norm."""
        total = stored(x + self.dropout(output))
        return total if self.config.norm == "pre" else self.norm(total)

"""Residual connection and layer norm around each sub-layer (sections 3.1 and 5.4)."""

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.dropout import Dropout
from flaxformer_min.model.target import compute_dtype


class LayerNorm(nn.LayerNorm):
    """Flax's layer norm, with the standard type promotion that it relies on."""

    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        """Return `x` with mean 0 and variance 1 over d_model, scaled and shifted."""
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x)


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
        total = x + self.dropout(output)
        return total if self.config.norm == "pre" else self.norm(total)

"""Residual connection and layer norm around each sub-layer (sections 3.1 and 5.4)."""

from flax import linen as nn
from jaxtyping import Array, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.kernels.backend import compute_dtype
from flaxformer_min.kernels.remat import residual
from flaxformer_min.model.dropout import Dropout, Rows


def layer_norm(config: ModelConfig) -> nn.Module:
    """Return a layer norm (Ba et al. 2016), computed in float32, with a scale and a bias."""
    return nn.LayerNorm(epsilon=config.norm_epsilon, dtype=compute_dtype(config.dtype))


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

"""The position-wise feed-forward network (section 3.3)."""

from flax import linen as nn
from jaxtyping import Array, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.dropout import Dropout
from flaxformer_min.model.linear import Linear


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W₁ + b₁) W₂ + b₂, equation 2."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        """Apply the same network to each position."""
        config = self.config
        inner = Linear(config.d_ff, config.dtype, name="inner")
        outer = Linear(config.d_model, config.dtype, name="outer")
        return outer(Dropout(config.feed_forward_dropout)(nn.relu(inner(x))))

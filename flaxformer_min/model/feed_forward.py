"""The box "Feed Forward": the same small network at every position (section 3.3)."""

from flax import linen as nn
from jaxtyping import Array, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.dropout import Dropout


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W₁ + b₁) W₂ + b₂, equation 2."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        """Each position on its own."""
        config = self.config
        init = nn.initializers.xavier_uniform()
        inner = nn.Dense(config.d_ff, dtype=config.dtype, kernel_init=init, name="inner")
        outer = nn.Dense(config.d_model, dtype=config.dtype, kernel_init=init, name="outer")
        return outer(Dropout(config.feed_forward_dropout)(nn.relu(inner(x))))

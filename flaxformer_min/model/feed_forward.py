"""The position-wise feed-forward network (section 3.3)."""

from functools import partial

from flax import linen as nn
from jaxtyping import Array, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.dropout import Dropout
from flaxformer_min.model.linear import Linear
from flaxformer_min.model.target import compute_dtype

ACTIVATIONS = {
    "relu": nn.relu,
    "swish": nn.swish,
    "gelu": partial(nn.gelu, approximate=False),  # x Φ(x) itself, as imported models compute it
}


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W₁ + b₁) W₂ + b₂, equation 2; or another activation than max(0, x)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        """Apply the same network to each position."""
        config = self.config
        inner = Linear(config.d_ff, compute_dtype(config), name="inner")
        outer = Linear(config.d_model, compute_dtype(config), name="outer")
        activated = ACTIVATIONS[config.activation](inner(x))
        return outer(Dropout(config.feed_forward_dropout)(activated))

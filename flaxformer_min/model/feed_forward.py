"""The position-wise feed-forward network (section 3.3)."""

from functools import partial

from flax import linen as nn
from jaxtyping import Array, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.kernels.backend import compute_dtype
from flaxformer_min.model.dropout import Dropout, Rows
from flaxformer_min.model.linear import Linear

ACTIVATIONS = {
    "relu": nn.relu,
    "swish": nn.swish,
    "gelu": partial(nn.gelu, approximate=False),  # x Φ(x) itself, as imported models compute it
}


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W₁ + b₁) W₂ + b₂, equation 2; or another activation than max(0, x)."""

    config: ModelConfig

    def setup(self):
        """Create both linear layers."""
        dtype = compute_dtype(self.config.dtype)
        self.inner = Linear(self.config.d_ff, dtype)
        self.outer = Linear(self.config.d_model, dtype)
        self.dropout = Dropout(self.config.feed_forward_dropout)

    def __call__(
        self, x: Float[Array, "*batch d_model"], rows: Rows = None
    ) -> Float[Array, "*batch d_model"]:
        """Apply the same network to each position."""
        activated = ACTIVATIONS[self.config.activation](self.inner(x))
        return self.outer(self.dropout(activated, rows))

"""The left half of figure 1: N times self-attention and feed forward (section 3.1)."""

from flax import linen as nn
from jaxtyping import Array, Bool, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.add_and_norm import EPSILON, AddAndNorm
from flaxformer_min.model.feed_forward import FeedForward
from flaxformer_min.model.multi_head_attention import MultiHeadAttention


class EncoderLayer(nn.Module):
    """Look around in the source sentence, then think about it."""

    config: ModelConfig

    def setup(self):
        """Two sub-layers, each in its "Add & Norm"."""
        self.self_attention = MultiHeadAttention(self.config)
        self.self_attention_norm = AddAndNorm(self.config)
        self.feed_forward = FeedForward(self.config)
        self.feed_forward_norm = AddAndNorm(self.config)

    def __call__(
        self,
        x: Float[Array, "batch source d_model"],
        mask: Bool[Array, "batch source source"],
    ) -> Float[Array, "batch source d_model"]:
        """One layer further."""
        y = self.self_attention_norm.before(x)
        seen = self.self_attention(y, self.self_attention.keys_values(y), mask)
        x = self.self_attention_norm.add(x, seen)
        y = self.feed_forward_norm.before(x)
        return self.feed_forward_norm.add(x, self.feed_forward(y))


class Encoder(nn.Module):
    """The stack of N encoder layers."""

    config: ModelConfig

    def setup(self):
        """Layers are named layer_0 to layer_N-1; a pre-norm stack ends in a norm of its own."""
        layer = nn.remat(EncoderLayer) if self.config.remat else EncoderLayer
        self.layer = [layer(self.config) for _ in range(self.config.num_layers)]
        if self.config.norm == "pre":
            self.final_norm = nn.LayerNorm(epsilon=EPSILON, dtype=self.config.dtype)

    def __call__(
        self,
        x: Float[Array, "batch source d_model"],
        mask: Bool[Array, "batch source source"],
    ) -> Float[Array, "batch source d_model"]:
        """From embedded source tokens to what the decoder attends to."""
        for layer in self.layer:
            x = layer(x, mask)
        return self.final_norm(x) if self.config.norm == "pre" else x

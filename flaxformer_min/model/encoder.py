"""The encoder: N layers of self-attention and a feed-forward network (section 3.1)."""

from flax import linen as nn
from jaxtyping import Array, Bool, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.add_and_norm import AddAndNorm, LayerNorm
from flaxformer_min.model.feed_forward import FeedForward
from flaxformer_min.model.multi_head_attention import MultiHeadAttention
from flaxformer_min.model.recomputation import recomputed
from flaxformer_min.model.target import compute_dtype


class EncoderLayer(nn.Module):
    """Self-attention over the source, then a feed-forward network.

    `attention` may be any module class that is built from a `ModelConfig` and has the methods of
    `MultiHeadAttention`.
    """

    config: ModelConfig
    attention: type[nn.Module] = MultiHeadAttention

    def setup(self):
        """Create two sub-layers, each with its Add & Norm."""
        self.self_attention = self.attention(self.config)
        self.self_attention_norm = AddAndNorm(self.config)
        self.feed_forward = FeedForward(self.config)
        self.feed_forward_norm = AddAndNorm(self.config)

    def __call__(
        self,
        x: Float[Array, "batch source d_model"],
        mask: Bool[Array, "batch source source"],
    ) -> Float[Array, "batch source d_model"]:
        """Return the output of the layer."""
        y = self.self_attention_norm.before(x)
        attended = self.self_attention(y, self.self_attention.keys_values(y), mask)
        x = self.self_attention_norm.add(x, attended)
        y = self.feed_forward_norm.before(x)
        return self.feed_forward_norm.add(x, self.feed_forward(y))


class Encoder(nn.Module):
    """The stack of N encoder layers."""

    config: ModelConfig
    attention: type[nn.Module] = MultiHeadAttention

    def setup(self):
        """Create layer_0 to layer_N-1, and the final norm of a pre-norm stack."""
        layer = recomputed(EncoderLayer, self.config)
        self.layer = [layer(self.config, self.attention) for _ in range(self.config.num_layers)]
        if self.config.norm == "pre":
            self.final_norm = LayerNorm(
                epsilon=self.config.norm_epsilon, dtype=compute_dtype(self.config)
            )

    def __call__(
        self,
        x: Float[Array, "batch source d_model"],
        mask: Bool[Array, "batch source source"],
    ) -> Float[Array, "batch source d_model"]:
        """Encode embedded source tokens."""
        for layer in self.layer:
            x = layer(x, mask)
        return self.final_norm(x) if self.config.norm == "pre" else x

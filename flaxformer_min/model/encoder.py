"""The encoder: N layers of self-attention and a feed-forward network (section 3.1)."""

from flax import linen as nn
from jaxtyping import Array, Bool, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.kernels.remat import remat
from flaxformer_min.model.add_and_norm import AddAndNorm, layer_norm
from flaxformer_min.model.feed_forward import FeedForward
from flaxformer_min.model.multi_head_attention import MultiHeadAttention
from flaxformer_min.tokens import Places


class EncoderLayer(nn.Module):
    """Self-attention over the source, then a feed-forward network.

    A subclass names other classes of parts, or overrides `setup` (docs/extending.md).
    """

    config: ModelConfig

    attention_class = MultiHeadAttention
    feed_forward_class = FeedForward
    norm_class = AddAndNorm

    def setup(self):
        """Create two sub-layers, each with its Add & Norm."""
        self.self_attention = self.attention_class(self.config)
        self.self_attention_norm = self.norm_class(self.config)
        self.feed_forward = self.feed_forward_class(self.config)
        self.feed_forward_norm = self.norm_class(self.config)

    def __call__(
        self,
        x: Float[Array, "batch source d_model"],
        mask: Bool[Array, "batch source source"],
        places: Places,
    ) -> Float[Array, "batch source d_model"]:
        """Return the output of the layer for `x`, whose vectors stand at `places`."""
        y = self.self_attention_norm.before(x)
        attended = self.self_attention.keys_values(y, places)
        y = self.self_attention(y, attended, mask, places)
        x = self.self_attention_norm.add(x, y, places.rows)
        y = self.feed_forward(self.feed_forward_norm.before(x), places.rows)
        return self.feed_forward_norm.add(x, y, places.rows)


class Encoder(nn.Module):
    """The stack of N encoder layers, of the class `layer_class`."""

    config: ModelConfig
    layer_class: type[nn.Module] = EncoderLayer

    def setup(self):
        """Create layer_0 to layer_N-1, and the final norm of a pre-norm stack."""
        layer = remat(self.layer_class, self.config.remat)
        self.layer = [layer(self.config) for _ in range(self.config.num_layers)]
        if self.config.has_final_norm:
            self.final_norm = layer_norm(self.config)

    def __call__(
        self,
        x: Float[Array, "batch source d_model"],
        mask: Bool[Array, "batch source source"],
        places: Places,
    ) -> Float[Array, "batch source d_model"]:
        """Encode `x`, embedded tokens that stand at `places`."""
        for layer in self.layer:
            x = layer(x, mask, places)
        return self.final_norm(x) if self.config.has_final_norm else x

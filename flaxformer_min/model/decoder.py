"""The right half of figure 1: N times masked self-, cross-attention, feed forward (section 3.1)."""

from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.add_and_norm import EPSILON, AddAndNorm
from flaxformer_min.model.attention import KeyValue
from flaxformer_min.model.feed_forward import FeedForward
from flaxformer_min.model.multi_head_attention import MultiHeadAttention


class DecoderLayer(nn.Module):
    """Look back at what was written, look over at the source, then think."""

    config: ModelConfig

    def setup(self):
        """Three sub-layers, each in its "Add & Norm"."""
        self.self_attention = MultiHeadAttention(self.config)
        self.self_attention_norm = AddAndNorm(self.config)
        self.cross_attention = MultiHeadAttention(self.config)
        self.cross_attention_norm = AddAndNorm(self.config)
        self.feed_forward = FeedForward(self.config)
        self.feed_forward_norm = AddAndNorm(self.config)

    def __call__(
        self,
        x: Float[Array, "batch target d_model"],
        source: KeyValue,
        self_mask: Bool[Array, "batch target written"],
        cross_mask: Bool[Array, "batch target source"],
        written: KeyValue | None = None,
        place: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "batch target d_model"], KeyValue]:
        """One layer further, and the keys and values that self-attention looked at.

        In training these are `x`'s own; in decoding `written`, with `x`'s own put in at `place`.
        """
        y = self.self_attention_norm.before(x)
        own = self.self_attention.keys_values(y)
        written = own if written is None else written.write(own, place)
        x = self.self_attention_norm.add(x, self.self_attention(y, written, self_mask))
        y = self.cross_attention_norm.before(x)
        x = self.cross_attention_norm.add(x, self.cross_attention(y, source, cross_mask))
        y = self.feed_forward_norm.before(x)
        return self.feed_forward_norm.add(x, self.feed_forward(y)), written


class Decoder(nn.Module):
    """The stack of N decoder layers."""

    config: ModelConfig

    def setup(self):
        """Layers are named layer_0 to layer_N-1; a pre-norm stack ends in a norm of its own."""
        layer = nn.remat(DecoderLayer) if self.config.remat else DecoderLayer
        self.layer = [layer(self.config) for _ in range(self.config.num_layers)]
        if self.config.norm == "pre":
            self.final_norm = nn.LayerNorm(epsilon=EPSILON, dtype=self.config.dtype)

    def keys_values(self, encoded: Float[Array, "batch source d_model"]) -> tuple[KeyValue, ...]:
        """What each layer's cross-attention looks at: the same for every step and hypothesis."""
        return tuple(layer.cross_attention.keys_values(encoded) for layer in self.layer)

    def __call__(
        self,
        x: Float[Array, "batch target d_model"],
        source: tuple[KeyValue, ...],
        self_mask: Bool[Array, "batch target written"],
        cross_mask: Bool[Array, "batch target source"],
        written: tuple[KeyValue, ...] | None = None,
        place: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "batch target d_model"], tuple[KeyValue, ...]]:
        """From embedded target tokens to what the output projection reads, layer by layer."""
        now_written = []
        for number, layer in enumerate(self.layer):
            before = None if written is None else written[number]
            x, seen = layer(x, source[number], self_mask, cross_mask, before, place)
            now_written.append(seen)
        return self.final_norm(x) if self.config.norm == "pre" else x, tuple(now_written)

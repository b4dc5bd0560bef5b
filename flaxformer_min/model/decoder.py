"""The decoder: N layers of masked self-attention, cross-attention, feed-forward (section 3.1)."""

from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.add_and_norm import AddAndNorm, LayerNorm
from flaxformer_min.model.feed_forward import FeedForward
from flaxformer_min.model.key_value import KeyValue
from flaxformer_min.model.multi_head_attention import MultiHeadAttention, keys_values_of
from flaxformer_min.model.recomputation import recomputed
from flaxformer_min.model.target import compute_dtype


class DecoderLayer(nn.Module):
    """Masked self-attention over the target, cross-attention to the source, feed-forward."""

    config: ModelConfig

    def setup(self):
        """Create three sub-layers, each with its Add & Norm."""
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
        self_mask: Bool[Array, "batch target keys"],
        cross_mask: Bool[Array, "batch target source"],
        cached: KeyValue | None = None,
        entries: Int[Array, "batch target"] | None = None,
    ) -> tuple[Float[Array, "batch target d_model"], KeyValue]:
        """Return the output of the layer, and the keys and values that self-attention used.

        In training these are those of `x`; in decoding, `cached` with those of `x` stored at
        `entries`.
        """
        y = self.self_attention_norm.before(x)
        own = self.self_attention.keys_values(y)
        used = own if cached is None else cached.store(own, entries)
        x = self.self_attention_norm.add(x, self.self_attention(y, used, self_mask))
        y = self.cross_attention_norm.before(x)
        x = self.cross_attention_norm.add(x, self.cross_attention(y, source, cross_mask))
        y = self.feed_forward_norm.before(x)
        return self.feed_forward_norm.add(x, self.feed_forward(y)), used


class Decoder(nn.Module):
    """The stack of N decoder layers."""

    config: ModelConfig

    def setup(self):
        """Create layer_0 to layer_N-1, and the final norm of a pre-norm stack."""
        layer = recomputed(DecoderLayer, self.config)
        self.layer = [layer(self.config) for _ in range(self.config.num_layers)]
        if self.config.norm == "pre":
            self.final_norm = LayerNorm(
                epsilon=self.config.norm_epsilon, dtype=compute_dtype(self.config)
            )

    def cross_attention_kv(
        self, encoded: Float[Array, "batch source d_model"]
    ) -> tuple[KeyValue, ...]:
        """Project the encoded source to the keys and values of each layer's cross-attention."""
        return keys_values_of([layer.cross_attention for layer in self.layer], encoded)

    def __call__(
        self,
        x: Float[Array, "batch target d_model"],
        source: tuple[KeyValue, ...],
        self_mask: Bool[Array, "batch target keys"],
        cross_mask: Bool[Array, "batch target source"],
        cached: tuple[KeyValue, ...] | None = None,
        entries: Int[Array, "batch target"] | None = None,
    ) -> tuple[Float[Array, "batch target d_model"], tuple[KeyValue, ...]]:
        """Return the hidden states of embedded target tokens, and each layer's `KeyValue`."""
        all_used = []
        for number, layer in enumerate(self.layer):
            before = None if cached is None else cached[number]
            x, used = layer(x, source[number], self_mask, cross_mask, before, entries)
            all_used.append(used)
        return self.final_norm(x) if self.config.norm == "pre" else x, tuple(all_used)

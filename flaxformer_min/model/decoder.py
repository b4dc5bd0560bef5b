"""The decoder: N layers of masked self-attention, cross-attention, feed-forward (section 3.1)."""

from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from flaxformer_min.config import ModelConfig
from flaxformer_min.kernels.key_value import KeyValue
from flaxformer_min.kernels.remat import remat
from flaxformer_min.model.add_and_norm import AddAndNorm, layer_norm
from flaxformer_min.model.feed_forward import FeedForward
from flaxformer_min.model.multi_head_attention import MultiHeadAttention
from flaxformer_min.tokens import Places


class DecoderLayer(nn.Module):
    """Masked self-attention over the target, cross-attention to the source, feed-forward.

    A subclass names other classes of parts, or overrides `setup` (docs/extending.md).
    """

    config: ModelConfig

    attention_class = MultiHeadAttention
    cross_attention_class = MultiHeadAttention
    feed_forward_class = FeedForward
    norm_class = AddAndNorm

    def setup(self):
        """Create three sub-layers, each with its Add & Norm."""
        self.self_attention = self.attention_class(self.config)
        self.self_attention_norm = self.norm_class(self.config)
        self.cross_attention = self.cross_attention_class(self.config)
        self.cross_attention_norm = self.norm_class(self.config)
        self.feed_forward = self.feed_forward_class(self.config)
        self.feed_forward_norm = self.norm_class(self.config)

    def __call__(
        self,
        x: Float[Array, "batch target d_model"],
        source: KeyValue,
        self_mask: Bool[Array, "batch target keys"],
        cross_mask: Bool[Array, "batch target source"],
        places: Places,
        cached: KeyValue | None = None,
        entries: Int[Array, "batch target"] | None = None,
    ) -> tuple[Float[Array, "batch target d_model"], KeyValue]:
        """Return the output for `x`, vectors at `places`, and the `KeyValue` attended to.

        In training these are the keys and values of `x`; in decoding, `cached` with those of `x`
        stored at `entries`.
        """
        y = self.self_attention_norm.before(x)
        attended = self.self_attention.keys_values(y, places)
        if cached is not None:
            attended = cached.store(attended, entries)
        y = self.self_attention(y, attended, self_mask, places)
        x = self.self_attention_norm.add(x, y, places.rows)
        y = self.cross_attention(self.cross_attention_norm.before(x), source, cross_mask, places)
        x = self.cross_attention_norm.add(x, y, places.rows)
        y = self.feed_forward(self.feed_forward_norm.before(x), places.rows)
        return self.feed_forward_norm.add(x, y, places.rows), attended


class Decoder(nn.Module):
    """The stack of N decoder layers, of the class `layer_class`."""

    config: ModelConfig
    layer_class: type[nn.Module] = DecoderLayer

    def setup(self):
        """Create layer_0 to layer_N-1, and the final norm of a pre-norm stack."""
        layer = remat(self.layer_class, self.config.remat)
        self.layer = [layer(self.config) for _ in range(self.config.decoder_depth)]
        if self.config.has_final_norm:
            self.final_norm = layer_norm(self.config)

    def cross_attention_kv(
        self, encoded: Float[Array, "batch source d_model"], source: Places
    ) -> tuple[KeyValue, ...]:
        """Project the encoded source to the keys and values of each layer's cross-attention."""
        return tuple(layer.cross_attention.keys_values(encoded, source) for layer in self.layer)

    def self_attention_kv(
        self, x: Float[Array, "batch target d_model"], target: Places
    ) -> tuple[KeyValue, ...]:
        """Project `x` to keys and values of each layer's self-attention: the shapes of a cache."""
        return tuple(layer.self_attention.keys_values(x, target) for layer in self.layer)

    def __call__(
        self,
        x: Float[Array, "batch target d_model"],
        source: tuple[KeyValue, ...],
        self_mask: Bool[Array, "batch target keys"],
        cross_mask: Bool[Array, "batch target source"],
        places: Places,
        cached: tuple[KeyValue, ...] | None = None,
        entries: Int[Array, "batch target"] | None = None,
    ) -> tuple[Float[Array, "batch target d_model"], tuple[KeyValue, ...]]:
        """Return the hidden states of embedded tokens, and each layer's `KeyValue`."""
        attended = []
        for number, layer in enumerate(self.layer):
            before = None if cached is None else cached[number]
            x, used = layer(x, source[number], self_mask, cross_mask, places, before, entries)
            attended.append(used)
        return self.final_norm(x) if self.config.has_final_norm else x, tuple(attended)

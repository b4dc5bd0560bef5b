"""Multi-head attention (figure 2, section 3.2.2)."""

from typing import Any

from flax import linen as nn
from jaxtyping import Array, Bool, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.kernels.attention import BLOCK, attention_by_blocks, fused_attention
from flaxformer_min.kernels.backend import compute_dtype
from flaxformer_min.kernels.key_value import KeyValue
from flaxformer_min.model.attention import batched_scaled_dot_product_attention
from flaxformer_min.model.dropout import Dropout
from flaxformer_min.model.linear import Linear
from flaxformer_min.model.masks import check_mask
from flaxformer_min.tokens import Places


class MultiHeadAttention(nn.Module):
    """Concat(head₁, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    One module serves self-attention (keys and values of `x` itself), cross-attention (of the
    encoder's output) and cached decoding (of the tokens so far). If the collection "intermediates"
    is mutable, explicit weights are sown there as "weights": [batch heads queries keys].
    """

    config: ModelConfig

    def setup(self):
        """Create the projections; those of all heads are one matrix."""
        d_model, dtype = self.config.d_model, compute_dtype(self.config.dtype)
        self.query = Linear(d_model, dtype)
        self.key = Linear(d_model, dtype)
        self.value = Linear(d_model, dtype)
        self.output = Linear(d_model, dtype)
        self.dropout = Dropout(self.config.attention_dropout)

    def keys_values(
        self, x: Float[Array, "batch keys d_model"], places: Places | None = None
    ) -> KeyValue:
        """Return the projected keys and values of `x`, whose vectors stand at `places`."""
        heads = self.config.num_heads
        return KeyValue(self.key.to_heads(x, heads), self.value.to_heads(x, heads))

    def __call__(
        self,
        x: Float[Array, "batch queries d_model"],
        attended: KeyValue,
        mask: Bool[Array, "batch queries keys"],
        places: Places | None = None,
    ) -> Float[Array, "batch queries d_model"]:
        """Attend from each vector of `x` to `attended`, where `mask` allows it.

        `places` are those of the queries.

        Raises ValueError for a mask of another shape, also if it could be broadcast, or type.
        """
        check_mask(mask, (*x.shape[:2], attended.values.shape[2]))
        query = self.query.to_heads(x, self.config.num_heads)
        return self.output.from_heads(self.attend(query, attended, mask, places))

    def attend(
        self,
        query: Float[Array, "batch heads queries d_k"],
        attended: KeyValue,
        mask: Bool[Array, "batch queries keys"],
        places: Places | None = None,
    ) -> Float[Array, "batch heads queries d_v"]:
        """Return the output of each head. Override this for another kind of attention."""
        key, value = attended
        if self.config.attention == "fused":
            return fused_attention(query, key, value, mask)
        attention = batched_scaled_dot_product_attention
        dropping = self.config.attention_dropout and self.has_rng("dropout")
        if not dropping and self._by_blocks(query.shape[2]):
            return attention_by_blocks(attention, query, key, value, mask)
        output, weights = attention(query, key, value, mask)
        self.sow("intermediates", "weights", weights)
        return self.dropout(weights, getattr(places, "rows", None)) @ value if dropping else output

    def _by_blocks(self, queries: Any) -> bool:
        """Return whether rows are long, their weights are not sown, and no symbol is their size."""
        if self.is_mutable_collection("intermediates") or not isinstance(queries, int):
            return False
        return queries > BLOCK and queries % BLOCK == 0

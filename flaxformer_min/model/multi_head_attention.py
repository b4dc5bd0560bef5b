"""The box "Multi-Head Attention" (figure 2, section 3.2.2)."""

from flax import linen as nn
from jaxtyping import Array, Bool, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.attention import (
    BLOCK,
    KeyValue,
    attention_by_blocks,
    batched_attention_weights,
    batched_weighted_sum,
    fused_attention,
)
from flaxformer_min.model.dropout import Dropout
from flaxformer_min.model.linear import Linear


class MultiHeadAttention(nn.Module):
    """Concat(head₁, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    One module, three uses: self-attention gives it its own keys and values, cross-attention those
    of the encoder, cached decoding those written so far. Where "intermediates" are mutable,
    weights that are explicit are sown as "weights": [batch heads queries keys].
    """

    config: ModelConfig

    def setup(self):
        """All heads of a projection lie side by side in one matrix."""
        self.query = self._projection()
        self.key = self._projection()
        self.value = self._projection()
        self.output = self._projection()
        self.dropout = Dropout(self.config.attention_dropout)

    def _projection(self) -> Linear:
        return Linear(self.config.d_model, self.config.dtype)

    def _heads(
        self, x: Float[Array, "batch length d_model"]
    ) -> Float[Array, "batch heads length d_k"]:
        return x.reshape(*x.shape[:-1], self.config.num_heads, -1).swapaxes(1, 2)

    def keys_values(self, x: Float[Array, "batch places d_model"]) -> KeyValue:
        """Project what will be attended to. Done once for the encoder's output."""
        return KeyValue.of(self._heads(self.key(x)), self._heads(self.value(x)))

    def __call__(
        self,
        x: Float[Array, "batch queries d_model"],
        attended: KeyValue,
        mask: Bool[Array, "batch queries places"],
    ) -> Float[Array, "batch queries d_model"]:
        """Each token of `x` gathers what it needs from `attended`."""
        query = self._heads(self.query(x))
        if self.config.attention == "fused":
            gathered = fused_attention(query, attended.keys, attended.values, mask)
        elif self._takes_blocks(query.shape[2]):
            gathered = attention_by_blocks(query, attended.keys, attended.values, mask)
        else:
            weights = batched_attention_weights(query, attended.keys, mask)
            self.sow("intermediates", "weights", weights)
            gathered = batched_weighted_sum(self.dropout(weights), attended.values)
        return self.output(gathered.swapaxes(1, 2).reshape(x.shape))

    def _takes_blocks(self, queries: int) -> bool:
        """Whether a row is long, and nobody wants to see its weights or to drop some of them."""
        dropping = self.config.attention_dropout and self.has_rng("dropout")
        seen = self.is_mutable_collection("intermediates") or dropping
        return queries > BLOCK and queries % BLOCK == 0 and not seen

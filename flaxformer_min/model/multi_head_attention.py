"""Multi-head attention (figure 2, section 3.2.2)."""

from collections.abc import Sequence

from flax import linen as nn
from jaxtyping import Array, Bool, Float

from flaxformer_min.config import ModelConfig
from flaxformer_min.model.attention import (
    BLOCK,
    attention_by_blocks,
    batched_attention_weights,
    batched_weighted_sum,
    fused_attention,
)
from flaxformer_min.model.dropout import Dropout
from flaxformer_min.model.key_value import KeyValue
from flaxformer_min.model.linear import Linear, project_from_heads, project_to_heads
from flaxformer_min.model.masks import check_mask
from flaxformer_min.model.target import compute_dtype


class MultiHeadAttention(nn.Module):
    """Concat(head₁, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    One module serves self-attention (keys and values of `x` itself), cross-attention (of the
    encoder's output) and cached decoding (of the tokens so far). If the collection "intermediates"
    is mutable, explicit weights are sown there as "weights": [batch heads queries keys].
    """

    config: ModelConfig

    def setup(self):
        """Create the projections; those of all heads are one matrix."""
        self.query = self._projection()
        self.key = self._projection()
        self.value = self._projection()
        self.output = self._projection()
        self.dropout = Dropout(self.config.attention_dropout)

    def _projection(self) -> Linear:
        return Linear(self.config.d_model, compute_dtype(self.config))

    def keys_values(self, x: Float[Array, "batch keys d_model"]) -> KeyValue:
        """Return the projected keys and values of `x`."""
        return keys_values_of([self], x)[0]

    def __call__(
        self,
        x: Float[Array, "batch queries d_model"],
        attended: KeyValue,
        mask: Bool[Array, "batch queries keys"],
    ) -> Float[Array, "batch queries d_model"]:
        """Attend from each token of `x` to `attended`, where `mask` allows it.

        Raises ValueError for a mask of another shape, also if it could be broadcast, or type.
        """
        check_mask(mask, (*x.shape[:2], attended.values.shape[2]))
        (query,) = project_to_heads(x, [self.query], self.config.num_heads)
        return project_from_heads(self.attend(query, attended, mask), self.output)

    def attend(
        self,
        query: Float[Array, "batch heads queries d_k"],
        attended: KeyValue,
        mask: Bool[Array, "batch queries keys"],
    ) -> Float[Array, "batch heads queries d_k"]:
        """Return the output of each head. Override this for another kind of attention."""
        if self.config.attention == "fused":
            return fused_attention(query, attended.keys, attended.values, mask)
        if self._by_blocks(query.shape[2]):
            return attention_by_blocks(query, attended.keys, attended.values, mask)
        weights = batched_attention_weights(query, attended.keys, mask)
        self.sow("intermediates", "weights", weights)
        return batched_weighted_sum(self.dropout(weights), attended.values)

    def _by_blocks(self, queries: int) -> bool:
        """Return whether to use blocks: rows are long, and weights neither sown nor dropped."""
        dropping = self.config.attention_dropout and self.has_rng("dropout")
        needed = self.is_mutable_collection("intermediates") or dropping
        return queries > BLOCK and queries % BLOCK == 0 and not needed


def keys_values_of(
    attentions: Sequence[MultiHeadAttention], x: Float[Array, "batch keys d_model"]
) -> tuple[KeyValue, ...]:
    """Return the projected keys and values of `x` for each attention, all of them at once."""
    linears = [linear for each in attentions for linear in (each.key, each.value)]
    heads = project_to_heads(x, linears, attentions[0].config.num_heads)
    return tuple(KeyValue.of(*pair) for pair in zip(heads[::2], heads[1::2], strict=True))

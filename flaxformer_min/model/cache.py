"""State kept between two steps of decoding: the encoded source and the tokens so far (3.1).

Decoding is auto-regressive: each step reads the newest token of every hypothesis and attends to all
tokens before it, whose keys and values are cached here.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from flaxformer_min.model.attention import KeyValue, resize_axis

UNFILLED = -1
"""Entry of `Cache.ancestors` for a column without a token of the hypothesis."""


class CrossAttentionCache(NamedTuple):
    """Keys and values of an encoded source, shared by all its hypotheses at every step.

    segments:    1 where the source has a token, 0 for padding.
    keys_values: one `KeyValue` for each decoder layer.
    """

    segments: Int[Array, "batch source"]
    keys_values: tuple[KeyValue, ...]

    def resize(self, width: int) -> "CrossAttentionCache":
        """Return the cache of sources cut, or padded, to `width` tokens."""
        resized = tuple(layer.resize(width) for layer in self.keys_values)
        return CrossAttentionCache(resize_axis(self.segments, width, axis=1), resized)


class Cache(NamedTuple):
    """Keys and values of the tokens of all hypotheses so far.

    They stay where they were first stored; when hypotheses branch or die, only the small table
    `ancestors` is reordered (see `masks.ancestor_mask`).

    self_attention_kv: of each layer, [batch heads columns*beam d_k].
    ancestors: the slot that each column of each hypothesis was stored in; UNFILLED if none was.
    positions: the next token's position in its own sentence, and the column it is stored in.
    """

    self_attention_kv: tuple[KeyValue, ...]
    ancestors: Int[Array, "batch beam columns"]
    positions: Int[Array, " batch"]

    def reorder(self, parents: Int[Array, "batch beam"]) -> "Cache":
        """Return the cache in which hypothesis i continues hypothesis `parents[i]`."""
        ancestors = jnp.take_along_axis(self.ancestors, parents[:, :, None], axis=1)
        return self._replace(ancestors=ancestors)

    def resize(self, columns: int) -> "Cache":
        """Return the cache with a capacity of `columns` tokens; what is beyond it is dropped."""
        beam = self.ancestors.shape[1]
        resized = tuple(layer.resize(columns * beam) for layer in self.self_attention_kv)
        ancestors = resize_axis(self.ancestors, columns, axis=2, fill=UNFILLED)
        return self._replace(self_attention_kv=resized, ancestors=ancestors)

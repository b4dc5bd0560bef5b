"""State kept between two steps of decoding: the encoded source and the tokens so far (3.1).

Decoding is auto-regressive: each step reads the newest token of every hypothesis and attends to all
tokens before it, whose keys and values are cached here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from flaxformer_min.kernels.key_value import KeyValue, resize_axis


class CrossAttentionCache(NamedTuple):
    """Keys and values of an encoded source, shared by all its hypotheses at every step.

    segments:    1 where the source has a token, 0 for padding.
    keys_values: one `KeyValue` for each decoder layer.
    """

    segments: Int[Array, "batch source"]
    keys_values: tuple[KeyValue, ...]


class Cache(NamedTuple):
    """Keys and values of the tokens of all hypotheses so far.

    They stay in the entry where they were first stored. Hypotheses share the tokens of their common
    ancestors; when they branch or die, only the small table `visible` is reordered, and an entry
    that none of them sees any more is used again.

    self_attention_kv: of each layer, [batch heads entries d_k].
    visible:   the entries that each hypothesis attends to: the tokens of its ancestors.
    positions: the next token's position in its own sentence.
    """

    self_attention_kv: tuple[KeyValue, ...]
    visible: Bool[Array, "batch beam entries"]
    positions: Int[Array, " batch"]

    def claim(self) -> tuple[Bool[Array, "batch beam entries"], Int[Array, "batch beam"]]:
        """Return what the hypotheses see with their next tokens, and the entries of these.

        The entries are free ones, and none at all where the cache is full.
        """
        _, beam, size = self.visible.shape
        entries = batched_free_entries(self.visible, beam)
        claimed = entries[:, :, None] == jnp.arange(size, dtype=jnp.int32)[None, None, :]
        return self.visible | claimed, entries

    def is_full(self) -> Bool[Array, " batch"]:
        """Return whether there are fewer free entries than hypotheses."""
        seen = self.visible.any(axis=1).sum(axis=1, dtype=jnp.int32)
        return seen + self.visible.shape[1] > self.visible.shape[2]

    def reorder(self, parents: Int[Array, "batch beam"]) -> "Cache":
        """Return the cache in which hypothesis i continues hypothesis `parents[i]`."""
        return self._replace(visible=jnp.take_along_axis(self.visible, parents[:, :, None], axis=1))

    def resize(self, entries: int) -> "Cache":
        """Return the cache with this many entries; those beyond are dropped."""
        resized = tuple(layer.resize(entries) for layer in self.self_attention_kv)
        return self._replace(
            self_attention_kv=resized, visible=resize_axis(self.visible, entries, axis=2)
        )


def free_entries(visible: Bool[Array, "beam entries"], number: int) -> Int[Array, " number"]:
    """Return the first entries that no hypothesis sees; beyond the last where there are too few.

    >>> free_entries(jnp.array([[1, 0, 1, 0, 0], [1, 0, 0, 0, 0]], bool), 2)
    Array([1, 3], dtype=int32)
    """
    if number == 1:  # the sums would take several times as long
        entries = jnp.arange(visible.shape[1], dtype=jnp.int32)
        free = jnp.where(visible.any(axis=0), visible.shape[1], entries)
        return free.min(initial=visible.shape[1], keepdims=True)
    counted = jnp.cumsum(~visible.any(axis=0), dtype=jnp.int32)
    wanted = jnp.arange(1, number + 1, dtype=jnp.int32)
    return (counted[None, :] < wanted[:, None]).sum(axis=1, dtype=jnp.int32)


batched_free_entries = jax.vmap(free_entries, in_axes=(0, None))

"""What decoding remembers between two steps: the source, and what was written (section 3.1).

"Auto-regressive": each step reads one token of each hypothesis, and looks back at all before it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from flaxformer_min.model.attention import KeyValue

NOT_WRITTEN = -1
"""Of a column of `Cache.ancestors`."""


class Memory(NamedTuple):
    """A source sentence as the decoder sees it; shared by all its hypotheses, at every step."""

    segments: Int[Array, "batch source"]
    keys_values: tuple[KeyValue, ...]


class Cache(NamedTuple):
    """What the hypotheses of each sentence have written so far.

    Keys and values stay where they were written; when hypotheses branch and die, only `ancestors`
    is reordered (see `masks.ancestor_mask`).

    written:   keys and values of each layer, [batch heads columns*beam d_k].
    ancestors: which slot wrote each column of each hypothesis; NOT_WRITTEN where none did.
    column:    where the next token is written.
    positions: how far into its own sentence that is (a forced prefix may be shorter than others).
    """

    written: tuple[KeyValue, ...]
    ancestors: Int[Array, "batch beam columns"]
    column: Int[Array, ""]
    positions: Int[Array, " batch"]

    def reorder(self, parents: Int[Array, "batch beam"]) -> "Cache":
        """Hypothesis i goes on from what hypothesis `parents[i]` had written."""
        ancestors = jnp.take_along_axis(self.ancestors, parents[:, :, None], axis=1)
        return self._replace(ancestors=ancestors)

    def grow(self, columns: int) -> "Cache":
        """The same, with room for so many columns."""
        _, beam, before = self.ancestors.shape
        more = columns - before
        written = tuple(layer.grow(more * beam) for layer in self.written)
        ancestors = jnp.pad(
            self.ancestors, ((0, 0), (0, 0), (0, more)), constant_values=NOT_WRITTEN
        )
        return self._replace(written=written, ancestors=ancestors)

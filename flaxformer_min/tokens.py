"""What a sentence is to the model: three integers for every place in a row.

The whole library speaks this one type. Data makes it, the model reads it, and every attention mask
is a comparison of two of its columns.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

PAD, UNK, BOS, EOS = 0, 1, 2, 3


class Tokens(NamedTuple):
    """A row of tokens. Several sentences may share one row ("packing").

    ids:       which piece of the vocabulary; PAD where there is none.
    positions: how far into its own sentence, counted from 0.
    segments:  which sentence of the row, counted from 1; 0 where there is none.
    """

    ids: Int[Array, "*batch length"]
    positions: Int[Array, "*batch length"]
    segments: Int[Array, "*batch length"]


class Batch(NamedTuple):
    """Rows of source sentences and the rows of their translations, segment by segment."""

    source: Tokens
    target: Tokens


def one_sentence_per_row(ids: Int[Array, "*batch length"]) -> Tokens:
    """Tokens for rows that are not packed: one sentence each, padded at the end with PAD.

    >>> one_sentence_per_row(jnp.array([7, 8, EOS, PAD])).segments
    Array([1, 1, 1, 0], dtype=int32)
    """
    positions = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=ids.dtype), ids.shape)
    return Tokens(ids, positions, (ids != PAD).astype(ids.dtype))


def shift_right(target: Tokens) -> Tokens:
    """What the decoder reads to learn to write `target`: figure 1, "outputs (shifted right)".

    Every sentence starts from BOS, also the second and third of a packed row.

    >>> row = Tokens(*map(jnp.array, ([7, 3, 8, 3], [0, 1, 0, 1], [1, 1, 2, 2])))
    >>> shift_right(row).ids
    Array([2, 7, 2, 8], dtype=int32)
    """
    previous = jnp.roll(target.ids, 1, axis=-1)
    return target._replace(ids=jnp.where(target.positions == 0, BOS, previous))

"""The data type of the library: three integers for each token of a row.

The data pipeline produces it, the model reads it, and every attention mask is a comparison of two
of its columns.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

PAD, UNK, BOS, EOS = 0, 1, 2, 3

CUT = -2
"""In place of an id that SimCut hides: its embedding is zero, its position is still read."""


class Tokens(NamedTuple):
    """A row of tokens. Several sentences may share a row ("packing").

    ids:       piece of the vocabulary; PAD for padding.
    positions: position in its own sentence, counted from 0.
    segments:  sentence of the row, counted from 1; 0 for padding.
    """

    ids: Int[Array, "*batch length"]
    positions: Int[Array, "*batch length"]
    segments: Int[Array, "*batch length"]


class Batch(NamedTuple):
    """Rows of source sentences and of their translations, which have the same segments."""

    source: Tokens
    target: Tokens


class Places(NamedTuple):
    """Where the vectors of tokens stand.

    positions: of each token in its own sentence.
    rows:      the number of each row, by which dropout draws its masks; None: 0, 1, 2, ...
    """

    positions: Int[Array, "batch length"]
    rows: Int[Array, " batch"] | None = None


def one_sentence_per_row(ids: Int[Array, "*batch length"]) -> Tokens:
    """Return the tokens of unpacked rows: one sentence each, padded at the end with PAD.

    >>> one_sentence_per_row(jnp.array([7, 8, EOS, PAD])).segments
    Array([1, 1, 1, 0], dtype=int32)
    """
    positions = jnp.broadcast_to(jnp.arange(ids.shape[-1], dtype=jnp.int32), ids.shape)
    return Tokens(ids.astype(jnp.int32), positions, (ids != PAD).astype(jnp.int32))


def shift_right(target: Tokens) -> Tokens:
    """Return the decoder's input in training: figure 1, "outputs (shifted right)".

    Each sentence of a packed row starts with BOS.

    >>> row = Tokens(*map(jnp.array, ([7, 3, 8, 3], [0, 1, 0, 1], [1, 1, 2, 2])))
    >>> shift_right(row).ids
    Array([2, 7, 2, 8], dtype=int32)
    """
    previous = jnp.roll(target.ids, 1, axis=-1)
    return target._replace(ids=jnp.where(target.positions == 0, BOS, previous))

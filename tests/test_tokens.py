"""The one data type, and what the decoder reads of it."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_array_equal

from flaxformer_min.tokens import BOS, Tokens, one_sentence_per_row, shift_right


def test_a_row_of_one_sentence_counts_its_positions_and_marks_its_padding():
    """Section 3.5 counts from 0; segment 0 is padding."""
    tokens = one_sentence_per_row(jnp.array([[7, 8, 3, 0, 0], [0, 0, 0, 0, 0]]))
    assert_array_equal(tokens.ids, [[7, 8, 3, 0, 0], [0, 0, 0, 0, 0]])
    assert_array_equal(tokens.positions, [[0, 1, 2, 3, 4]] * 2)
    assert_array_equal(tokens.segments, [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])


def test_every_sentence_of_a_packed_row_is_shifted_right_and_starts_from_bos():
    """Figure 1, "outputs (shifted right)": also the second and the third, also of one token."""
    ids = np.array([[7, 8, 3, 3, 9, 3, 0], [4, 5, 6, 7, 8, 9, 3]])
    positions = np.array([[0, 1, 2, 0, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6]])
    segments = np.array([[1, 1, 1, 2, 3, 3, 0], [1, 1, 1, 1, 1, 1, 1]])
    target = Tokens(*map(jnp.asarray, (ids, positions, segments)))
    shifted = jax.device_get(shift_right(target))
    for row in range(2):
        for column in range(7):
            if segments[row, column]:
                first = positions[row, column] == 0
                expected = BOS if first else ids[row, column - 1]
                assert shifted.ids[row, column] == expected
    assert_array_equal(shifted.positions, positions)
    assert_array_equal(shifted.segments, segments)


def test_a_row_shifts_the_same_with_and_without_a_batch():
    """Leading axes are only axes: [length], [batch length] and [devices batch length]."""
    ids = jnp.array([[[7, 8, 3, 0]], [[9, 3, 0, 0]]])
    together = shift_right(one_sentence_per_row(ids))
    for device in range(2):
        alone = shift_right(one_sentence_per_row(ids[device, 0]))
        for column, expected in zip(together, alone, strict=True):
            assert_array_equal(column[device, 0], expected)

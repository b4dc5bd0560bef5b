"""Every mask against two loops and an if; True = may attend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from flaxformer_min.model.masks import (
    batched_look_ahead_mask,
    batched_segment_mask,
    look_ahead_mask,
    padding_mask,
    segment_mask,
)

QUERIES = np.array([[1, 1, 2, 2, 0], [1, 2, 3, 0, 0]])
KEYS = np.array([[1, 2, 2, 3, 3, 0, 0], [3, 3, 1, 0, 2, 0, 1]])


def loops(rule, queries, keys):
    """The mask of `rule(query, key)`, entry by entry."""
    mask = np.zeros((len(queries), len(keys)), bool)
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            mask[i, j] = rule(query, key)
    return mask


@pytest.mark.parametrize(
    "one, batched, rule",
    [
        (padding_mask, jax.vmap(padding_mask), lambda query, key: key != 0),
        (segment_mask, batched_segment_mask, lambda query, key: query == key and key != 0),
        (look_ahead_mask, batched_look_ahead_mask, lambda query, key: key <= query),
    ],
)
def test_a_mask_is_a_rule_for_every_query_and_key(one, batched, rule):
    """Section 3.2.3: no padding, the own sentence, and nothing from the future."""
    expected = [loops(rule, queries, keys) for queries, keys in zip(QUERIES, KEYS, strict=True)]
    assert_array_equal(batched(jnp.asarray(QUERIES), jnp.asarray(KEYS)), expected)
    assert_array_equal(one(jnp.asarray(QUERIES[1]), jnp.asarray(KEYS[1])), expected[1])


def test_padding_attends_to_nothing_and_is_attended_by_nothing():
    """Section 3.2.3: segment 0 is not a sentence, so padding does not attend to padding."""
    mask = segment_mask(jnp.array([0, 1, 0]), jnp.array([0, 1, 0]))
    assert_array_equal(mask, [[0, 0, 0], [0, 1, 0], [0, 0, 0]])


def test_look_ahead_and_segments_together_make_a_triangle_a_sentence():
    """Section 3.2.3 for a packed row: a triangle of each sentence, along the diagonal."""
    positions, segments = jnp.array([0, 1, 2, 0, 1, 0]), jnp.array([1, 1, 1, 2, 2, 0])
    mask = look_ahead_mask(positions, positions) & segment_mask(segments, segments)
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert_array_equal(mask, expected)

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

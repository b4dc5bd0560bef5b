"""The cache of decoding: entries that hypotheses share, free, and use again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from flaxformer_min.kernels.key_value import KeyValue
from flaxformer_min.model.cache import Cache

BATCH, BEAM = 3, 3


def empty(entries):
    zeros = jnp.zeros((BATCH, 1, entries, 1))
    kv = KeyValue(zeros, zeros)
    return Cache((kv,), jnp.zeros((BATCH, BEAM, entries), bool), jnp.zeros(BATCH, jnp.int32))


@jax.jit
def read(cache, tokens):
    """Store the newest token of each hypothesis, as a decoding step does."""
    visible, entries = cache.claim()
    new = tokens[:, None, :, None].astype(jnp.float32)
    kv = cache.self_attention_kv[0].store(KeyValue(new, new), entries)
    return Cache((kv,), visible, cache.positions + 1)


is_full, reorder = jax.jit(Cache.is_full), jax.jit(Cache.reorder)


@pytest.mark.parametrize("entries", [10, 12, 16])
def test_a_hypothesis_sees_its_own_tokens_while_entries_are_used_again(entries):
    """Beside Python lists: hypotheses branch and die at random until they need too many entries."""
    numbers = np.random.default_rng(entries)
    cache, number, again = empty(entries), 1, 0
    histories = [[[] for _ in range(BEAM)] for _ in range(BATCH)]
    for _ in range(12):
        needed = [len({token for seen in own for token in seen}) for own in histories]
        expected = [each + BEAM > entries for each in needed]
        assert_array_equal(is_full(cache), expected)
        if any(expected):
            break
        again += int(max(needed) + BEAM < number // BATCH)
        tokens = np.arange(number, number + BATCH * BEAM).reshape(BATCH, BEAM)
        number += tokens.size
        cache = read(cache, jnp.asarray(tokens))
        parents = numbers.integers(0, BEAM, (BATCH, BEAM)).astype(np.int32)
        cache = reorder(cache, parents)
        histories = [
            [[*own[parent], int(new[parent])] for parent in of_row]
            for own, new, of_row in zip(histories, tokens, parents, strict=True)
        ]
        stored = np.asarray(cache.self_attention_kv[0].values)[:, 0, :, 0]
        assert_array_equal(np.asarray(cache.self_attention_kv[0].keys)[:, 0, :, 0], stored)
        for row in range(BATCH):
            for seen, history in zip(np.asarray(cache.visible)[row], histories[row], strict=True):
                assert sorted(stored[row][seen]) == history
    assert again > 0 and number > entries

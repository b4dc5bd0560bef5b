"""The few shapes that programs are compiled for.

Each shape costs a compilation, and memory for the program; padding costs time.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from flaxformer_min.decoding.pool import PoolShape
from flaxformer_min.decoding.screening import KERNEL as SCREENING_KERNEL
from flaxformer_min.decoding.search import Rules
from flaxformer_min.model.target import target_platform
from flaxformer_min.runtime.devices import l2_cache_size
from flaxformer_min.tokens import PAD

LENGTHS = (24, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens that sentences are padded to. No source may be longer than the last, or with learned
positions than there are of these."""

WIDEST = 4
"""A source is padded to at most this many times the first of `LENGTHS` that holds it."""

LONGEST_PREFIX = 2 * LENGTHS[-1]
"""Most tokens of a forced prefix."""

BATCHES = (1, 8, 16, 32, 64, 128, 256)
"""Sentences that a pool has, on each device; the configured batch size is the last."""

USUAL_BATCH = {"cpu": 64, "accelerator": 256}
"""Most sentences at once on each device, unless a number is configured."""

LONGEST_OF_A_FULL_BATCH = 128
"""Source tokens with which the usual batch is still full; longer sentences come in smaller ones.
A prefix counts as a source where it is longer: its tokens are in the pool, too."""

SMALL_MODEL = 1 << 22
"""Most parameters with which few sentences at once take a CPU no longer for each than many.

A step reads the weights and the caches of the pool. Where the weights are small, so should the
caches be: they stay near the core. Larger weights are better read for more sentences at once. So
with a small model pools are small, and the last of any pool take few slots in turn. With a beam of
4 and more small pools are 4 to 7 % slower, but the peak of memory is 20 MB lower. Where the cache
of a core is too small for that, greedy pools are larger (`LARGE_L2`).
"""

SMALL_POOL = 16 * 24
"""Source tokens of all sentences in a small pool, if each has one hypothesis."""

SMALL_POOL_WITH_SMALL_L2 = 64 * 24
"""The same on a CPU whose cores have less than `LARGE_L2` of level 2 cache. There each step reads
weights and the caches of sentences from farther away; more sentences share what weights cost.
Half of it for sources of more than the first of `LENGTHS`: as fast, in 20 MB less."""

LARGE_L2 = 1 << 20
"""Bytes of a core's level 2 cache from which on a pool of `SMALL_POOL` is the faster one."""

NARROW = 16
"""Tokens that the sources of a small pool of the first of `LENGTHS` are padded to while they are
encoded, where that is enough. Encoding takes more than a quarter of a greedy search."""

SMALL_BEAM_POOL = 32 * 24
"""Source tokens of all sentences in a small pool, if hypotheses compete."""

LEAST_BEAM = 4
"""Fewest hypotheses of a sentence with which that many are enough: for more than 48 rows in all a
CPU rearranges the weights in every product, which few rows do not repay."""

MOST_ENTRIES = 1 << 18
"""Most cache entries of a pool on a GPU for which each cache holds all tokens of a sentence."""

FEWER = 8
"""How many times fewer slots a pool has at its end, where the last sentences take turns."""


def is_small(params: Any) -> bool:
    """Return whether there are at most `SMALL_MODEL` parameters, less those for screening."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    own = [leaf.size for path, leaf in leaves if getattr(path[-1], "key", "") != SCREENING_KERNEL]
    return sum(own) <= SMALL_MODEL


def sizes(most: int) -> list[int]:
    """Return the numbers of sentences that a pool may have, if it has at most so many."""
    return [*(size for size in BATCHES if size < most), most]


def pool_shape(slots: int, width: int, steps: int, rules: Rules, prefix: int = 0) -> PoolShape:
    """Return the shape of a pool of so many sentences, which may all join in one call.

    Attention reads the whole capacity. Few translations need much more than their source, and
    hypotheses share most of their tokens. A GPU reads a cache that holds all tokens in less time
    than it takes to move the sentences that outgrow a smaller one, so up to `MOST_ENTRIES` it has
    that capacity.
    """
    beam = rules.beam_size
    most = steps * beam
    if slots == 1:
        return PoolShape(slots, slots, width, most, steps, prefix)
    tokens = width + width // 8 + 4
    if rules.competing and not rules.early_stopping:
        # An exact search goes on for long after the best translation has ended.
        tokens = width + width // 2 + 4
    capacity = tokens * (beam + 3) // 4 if rules.competing else tokens * beam
    if target_platform() == "cuda" and slots * most <= MOST_ENTRIES:
        capacity = most
    capacity = in_blocks(min(capacity, most), beam)
    return PoolShape(slots, slots, width, capacity, steps, prefix)


def small_pool_shape(slots: int, width: int, steps: int, prefix: int) -> PoolShape:
    """Return the shape of a small pool, in which each sentence has one hypothesis.

    With room for twice the tokens of a source few sentences pause. More newcomers than slots join
    in a call, because starting one takes as long as two steps of so few.
    """
    tokens, l2 = SMALL_POOL, l2_cache_size()
    if l2 is not None and l2 < LARGE_L2:
        tokens = SMALL_POOL_WITH_SMALL_L2 // (1 if width == LENGTHS[0] else 2)
    longest = max(width, prefix)
    slots = min(slots, largest(BATCHES, tokens // longest))
    newcomers = min(4 * slots, largest(BATCHES, 4 * tokens // longest))
    capacity = in_blocks(min(2 * width, steps), 1)
    narrow = NARROW if width == LENGTHS[0] else 0
    return PoolShape(slots, newcomers, width, capacity, steps, prefix, narrow)


def small_beam_pool_shape(
    slots: int, width: int, steps: int, rules: Rules, prefix: int
) -> PoolShape:
    """Return the shape of a small pool in which hypotheses compete."""
    slots = min(slots, largest(BATCHES, SMALL_BEAM_POOL // max(width, prefix)))
    shape = pool_shape(slots, width, steps, rules, prefix)
    return dataclasses.replace(shape, newcomers=2 * slots)


def rooms(tokens: int, rules: Rules) -> tuple[int, ...]:
    """Return the capacities for so many tokens: one that is rarely too small, and the most.

    Hypotheses that compete share most of their tokens.
    """
    most = tokens * rules.beam_size
    capacities = (min(2 * tokens, most), most) if rules.competing else (most,)
    return tuple(in_blocks(capacity, rules.beam_size) for capacity in capacities)


def most_last(slots: int, in_turn: bool) -> int:
    """Return how many sentences of a pool, whom no others follow, go on in fewer slots."""
    return slots // (2 if in_turn else 3)


def last_shape(shape: PoolShape, capacity: int, in_turn: bool, beam_size: int) -> PoolShape:
    """Return the shape in which the last sentences of a pool go on; `newcomers` have no slot yet.

    in_turn: whether they take few slots in turn, so that hardly any lane is idle. That is faster
             where a step takes about as long for each sentence, however few there are.
    """
    last = slots = most_last(shape.slots, in_turn)
    if in_turn:
        # A step of one hypothesis takes nearly as long as one of two.
        slots = min(last, max(shape.slots // FEWER, 2 // beam_size, 1))
    return dataclasses.replace(shape, slots=slots, newcomers=last - slots, capacity=capacity)


def largest(sizes: Sequence[int], most: int) -> int:
    """Return the largest of the sizes up to `most`, or up to 8 if that is more."""
    return max(size for size in sizes if size <= max(most, 8))


def padded(sentences: list[list[int]], rows: int, width: int) -> np.ndarray:
    """Return token ids as rows, PAD where there is none."""
    ids = np.full((rows, width), PAD, np.int32)
    for row, sentence in zip(ids, sentences, strict=False):
        row[: len(sentence)] = sentence
    return ids


def bucket(length: int, sizes: Sequence[int]) -> int:
    """Return the first of the increasing `sizes` that is at least `length`.

    >>> bucket(30, LENGTHS)
    48
    """
    return next(size for size in sizes if size >= length)


def common_widths(widths: Sequence[int], few: int) -> dict[int, int]:
    """Return the width that the sources of each width are padded to; `widths` are those of all.

    A pool of its own would be compiled for little if only a few had this width. They take the next
    one that others have, if `WIDEST` allows it.

    >>> common_widths([24] * 900 + [48] * 20 + [64], few=32)
    {24: 24, 48: 64, 64: 64}
    """
    common: dict[int, int] = {}
    together: list[int] = []
    for width, wider in pairwise([*sorted({*widths}), math.inf]):
        together.append(width)
        if sum(map(widths.count, together)) > few or wider > WIDEST * together[0]:
            common |= dict.fromkeys(together, width)
            together = []
    return common


def in_blocks(entries: int, beam_size: int) -> int:
    """Return the next capacity that a CPU's vector units serve without a slow remainder.

    A larger one has room for at least one more token of each hypothesis, so that a sentence that
    paused can go on there.

    >>> in_blocks(22, 1), in_blocks(54, 4), in_blocks(54, 20)
    (24, 64, 64)
    """
    block = 8 if beam_size == 1 else -(-beam_size // 16) * 16
    return -(-entries // block) * block

"""Packing: which sentence pairs share a row of tokens, so that there is little padding."""

from typing import NamedTuple

import numpy as np

ATTEMPTS, SHAPES = 10, 10_000
"""Attempts to fill a row; fewer, to save time, for more than SHAPES / ATTEMPTS shapes."""


class Plan(NamedTuple):
    """The pairs of each row: row r has `pairs[starts[r]:starts[r + 1]]`."""

    pairs: np.ndarray
    starts: np.ndarray


class Packing(NamedTuple):
    """Rows of shapes. A shape is the two lengths of a pair; `plan` assigns pairs to the shapes.

    shape_of_pair: the number of each pair's shape.
    groups:        groups of equal rows, each as (shapes of a row, number of such rows).
    """

    shape_of_pair: np.ndarray
    groups: list[tuple[list[int], int]]

    def plan(self, rng: np.random.Generator | None = None) -> Plan:
        """Return the pairs of each row; `rng` shuffles pairs of a shape, and the rows."""
        slots = np.concatenate([np.tile(row, count) for row, count in self.groups])
        row_sizes = np.concatenate([np.full(count, len(row)) for row, count in self.groups])
        pairs = len(self.shape_of_pair)
        order = np.arange(pairs) if rng is None else rng.permutation(pairs)
        by_shape = order[np.argsort(self.shape_of_pair[order], kind="stable")]
        assigned = np.empty(pairs, np.int64)
        assigned[np.argsort(slots, kind="stable")] = by_shape
        starts = np.concatenate([[0], np.cumsum(row_sizes)])
        if rng is None:
            return Plan(assigned, starts)
        rows = rng.permutation(len(row_sizes))
        shuffled = ranges(starts[rows], row_sizes[rows])
        return Plan(assigned[shuffled], np.concatenate([[0], np.cumsum(row_sizes[rows])]))


def pack(
    source_lengths: np.ndarray, target_lengths: np.ndarray, row_lengths: tuple[int, int]
) -> Packing:
    """Return a packing of the pairs into few rows. The same lengths give the same packing.

    Packs the histogram of lengths instead of the pairs (Krell et al. 2021, "Efficient sequence
    packing without cross-contamination"), so that large corpora take seconds.

    >>> plan = pack(np.array([3, 5, 2]), np.array([3, 5, 2]), (5, 5)).plan()
    >>> [plan.pairs[a:b].tolist() for a, b in zip(plan.starts, plan.starts[1:])]
    [[1], [0, 2]]
    """
    number, sizes, counts = group_by_lengths(source_lengths, target_lengths)
    return Packing(number, _pack_shapes(sizes, counts, np.array(row_lengths)))


def group_by_lengths(
    source_lengths: np.ndarray, target_lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the shape of each pair, and the two lengths and the number of pairs of each shape."""
    base = target_lengths.max() + 1
    shapes, number, counts = np.unique(
        source_lengths * base + target_lengths, return_inverse=True, return_counts=True
    )
    return number, np.stack(np.divmod(shapes, base), axis=1), counts


def _pack_shapes(
    sizes: np.ndarray, counts: np.ndarray, row: np.ndarray
) -> list[tuple[list[int], int]]:
    """Return groups of equal rows, each as (shapes of a row, number of such rows).

    Each row starts with the longest remaining shape; the fullest of a few attempts is repeated
    until one of its shapes is used up. So there are at most as many groups as shapes.
    """
    counts, groups, rng = counts.copy(), [], np.random.default_rng(0)
    attempts = max(1, min(ATTEMPTS, SHAPES // len(sizes)))
    small = 1.5 * (counts @ sizes).min() / counts.sum()
    for longest in np.lexsort((-sizes.sum(1), -sizes.max(1))):
        while counts[longest]:
            rows = [_fill(longest, sizes, counts, row, small, rng) for _ in range(attempts)]
            pattern = min(rows, key=lambda shapes: -sizes[shapes].sum())
            used, times = np.unique(pattern, return_counts=True)
            count = int((counts[used] // times).min())
            counts[used] -= count * times
            groups.append((list(map(int, pattern)), count))
    return groups


def _fill(
    first: int,
    sizes: np.ndarray,
    counts: np.ndarray,
    row: np.ndarray,
    small: float,
    rng: np.random.Generator,
) -> list[int]:
    """Return the shapes of a row: `first`, shapes drawn by frequency, then the largest that fit.

    The largest are taken once a side has fewer than `small` free positions.
    """
    left, free, shapes = counts.copy(), row - sizes[first], [first]
    left[first] -= 1
    while True:
        fitting = np.flatnonzero((left > 0) & (sizes <= free).all(1))
        if not len(fitting):
            return shapes
        if free.min() < small:
            shape = fitting[sizes[fitting].sum(1).argmax()]
        else:
            share = np.cumsum(left[fitting])
            shape = fitting[np.searchsorted(share, rng.random() * share[-1], side="right")]
        left[shape] -= 1
        free = free - sizes[shape]
        shapes.append(int(shape))


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenation of `arange(start, start + length)` for all starts and lengths."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)

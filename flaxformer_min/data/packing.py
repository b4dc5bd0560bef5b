"""Which sentence pairs share a row of tokens, so that few places stay empty."""

from typing import NamedTuple

import numpy as np

ATTEMPTS, SHAPES = 10, 10_000
"""To fill a row: so many attempts, or fewer, that a corpus of many lengths takes no longer."""


class Plan(NamedTuple):
    """Which pairs stand in which row: row r holds `pairs[starts[r]:starts[r + 1]]`."""

    pairs: np.ndarray
    starts: np.ndarray


class Packing(NamedTuple):
    """How the lengths of a split fit together; who of a length stands where is drawn later.

    length_of_pair: a number for each pair; pairs of the same lengths have the same.
    groups:         of equal rows, each as (the numbers in a row, how many such rows).
    """

    length_of_pair: np.ndarray
    groups: list[tuple[list[int], int]]

    def plan(self, rng: np.random.Generator | None = None) -> Plan:
        """Which pairs share a row, and in which order rows come, is drawn by `rng`, if given."""
        slots = np.concatenate([np.tile(row, count) for row, count in self.groups])
        row_sizes = np.concatenate([np.full(count, len(row)) for row, count in self.groups])
        pairs = len(self.length_of_pair)
        order = np.arange(pairs) if rng is None else rng.permutation(pairs)
        by_length = order[np.argsort(self.length_of_pair[order], kind="stable")]
        placed = np.empty(pairs, np.int64)
        placed[np.argsort(slots, kind="stable")] = by_length
        starts = np.concatenate([[0], np.cumsum(row_sizes)])
        if rng is None:
            return Plan(placed, starts)
        rows = rng.permutation(len(row_sizes))
        picked = ranges(starts[rows], row_sizes[rows])
        return Plan(placed[picked], np.concatenate([[0], np.cumsum(row_sizes[rows])]))


def pack(
    source_lengths: np.ndarray, target_lengths: np.ndarray, row_lengths: tuple[int, int]
) -> Packing:
    """Fit pairs into few rows. The same lengths give the same rows.

    It works on the histogram of lengths instead of on pairs (after Krell et al. 2021, "Efficient
    sequence packing without cross-contamination"), so that large corpora take seconds.

    >>> plan = pack(np.array([3, 5, 2]), np.array([3, 5, 2]), (5, 5)).plan()
    >>> [plan.pairs[a:b].tolist() for a, b in zip(plan.starts, plan.starts[1:])]
    [[1], [0, 2]]
    """
    number, sizes, counts = group_by_lengths(source_lengths, target_lengths)
    return Packing(number, _pack_shapes(sizes, counts, np.array(row_lengths)))


def group_by_lengths(
    source_lengths: np.ndarray, target_lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The number of each pair's shape, the two lengths of each shape, and its pairs."""
    base = target_lengths.max() + 1
    shapes, number, counts = np.unique(
        source_lengths * base + target_lengths, return_inverse=True, return_counts=True
    )
    return number, np.stack(np.divmod(shapes, base), axis=1), counts


def _pack_shapes(
    sizes: np.ndarray, counts: np.ndarray, row: np.ndarray
) -> list[tuple[list[int], int]]:
    """Groups of equal rows, each as (the shapes in it, how many such rows).

    Each time the longest shape that is left is completed to a row, the best of a few attempts, and
    that row is repeated until one of its shapes is used up: there are no more groups than shapes.
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
    """A row with `first` in it: shapes drawn as often as they occur, and what fits best in the end.

    The end begins when less than `small` places are left on a side.
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
    """`arange(start, start + length)` for each, end to end."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)

"""Validation of attention weights, and labels of tokens."""

from typing import Any

import numpy as np


def check_weights(
    name: str, weights: Any, shape: str, queries: int, keys: int, dimensions: tuple[int, ...]
) -> np.ndarray:
    """Return the weights as an array. Raises ValueError for other shapes or values."""
    weights = np.asarray(weights, np.float32)
    if weights.ndim not in dimensions or weights.shape[-2:] != (queries, keys) or not weights.size:
        raise ValueError(
            f"{name} must be {shape}, with one row per query token and one column per key token; "
            f"got shape {weights.shape} for {queries} and {keys} tokens. Remove padding, and pass "
            "weights and tokens both with EOS or both without."
        )
    # A row may exceed one by the rounding of bfloat16.
    if not (weights.min() >= 0 and weights.max() <= 1.01):
        raise ValueError(
            f"{name} must be attention weights, from 0 to 1; got {weights.min()} to "
            f"{weights.max()}. Pass the weights after the softmax."
        )
    return weights


def readable(token: str) -> str:
    """Return a short label of printable characters.

    >>> readable("▁the"), readable("a\\n"), readable("Donaudampfschifffahrtsgesellschaft")
    ('␣the', 'a\\\\n', 'Donaudampfschifffahrts…')
    """
    token = token.replace("▁", "␣").replace(" ", "␣")
    shown = [c if c.isprintable() else c.encode("unicode_escape").decode() for c in token]
    return "".join(shown if len(shown) <= 24 else [*shown[:22], "…"])

"""Attention weights and tokens, checked before they are drawn."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    pass


def check_weights(
    name: str, weights: Any, shape: str, queries: int, keys: int, dimensions: tuple[int, ...]
) -> np.ndarray:
    """Return the weights as an array; ValueError for another shape, or no attention weights."""
    weights = np.asarray(weights, np.float32)
    if weights.ndim not in dimensions or weights.shape[-2:] != (queries, keys) or not weights.size:
        raise ValueError(
            f"{name} must be {shape}, one row a token that looks and one column a token that is "
            f"looked at; got shape {weights.shape} for {queries} and {keys} tokens. Cut padding "
            "off, and give the end of sentence to both or to neither."
        )
    # A row sums to one but for bfloat16's rounding.
    if not (weights.min() >= 0 and weights.max() <= 1.01):
        raise ValueError(
            f"{name} must be attention weights, from 0 to 1; got {weights.min()} to "
            f"{weights.max()}. Take them after the softmax."
        )
    return weights


def _readable(token: str) -> str:
    """One line without surprises.

    >>> _readable("▁the"), _readable("a\\n"), _readable("Donaudampfschifffahrtsgesellschaft")
    ('␣the', 'a\\\\n', 'Donaudampfschifffahrts…')
    """
    token = token.replace("▁", "␣").replace(" ", "␣")
    shown = [c if c.isprintable() else c.encode("unicode_escape").decode() for c in token]
    return "".join(shown if len(shown) <= 24 else [*shown[:22], "…"])

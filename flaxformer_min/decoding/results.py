"""What a `Translator` returns: translations, scores of given ones, and attention weights."""

from typing import NamedTuple

import numpy as np


class Translation(NamedTuple):
    """One hypothesis for a line.

    text:     detokenized.
    log_prob: of the whole translation in nats, EOS included.
    score:    log_prob / length penalty, by which hypotheses are ordered.

    Both are NaN if scores were not requested and greedy decoding skipped them.
    """

    text: str
    log_prob: float
    score: float


class PairScore(NamedTuple):
    """The probability of a given translation.

    tokens:    pieces of the target, EOS last.
    log_probs: of each of them, in nats.
    """

    tokens: list[str]
    log_probs: list[float]

    @property
    def log_prob(self) -> float:
        """Log-probability of the whole translation in nats."""
        return float(np.sum(self.log_probs, dtype=np.float64))


class Attention(NamedTuple):
    """Attention weights, [layers heads queries keys] each; rows sum to one.

    source_tokens: queries and keys of `encoder`, keys of `cross`.
    target_tokens: queries of `decoder` and `cross`: the token being predicted.
    read_tokens:   keys of `decoder`: the target shifted right, from BOS on.
    """

    encoder: np.ndarray
    decoder: np.ndarray
    cross: np.ndarray
    source_tokens: list[str]
    target_tokens: list[str]
    read_tokens: list[str]

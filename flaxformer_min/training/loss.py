"""What the model is punished for (section 5.4)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def smoothed_cross_entropy(
    logits: Float[Array, " vocab"], label: Int[Array, ""], smoothing: float
) -> Float[Array, ""]:
    """Cross-entropy in nats, with `smoothing` of the truth spread over the whole vocabulary.

    Szegedy et al. 2016: the target is (1 - ε) one-hot + ε / vocab. With ε = 0 it is the negative
    log-probability of the label.

    >>> nats = smoothed_cross_entropy(jnp.log(jnp.array([0.25, 0.75])), jnp.int32(1), 0.0)
    >>> f"{nats:.5f}"  # -ln 0.75
    '0.28768'
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits)
    return total - (1.0 - smoothing) * logits[label] - smoothing * logits.mean()


class Sums(NamedTuple):
    """Sums over tokens; divided by `tokens` they are means. Summing first keeps devices equal."""

    loss: Float[Array, ""]
    negative_log_likelihood: Float[Array, ""]
    correct: Float[Array, ""]
    tokens: Float[Array, ""]


def score_token(logits: Float[Array, " vocab"], label: Int[Array, ""], smoothing: float) -> Sums:
    """The `Sums` of one token."""
    return Sums(
        smoothed_cross_entropy(logits, label, smoothing),
        smoothed_cross_entropy(logits, label, 0.0),
        (jnp.argmax(logits) == label).astype(jnp.float32),
        jnp.float32(1.0),
    )


score_tokens = jax.vmap(jax.vmap(score_token, (0, 0, None)), (0, 0, None))


def sum_over_tokens(
    logits: Float[Array, "rows target vocab"],
    labels: Int[Array, "rows target"],
    real: Int[Array, "rows target"],
    smoothing: float,
) -> Sums:
    """The sums of all tokens that are `real`; padding counts for nothing."""
    sums = score_tokens(logits, labels, smoothing)
    return jax.tree.map(lambda x: jnp.where(real, x, 0.0).sum(), sums)

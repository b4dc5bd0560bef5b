"""What the model is punished for (section 5.4)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 512
"""Tokens whose logits are in memory at a time."""


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


def score_token(
    logits: Float[Array, "readings vocab"], label: Int[Array, ""], smoothing: float, r_drop: float
) -> Sums:
    """The `Sums` of one token, read once; or twice under two dropout masks, for R-Drop.

    Liang et al. 2021, equation 4: the mean of both cross-entropies and `r_drop` / 2 times the mean
    of both Kullback-Leibler divergences; half of theirs, so that a loss keeps its size.
    """
    cross_entropy = jax.vmap(smoothed_cross_entropy, (0, None, None))
    loss = cross_entropy(logits, label, smoothing).mean()
    if r_drop:
        loss += r_drop / 2 * disagreement(*logits)
    return Sums(
        loss,
        cross_entropy(logits, label, 0.0).mean(),
        (logits[:, label] >= logits.max(-1)).mean(),
        jnp.float32(1.0),
    )


def disagreement(a: Float[Array, " vocab"], b: Float[Array, " vocab"]) -> Float[Array, ""]:
    """The mean of KL(a || b) and KL(b || a) in nats, of the distributions with these logits.

    >>> a, b = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
    >>> f"{disagreement(a, b):.5f}"  # (0.25 ln 2 + 0.25 ln 1.5) / 2
    '0.13733'
    """
    a, b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
    return ((jnp.exp(a) - jnp.exp(b)) * (a - b)).sum() / 2


def sum_over_tokens(
    to_logits: Callable[
        [Float[Array, "readings tokens d_model"]], Float[Array, "readings tokens vocab"]
    ],
    features: Float[Array, "readings rows target d_model"],
    labels: Int[Array, "rows target"],
    real: Int[Array, "rows target"],
    smoothing: float = 0.0,
    r_drop: float = 0.0,
) -> Sums:
    """The sums of all tokens that are `real`; padding counts for nothing.

    `features` are what `to_logits`, the output projection, reads. Logits exist for `CHUNK` tokens
    at a time: a vocabulary of 37,000 would else fill gigabytes. Only `loss` can be differentiated.
    """
    chunks = max(labels.size // CHUNK, 1)
    while labels.size % chunks:
        chunks -= 1
    score_tokens = jax.vmap(score_token, (1, 0, None, None))

    def of_chunk(logits: Callable, features, labels, real) -> tuple[Float[Array, ""], Sums]:
        sums = score_tokens(logits(features), labels, smoothing, r_drop)
        sums = jax.tree.map(lambda x: jnp.where(real, x, 0.0).sum(), sums)
        return sums.loss, sums

    readings, *_, width = features.shape
    return _sum_over_chunks(
        to_logits,
        of_chunk,
        features.reshape(readings, chunks, -1, width).swapaxes(0, 1),
        (labels.reshape(chunks, -1), real.reshape(chunks, -1)),
    )


def _sum_over_chunks(to_logits: Callable, of_chunk: Callable, features: Array, rest: tuple) -> Sums:
    """Add up chunk by chunk, and each chunk's gradient while its logits are at hand.

    The loss is the end of the model, so its gradient is known but for a factor: nothing must be
    kept, or computed again, for the way back.
    """
    to_logits, weights = jax.closure_convert(to_logits, features[0])

    def chunk_sums(weights: list, features: Array, rest: tuple) -> tuple[Array, Sums]:
        return of_chunk(lambda x: to_logits(x, *weights), features, *rest)

    @jax.custom_vjp
    def total(weights: list, features: Array) -> Sums:
        sums = jax.lax.map(lambda chunk: chunk_sums(weights, *chunk)[1], (features, rest))
        return jax.tree.map(lambda x: x.sum(0), sums)

    def forward(weights: list, features: Array) -> tuple[Sums, tuple]:
        def add(added: tuple[Sums, list], chunk: tuple) -> tuple[tuple[Sums, list], Array]:
            gradients, sums = jax.grad(chunk_sums, (0, 1), has_aux=True)(weights, *chunk)
            return jax.tree.map(jnp.add, added, (sums, gradients[0])), gradients[1]

        nothing = Sums(*(jnp.float32(0.0),) * 4), jax.tree.map(jnp.zeros_like, weights)
        (sums, of_weights), of_features = jax.lax.scan(add, nothing, (features, rest))
        return sums, (of_weights, of_features)

    def backward(gradients: tuple, factor: Sums) -> tuple:
        return jax.tree.map(lambda gradient: factor.loss * gradient, gradients)

    total.defvjp(forward, backward)
    return total(weights, features)

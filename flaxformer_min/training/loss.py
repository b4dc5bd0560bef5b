"""Label-smoothed cross-entropy, R-Drop and SimCut, summed over tokens (section 5.4)."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flaxformer_min.kernels.loss import chunk_count, logit_of, stored

TokenLoss = Callable[[Float[Array, " vocab"], Int[Array, ""]], Float[Array, ""]]
"""Return the loss of one token, given its float32 logits and its label."""


def cross_entropy(
    logits: Float[Array, " vocab"], label: Int[Array, ""], smoothing: float = 0.0
) -> Float[Array, ""]:
    """Return the cross-entropy in nats, with `smoothing` of the target spread over the vocabulary.

    Szegedy et al. 2016: the target is (1 - ε) one-hot + ε / vocab. With ε = 0 it is the negative
    log-probability of the label.

    >>> nats = cross_entropy(jnp.log(jnp.array([0.25, 0.75])), jnp.int32(1))
    >>> f"{nats:.5f}"  # -ln 0.75
    '0.28768'
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits)
    if isinstance(smoothing, (int, float)) and not smoothing:  # the mean may be -inf
        return total - logit_of(logits, label)
    return total - (1.0 - smoothing) * logit_of(logits, label) - smoothing * logits.mean()


class Sums(NamedTuple):
    """Sums over tokens. Divided by `tokens`, after summing over devices, they are means."""

    loss: Float[Array, ""]
    negative_log_likelihood: Float[Array, ""]
    correct: Float[Array, ""]
    tokens: Float[Array, ""]


def score_token(
    logits: Float[Array, "passes vocab"],
    label: Int[Array, ""],
    smoothing: float,
    r_drop: float,
    token_loss: TokenLoss | None,
    simcut: float = 0.0,
) -> Sums:
    """Return the `Sums` of one token, from one forward pass, or from two for R-Drop or SimCut.

    R-Drop: the two passes have different dropout. Liang et al. 2021, equation 4: the mean of both
    cross-entropies plus `r_drop` / 2 times the mean of both Kullback-Leibler divergences. This is
    half of theirs, so that the loss keeps its scale.

    SimCut: the second pass is of the cut sentences. Gao et al. 2022: the first's cross-entropy plus
    `simcut` times KL(first || second). Gradients flow through both, which is what they found to
    matter.
    """
    logits = logits.astype(jnp.float32)
    divergence = jnp.float32(0.0)
    if r_drop:
        divergence = r_drop / 2 * symmetric_kl(*logits)
    elif simcut:
        divergence, logits = simcut * kl(*logits), logits[:1]
    token_loss = token_loss or partial(cross_entropy, smoothing=smoothing)
    losses = jax.vmap(token_loss, (0, None))(logits, label)
    if losses.shape != logits.shape[:1] or not jnp.issubdtype(losses.dtype, jnp.floating):
        raise ValueError(
            "token_loss(logits, label) must return one floating-point number, the loss of a token; "
            f"got {losses.dtype} of shape {losses.shape[1:]}."
        )
    return Sums(
        losses.mean() + divergence,
        jax.vmap(cross_entropy, (0, None))(logits, label).mean(),
        (jax.vmap(logit_of, (0, None))(logits, label) >= logits.max(-1)).astype(jnp.float32).mean(),
        jnp.float32(1.0),
    )


def kl(a: Float[Array, " vocab"], b: Float[Array, " vocab"]) -> Float[Array, ""]:
    """Return KL(a || b) in nats of the distributions with these logits.

    >>> a, b = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
    >>> f"{kl(a, b):.5f}"  # 0.5 ln 2 + 0.5 ln (2 / 3)
    '0.14384'
    """
    a, b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
    return (jnp.exp(a) * (a - b)).sum()


def symmetric_kl(a: Float[Array, " vocab"], b: Float[Array, " vocab"]) -> Float[Array, ""]:
    """Return the mean of KL(a || b) and KL(b || a) in nats of the distributions with these logits.

    >>> a, b = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
    >>> f"{symmetric_kl(a, b):.5f}"  # (0.25 ln 2 + 0.25 ln 1.5) / 2
    '0.13733'
    """
    a, b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
    return ((jnp.exp(a) - jnp.exp(b)) * (a - b)).sum() / 2


def sum_over_tokens(
    to_logits: Callable[
        [Float[Array, "passes tokens d_model"]], Float[Array, "passes tokens vocab"]
    ],
    hidden_states: Float[Array, "passes rows target d_model"],
    labels: Int[Array, "rows target"],
    real: Int[Array, "rows target"],
    smoothing: float = 0.0,
    r_drop: float = 0.0,
    token_loss: TokenLoss | None = None,
    simcut: float = 0.0,
) -> Sums:
    """Return the sums over all tokens that are `real`, that is, not padding.

    `hidden_states` are the input of `to_logits`, the output projection. Logits exist for a chunk of
    the tokens at a time; those of a full batch may take gigabytes with a vocabulary of 37,000. Only
    `loss` can be differentiated. `token_loss` replaces the cross-entropy with `smoothing`.
    """
    one = jax.eval_shape(to_logits, hidden_states[:, 0, :1])
    chunks = chunk_count(labels.size, logits_per_token=one.size)
    score_tokens = jax.vmap(score_token, (1, 0, None, None, None, None))

    def of_chunk(logits: Callable, hidden_states, labels, real) -> tuple[Float[Array, ""], Sums]:
        sums = score_tokens(logits(hidden_states), labels, smoothing, r_drop, token_loss, simcut)
        sums = jax.tree.map(lambda x: jnp.where(real, x, 0.0).sum(), sums)
        return sums.loss, sums

    passes, *_, width = hidden_states.shape
    return _sum_over_chunks(
        to_logits,
        of_chunk,
        hidden_states.reshape(passes, chunks, -1, width).swapaxes(0, 1),
        (labels.reshape(chunks, -1), real.reshape(chunks, -1)),
    )


def _sum_over_chunks(
    to_logits: Callable, of_chunk: Callable, hidden_states: Array, rest: tuple
) -> Sums:
    """Sum chunk by chunk, with each chunk's gradient computed while its logits are in memory.

    The loss is the model's last operation, so its gradient is known up to a factor: the backward
    pass needs neither saved nor recomputed logits.
    """
    to_logits, weights = jax.closure_convert(to_logits, hidden_states[0])

    def chunk_sums(weights: list, hidden_states: Array, rest: tuple) -> tuple[Array, Sums]:
        return of_chunk(lambda x: to_logits(x, *weights), hidden_states, *rest)

    def stored_chunk_sums(weights: list, hidden_states: Array, rest: tuple) -> tuple[Array, Sums]:
        def logits(x: Array) -> Array:
            return stored(to_logits(x, *weights), x.dtype)

        return of_chunk(logits, hidden_states, *rest)

    @jax.custom_vjp
    def total(weights: list, hidden_states: Array) -> Sums:
        sums = jax.lax.map(lambda chunk: chunk_sums(weights, *chunk)[1], (hidden_states, rest))
        return jax.tree.map(lambda x: x.sum(0), sums)

    def forward(weights: list, hidden_states: Array) -> tuple[Sums, tuple]:
        def add(added: tuple[Sums, list], chunk: tuple) -> tuple[tuple[Sums, list], Array]:
            gradients, sums = jax.grad(stored_chunk_sums, (0, 1), has_aux=True)(weights, *chunk)
            return jax.tree.map(jnp.add, added, (sums, gradients[0])), gradients[1]

        nothing = Sums(*(jnp.float32(0.0),) * 4), jax.tree.map(jnp.zeros_like, weights)
        (sums, of_weights), of_hidden_states = jax.lax.scan(add, nothing, (hidden_states, rest))
        return sums, (of_weights, of_hidden_states)

    def backward(gradients: tuple, factor: Sums) -> tuple:
        return jax.tree.map(
            lambda gradient: factor.loss.astype(gradient.dtype) * gradient, gradients
        )

    total.defvjp(forward, backward)
    return total(weights, hidden_states)

"""Choices of the next tokens of one sentence: greedily, by beam search or at random."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from flaxformer_min.config import SearchConfig
from flaxformer_min.kernels.backend import backend
from flaxformer_min.tokens import BOS, EOS, PAD, UNK

FIRST_REGULAR_ID = max(PAD, UNK, BOS, EOS) + 1
"""The first id that is not special. Of the special ids, only EOS is ever chosen."""

BLOCKS = (40, 64)
"""Block sizes of `top_k_tokens`: the first one that divides the vocabulary is used. With a
remainder, a CPU takes three times as long, because the logits are copied."""

LANES = 128
"""Block size on a TPU, whose registers have 128 lanes: other blocks would be copied first."""


class Choice(NamedTuple):
    """The next hypotheses of a sentence.

    ended:    log-probability of each old hypothesis with EOS, -inf if it does not end.
    parent:   the old hypothesis that each new one continues; None: that in its own slot.
    token:    its new token.
    log_prob: its log-probability, including the token; -inf for an empty slot.
    """

    ended: Float[Array, " beam"]
    parent: Int[Array, " beam"] | None
    token: Int[Array, " beam"]
    log_prob: Float[Array, " beam"]


def joint(base: Float[Array, "*n"], logits: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return the log-probability of a hypothesis and its next token; -inf instead of NaN.

    `base` is the log-probability of the hypothesis less the logsumexp of its logits.
    """
    total = base + logits
    return jnp.where(total > -jnp.inf, total, -jnp.inf)


def top_k_tokens(
    base: Float[Array, " beam"], logits: Float[Array, "beam vocab"], count: int
) -> tuple[Float[Array, " best"], Int[Array, " best"], Int[Array, " best"]]:
    """Return (log_prob, parent, token) of the `count` likeliest continuations by a regular token.

    If there are fewer, the rest has log_prob -inf.

    Equal to `lax.top_k` of all sums, ties included (lower parent first, then lower token), in a
    fifth of its time on a CPU. No token of a block can be among the best k if k other blocks have
    larger maxima, and maxima are fast. So only the tokens of k blocks are compared.

    >>> logits = jnp.log(jnp.array([[0, 0, 0, 0, 0.5, 0.25], [0, 0, 0, 0, 0.75, 0.125]]))
    >>> _, parent, token = top_k_tokens(jnp.log(jnp.array([0.5, 0.5])), logits, 2)
    >>> parent, token
    (Array([1, 0], dtype=int32), Array([4, 4], dtype=int32))
    """
    beam, vocab = logits.shape
    size = next((size for size in BLOCKS if vocab % size == 0), BLOCKS[-1])
    if backend() == "tpu":
        size = LANES
    full = max(vocab // size, 1)
    # Only the first block is sliced to exclude special tokens, and an incomplete last one is
    # separate: slicing or padding all logits would copy them.
    maxima = [logits[:, FIRST_REGULAR_ID:size].max(-1, keepdims=True)]
    if full > 1:
        maxima.append(logits[:, : full * size].reshape(beam, full, size).max(-1)[:, 1:])
    if vocab > full * size:
        maxima.append(logits[:, full * size :].max(-1, keepdims=True))
    maxima = jnp.concatenate(maxima, axis=-1)
    # Rounding is monotonic, so the sum of the maximum is the maximum of the sums.
    maxima = joint(jnp.broadcast_to(base[:, None], maxima.shape), maxima)
    # In the order of the logits, so that the lower parent, then the lower token, wins a tie.
    block = jnp.sort(jax.lax.top_k(maxima.reshape(-1), min(count, maxima.size))[1])
    parent = jnp.zeros_like(block)
    if beam > 1:
        parent, block = jnp.divmod(block, maxima.shape[1])
    parent, start = jnp.repeat(parent, size), block * size
    token = (start[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]).reshape(-1)
    within = logits.at[parent, token].get(mode="fill", fill_value=-jnp.inf)
    within = jnp.where(token >= FIRST_REGULAR_ID, within, -jnp.inf)
    best, index = jax.lax.top_k(joint(base[parent], within), min(count, within.size))
    token = jnp.where(best > -jnp.inf, token[index], PAD)
    missing = 0, count - best.size
    best = jnp.pad(best, missing, constant_values=-jnp.inf)
    return best, jnp.pad(parent[index], missing), jnp.pad(token, missing, constant_values=PAD)


def choose_beam(
    base: Float[Array, " beam"],
    logits: Float[Array, "beam vocab"],
    may_end: Bool[Array, ""],
    must_end: Bool[Array, ""],
    key: None = None,
    *,
    config: SearchConfig,
) -> Choice:
    """Return the `beam_size` likeliest continuations; a hypothesis ends if its EOS is as likely.

    An EOS less likely than all of them is dropped, like any other continuation outside the beam.
    Otherwise, because a smoothed model assigns EOS some 1e-5 everywhere, a truncated sentence would
    eventually win.
    """
    ended = jnp.where(may_end, joint(base, logits[:, EOS]), -jnp.inf)
    best, parent, token = top_k_tokens(
        jnp.where(must_end, -jnp.inf, base), logits, config.beam_size
    )
    # Not best[-1]: XLA replaces its fast top_k by a full sort if the result is sliced.
    return Choice(jnp.where(ended >= best.min(), ended, -jnp.inf), parent, token, best)


def choose_greedy(
    base: Float[Array, "1"],
    logits: Float[Array, "1 vocab"],
    may_end: Bool[Array, ""],
    must_end: Bool[Array, ""],
    key: None = None,
    *,
    config: SearchConfig,
) -> Choice:
    """Return the likeliest token, or end: a beam of one that stops at its first EOS."""
    # By the logits alone: added to `base`, two of them may round to the same.
    logit, _, token = top_k_tokens(jnp.zeros_like(base), logits, 1)
    logit = jnp.where(must_end, -jnp.inf, logit)
    end = logits[:, EOS]
    ends = may_end & (end >= logit)
    ended = jnp.where(ends, joint(base, end), -jnp.inf)
    log_prob = jnp.where(ends, -jnp.inf, joint(base, logit))
    return Choice(ended, None, jnp.where(logit > -jnp.inf, token, PAD), log_prob)


def nucleus(share: Float[Array, " tokens"], top_p: float) -> Bool[Array, " tokens"]:
    """Return which tokens are in the nucleus: the fewest with a total probability of `top_p`.

    Holtzman et al. 2020, equation 2. Tokens that tie with the least likely one are included. A
    bisection finds the threshold exactly in 30 steps; sorting would take several times as long on a
    CPU.

    >>> nucleus(jnp.array([0.25, 0.5, 0.125, 0.125]), top_p=0.625)
    Array([ True,  True, False, False], dtype=bool)
    """
    # Floats from 0 to 1 have the same order as their bits, read as integers.
    bits = jax.lax.bitcast_convert_type(share, jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.where(bits >= middle, share, 0.0).sum() >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    above_one = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32) + 1
    low, _ = jax.lax.fori_loop(0, 30, halve, (jnp.int32(0), above_one))
    return bits >= low


def sample_token(
    log_probs: Float[Array, " tokens"], key: Key[Array, ""], config: SearchConfig
) -> Int[Array, ""]:
    """Draw a token at random. Tokens of log-probability -inf are never drawn.

    >>> log_probs = jnp.log(jnp.array([0.3, 0.6, 0.1]))
    >>> sample_token(log_probs, jax.random.key(0), SearchConfig(sample=True, top_p=0.5))
    Array(1, dtype=int32)
    """
    tempered = log_probs / config.temperature
    token = jnp.arange(log_probs.size, dtype=jnp.int32)
    if config.top_k is not None:
        tempered, token = jax.lax.top_k(tempered, min(config.top_k, log_probs.size))
    share = jax.nn.softmax(tempered)
    if config.top_p < 1:
        share = jnp.where(nucleus(share, config.top_p), share, 0.0)
    # Inverse transform sampling, because a random number per token (Gumbel) takes four times as
    # long. The target is above 0, so a token without a share is never drawn, however sums round.
    reached = jnp.where(share > 0, jnp.cumsum(share), 0.0)
    target = (1.0 - jax.random.uniform(key, dtype=jnp.float32)) * reached.max()
    return token[jnp.argmax(reached >= target)]


def choose_random(
    base: Float[Array, " beam"],
    logits: Float[Array, "beam vocab"],
    may_end: Bool[Array, ""],
    must_end: Bool[Array, ""],
    key: Key[Array, ""],
    *,
    config: SearchConfig,
) -> Choice:
    """Sample a token for each hypothesis independently; EOS ends the hypothesis."""
    beam, vocab = logits.shape
    token = jnp.arange(vocab, dtype=jnp.int32)
    allowed = jnp.where(token == EOS, may_end, (token >= FIRST_REGULAR_ID) & ~must_end)
    masked = jnp.where(allowed[None, :] & (logits > -jnp.inf), logits, -jnp.inf)
    keys = jax.random.split(key, beam)
    drawn = jax.vmap(partial(sample_token, config=config))(masked, keys)
    total = joint(base, masked[jnp.arange(beam, dtype=jnp.int32), drawn])
    ended = jnp.where(drawn == EOS, total, -jnp.inf)
    return Choice(ended, None, drawn, jnp.where(drawn == EOS, -jnp.inf, total))

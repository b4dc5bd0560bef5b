"""How one sentence goes on: greedily, by beam, or at random. Pure functions of one sentence."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from flaxformer_min.tokens import BOS, EOS, PAD, UNK

FIRST_REGULAR_ID = max(PAD, UNK, BOS, EOS) + 1
"""Ids from here on are words. Below it only EOS is ever chosen: PAD, UNK and BOS never come out."""


BLOCKS = (40, 64)
"""Words that `top_k_tokens` compares by their maximum first. The first size that divides the
vocabulary is the block: one that leaves a rest costs a CPU three times as much, for a copy."""


class Sampling(NamedTuple):
    """How to draw: at a temperature, from the `top_k` likeliest tokens, from the nucleus `top_p`.

    temperature: 1 is the model's own distribution; towards 0 it becomes greedy.
    top_k:       draw from this many likeliest tokens, lower ids first where they tie; None: all.
    top_p:       of these, from the fewest likeliest that together have this probability; 1: all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


class Choice(NamedTuple):
    """How one sentence goes on.

    ended:    log-probability of each old hypothesis with EOS, -inf where it does not end.
    parent:   the old hypothesis that each new one continues,
    token:    with this token,
    log_prob: and its log-probability then.
    """

    ended: Float[Array, " beam"]
    parent: Int[Array, " beam"]
    token: Int[Array, " beam"]
    log_prob: Float[Array, " beam"]


def joint(base: Float[Array, "*n"], logits: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Log-probability of a hypothesis and its next token. NaN, from a broken model, is -inf.

    `base` is the log-probability of the hypothesis less the logsumexp of its logits.
    """
    total = base + logits
    return jnp.where(total > -jnp.inf, total, -jnp.inf)


def top_k_tokens(
    base: Float[Array, " beam"], logits: Float[Array, "beam vocab"], count: int
) -> tuple[Float[Array, " best"], Int[Array, " best"], Int[Array, " best"]]:
    """The `count` likeliest of all hypotheses with one more word: log_prob, parent, token.

    Where there are fewer words, the rest has log_prob -inf.

    Just what `lax.top_k` of all sums would give, ties included (lower parent first, then lower
    token), in a fifth of its time on a CPU: no word of a block can be among the best k when k other
    blocks have better maxima, and maxima are quick. Only k blocks are then looked at word by word.

    >>> logits = jnp.log(jnp.array([[0, 0, 0, 0, 0.5, 0.25], [0, 0, 0, 0, 0.75, 0.125]]))
    >>> _, parent, token = top_k_tokens(jnp.log(jnp.array([0.5, 0.5])), logits, 2)
    >>> parent, token
    (Array([1, 0], dtype=int32), Array([4, 4], dtype=int32))
    """
    beam, vocab = logits.shape
    size = next((size for size in BLOCKS if vocab % size == 0), BLOCKS[-1])
    whole = max(vocab // size, 1)
    # The special tokens stay in the table and only the first block is cut, as is a ragged last one:
    # to slice or to pad the whole table would copy it.
    maxima = [logits[:, FIRST_REGULAR_ID:size].max(-1, keepdims=True)]
    if whole > 1:
        maxima.append(logits[:, : whole * size].reshape(beam, whole, size).max(-1)[:, 1:])
    if vocab > whole * size:
        maxima.append(logits[:, whole * size :].max(-1, keepdims=True))
    maxima = jnp.concatenate(maxima, axis=-1)
    # Rounding keeps order, so the sum of a maximum is the maximum of the sums.
    maxima = joint(jnp.broadcast_to(base[:, None], maxima.shape), maxima)
    # In the order of the table, so that a tie is still won by the lower parent, then token.
    block = jnp.sort(jax.lax.top_k(maxima.reshape(-1), min(count, maxima.size))[1])
    parent = jnp.repeat(block // maxima.shape[1], size)
    start = block % maxima.shape[1] * size
    token = (start[:, None] + jnp.arange(size)[None, :]).reshape(-1)
    within = logits.at[parent, token].get(mode="fill", fill_value=-jnp.inf)
    within = jnp.where(token >= FIRST_REGULAR_ID, within, -jnp.inf)
    best, place = jax.lax.top_k(joint(base[parent], within), min(count, within.size))
    token = jnp.where(best > -jnp.inf, token[place], PAD)
    missing = 0, count - best.size
    best = jnp.pad(best, missing, constant_values=-jnp.inf)
    return best, jnp.pad(parent[place], missing), jnp.pad(token, missing, constant_values=PAD)


def choose_beam(
    base: Float[Array, " beam"],
    logits: Float[Array, "beam vocab"],
    may_end: Bool[Array, ""],
    must_end: Bool[Array, ""],
    key: None = None,
    *,
    beam_size: int,
) -> Choice:
    """The likeliest continuations by a word go on; an EOS that is as likely as these ends.

    An EOS less likely than all of them ends nothing: the beam drops such a continuation, whatever
    its last token. Kept, the 1e-5 that a smoothed model gives EOS everywhere would in time make a
    truncated sentence the best.
    """
    ended = jnp.where(may_end, joint(base, logits[:, EOS]), -jnp.inf)
    best, parent, token = top_k_tokens(jnp.where(must_end, -jnp.inf, base), logits, beam_size)
    # min() and not [-1]: XLA's quick top_k turns into a full sort where a slice of it is taken.
    return Choice(jnp.where(ended >= best.min(), ended, -jnp.inf), parent, token, best)


def choose_greedy(
    base: Float[Array, "1"],
    logits: Float[Array, "1 vocab"],
    may_end: Bool[Array, ""],
    must_end: Bool[Array, ""],
    key: None = None,
) -> Choice:
    """The likeliest token. A beam of one that stops at its first EOS."""
    choice = choose_beam(base, logits, may_end, must_end, beam_size=1)
    return choice._replace(log_prob=jnp.where(choice.ended > -jnp.inf, -jnp.inf, choice.log_prob))


def nucleus(share: Float[Array, " tokens"], top_p: float) -> Bool[Array, " tokens"]:
    """The fewest likeliest tokens that together have probability `top_p`, and what ties with them.

    Holtzman et al. 2020, equation 2. Found by halving the range of thresholds, for to sort a
    vocabulary costs a CPU several times more; 30 halvings leave one float32 exactly.

    >>> nucleus(jnp.array([0.25, 0.5, 0.125, 0.125]), top_p=0.625)
    Array([ True,  True, False, False], dtype=bool)
    """
    # The bits of floats from 0 to 1, read as integers, have the order of the floats.
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
    log_probs: Float[Array, " tokens"], key: Key[Array, ""], sampling: Sampling
) -> Int[Array, ""]:
    """One token at random, as `sampling` says. Those of log-probability -inf are never drawn.

    >>> log_probs = jnp.log(jnp.array([0.3, 0.6, 0.1]))
    >>> sample_token(log_probs, jax.random.key(0), Sampling(top_p=0.5))
    Array(1, dtype=int32)
    """
    tempered, token = log_probs / sampling.temperature, jnp.arange(log_probs.size)
    if sampling.top_k is not None:
        tempered, token = jax.lax.top_k(tempered, min(sampling.top_k, log_probs.size))
    share = jax.nn.softmax(tempered)
    if sampling.top_p < 1:
        share = jnp.where(nucleus(share, sampling.top_p), share, 0.0)
    # One random number a token would cost four times as much as this one and the running sum. What
    # has no share reaches 0 and the target is above it, whichever way the sum was rounded.
    reached = jnp.where(share > 0, jnp.cumsum(share), 0.0)
    target = (1.0 - jax.random.uniform(key)) * reached.max()
    return token[jnp.argmax(reached >= target)]


def choose_random(
    base: Float[Array, " beam"],
    logits: Float[Array, "beam vocab"],
    may_end: Bool[Array, ""],
    must_end: Bool[Array, ""],
    key: Key[Array, ""],
    *,
    sampling: Sampling,
) -> Choice:
    """Every hypothesis goes its own way, drawn with a key of its own; a drawn EOS ends it."""
    beam, vocab = logits.shape
    token = jnp.arange(vocab)
    allowed = jnp.where(token == EOS, may_end, (token >= FIRST_REGULAR_ID) & ~must_end)
    offered = jnp.where(allowed[None, :] & (logits > -jnp.inf), logits, -jnp.inf)
    keys = jax.random.split(key, beam)
    drawn = jax.vmap(partial(sample_token, sampling=sampling))(offered, keys)
    lane = jnp.arange(beam)
    total = joint(base, offered[lane, drawn])
    ended = jnp.where(drawn == EOS, total, -jnp.inf)
    return Choice(ended, lane, drawn, jnp.where(drawn == EOS, -jnp.inf, total))

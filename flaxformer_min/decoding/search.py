"""How a translation is chosen, token by token: greedy, beam, sampling.

A choice is a pure function. It sees the live hypotheses of ONE sentence and how likely every next
token is, and says which of them end now and how the others go on. One loop asks the model, asks the
choice, and keeps the best that ended, until nothing that is still live can be better.

Finished hypotheses stand apart from live ones, so they never take a place in the beam. One that is
not there (given up, or a sample that has ended) has log-probability -inf.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from flaxformer_min.config import LENGTH_PENALTY_LIMIT
from flaxformer_min.decoding.choices import (
    FIRST_WORD,
    Choice,
    Sampling,
    choose_beam,
    choose_greedy,
    choose_random,
)
from flaxformer_min.tokens import BOS, EOS, PAD

FEW = 16
"""Once no more sentences of a batch are live, or the last room is full, those that are live go on
without the others: so many at a time, or a quarter of a larger batch. On real text a third of the
steps of 64 have no more."""


Cache = Any
"""What the model remembers of every hypothesis: any pytree whose arrays have a row for each
sentence, and whose scalars are of all. The search hands it on, and picks rows."""


Step = Callable[[Int[Array, "batch beam"], Cache], tuple[Float[Array, "batch beam vocab"], Cache]]
"""Reads one token of each hypothesis; gives the logits (float32) of the next one, and the cache
with the token in it. Log-probabilities are logits too. A beam search begins with one hypothesis, so
its first call has one token a sentence; logits of others are not looked at. A late call may have
some of the sentences only."""


Grow = Callable[[Cache, int], Cache]
"""Gives the cache of a search room for so many new tokens in all."""


Reorder = Callable[[Cache, Int[Array, "batch beam"]], Cache]
"""Makes hypothesis i of each sentence continue what hypothesis `parents[i]` had written."""


class Prefix(NamedTuple):
    """How each sentence begins: with BOS alone, or with target tokens that are forced.

    last:     the token that the first step reads: BOS, or the last forced one. Those before it are
              in the cache already.
    length:   forced tokens, 0 for BOS alone. They count in every length.
    log_prob: nats, of the forced tokens; part of every score.
    """

    last: Int[Array, " batch"]
    length: Int[Array, " batch"]
    log_prob: Float[Array, " batch"]


def no_prefix(batch: int) -> Prefix:
    """Every sentence begins with BOS alone.

    >>> no_prefix(2).last
    Array([2, 2], dtype=int32)
    """
    return Prefix(jnp.full(batch, BOS, jnp.int32), jnp.zeros(batch, jnp.int32), jnp.zeros(batch))


class Hypotheses(NamedTuple):
    """What a search found, best first.

    ids:      tokens after the prefix, ending in EOS; then PAD.
    log_prob: nats, of prefix, tokens and EOS; -inf (and ids all PAD) where there are no more.
    score:    log_prob / length_penalty(length of prefix, tokens and EOS, alpha).
    """

    ids: Int[Array, "*batch n_best length"]
    log_prob: Float[Array, "*batch n_best"]
    score: Float[Array, "*batch n_best"]


class Live(NamedTuple):
    """The hypotheses of one sentence that go on. One that is not there has log_prob -inf."""

    token: Int[Array, " beam"]
    log_prob: Float[Array, " beam"]
    ids: Int[Array, "beam length"]


class Row(NamedTuple):
    """What stays the same about one sentence: forced tokens, most new tokens, its random key."""

    prefix_length: Int[Array, ""]
    limit: Int[Array, ""]
    key: Key[Array, ""] | None


def length_penalty(length: Int[Array, "*batch"], alpha: float) -> Float[Array, "*batch"]:
    """What a log-probability is divided by, so that long translations stand a chance.

    ((5 + length) / 6) ** alpha: Wu et al. 2016, equation 14; alpha is 0.6 in section 6.1.

    >>> length_penalty(jnp.array([1, 7, 13]), alpha=1.0)
    Array([1., 2., 3.], dtype=float32)
    """
    length = jnp.asarray(length, jnp.float32)
    return ((5.0 + length) / 6.0) ** alpha


def keep(kept: Hypotheses, ended: Hypotheses) -> Hypotheses:
    """The best by score of those kept and those that ended now; of equals, those kept before."""
    together = jax.tree.map(lambda old, new: jnp.concatenate([old, new]), kept, ended)
    _, place = jax.lax.top_k(together.score, kept.score.size)
    return jax.tree.map(lambda column: column[place], together)


def extend(
    live: Live,
    kept: Hypotheses,
    logits: Float[Array, "beam vocab"],
    row: Row,
    index: Int[Array, ""],
    *,
    choose: Callable[..., Choice],
    alpha: float,
    min_length: int,
) -> tuple[Live, Hypotheses, Int[Array, " next"]]:
    """One step of any search, for one sentence, which chooses new token `index`.

    Gives the hypotheses that go on, those kept, and the parent of each that goes on.

    A hypothesis goes on only while its bound, log_prob / length_penalty(longest possible length),
    is better than the worst one kept, and -inf is the worst while fewer than n_best are kept.
    This loses nothing. A log-probability only falls, and with alpha >= 0 the penalty only grows
    with length, so (both below or at zero) nothing that a hypothesis can become has a score above
    its bound, and of equal scores the one kept before stays. Nor does it gain anything: the bound
    falls with log_prob alone, so a place in the beam that a hopeless one leaves can only be taken
    by one that is less likely and so hopeless too.
    """
    length = row.prefix_length + index + 1
    must_end = index + 1 >= row.limit
    may_end = must_end | (length > min_length)
    key = None if row.key is None else jax.random.fold_in(row.key, index)
    # Log-probabilities of the whole vocabulary would be written, only to be read once.
    base = live.log_prob - jax.nn.logsumexp(logits, axis=-1)
    choice = choose(base, logits, may_end, must_end, key)
    score = choice.ended / length_penalty(length, alpha)
    kept = keep(kept, Hypotheses(live.ids.at[:, index].set(EOS), choice.ended, score))
    bound = choice.log_prob / length_penalty(row.prefix_length + row.limit, alpha)
    log_prob = jnp.where(bound > kept.score[-1], choice.log_prob, -jnp.inf)
    ids = live.ids[choice.parent].at[:, index].set(choice.token)
    return Live(choice.token, log_prob, ids), kept, choice.parent


def search(
    step: Step,
    reorder: Reorder,
    cache: Cache,
    prefix: Prefix,
    max_length: Int[Array, " batch"],
    *,
    steps: int,
    rooms: Sequence[int] = (),
    grow: Grow | None = None,
    beam_size: int,
    n_best: int = 1,
    length_penalty: float = 0.6,
    min_length: int = 0,
    sampling: Sampling | None = None,
    key: Key[Array, " batch"] | None = None,
) -> Hypotheses:
    """The best translations of each sentence: one loop, to be called inside a caller's `jax.jit`.

    `beam_size` 1 is greedy; more is beam search; with `sampling`, that many samples are drawn with
    each sentence's own `key` (two may be the same; their log_prob is the model's, untempered). Of
    these the `n_best` best by score are given. What a sentence gets depends neither on the
    sentences beside it nor on `steps`, if that is enough.

    max_length:     tokens of prefix, translation and EOS. Where only one more fits, it is EOS, at
                    its own log-probability; so it is if the prefix leaves no place at all.
    steps:          new tokens at most in any sentence, EOS included: the size of the result.
    rooms:          new tokens that `cache` has places for, where that is less than `steps`, and
                    will have each time that it is given to `grow`; at last for `steps`. Empty: for
                    `steps` from the start.
    length_penalty: alpha of `length_penalty`.
    min_length:     tokens of prefix and translation before EOS may come; max_length wins over it.

    PAD, UNK and BOS are never chosen. What is left is not normalised again, so a log_prob is what
    teacher forcing gives the same tokens. A NaN counts as -inf, and may take its
    neighbours with it: a broken model finds nothing.
    Raises ValueError for settings that make no sense.

    Greedily, the likelier "4" (0.6) comes first, and then half of it ends. A beam of two finds that
    "5" (0.4) ends for certain:

    >>> table = jnp.zeros((6, 6)).at[BOS, 4].set(0.6).at[BOS, 5].set(0.4)
    >>> table = jnp.log(table.at[4, EOS].set(0.5).at[4, 4].set(0.5).at[5, EOS].set(1.0))
    >>> step = lambda tokens, cache: (table[tokens], cache)
    >>> reorder = lambda cache, parents: cache
    >>> begin = step, reorder, None, no_prefix(1), jnp.array([3])
    >>> for beam_size in (1, 2):
    ...     found = search(*begin, steps=3, beam_size=beam_size, length_penalty=0.0)
    ...     print(found.ids[0, 0], f"{jnp.exp(found.log_prob[0, 0]):.2f}")
    [4 3 0] 0.30
    [5 3 0] 0.40
    """
    _check_search(steps, beam_size, n_best, length_penalty, min_length)
    _check_sampling(sampling, key)
    crossing = beam_size > 1 and sampling is None
    choose = partial(choose_beam, beam_size=beam_size) if crossing else choose_greedy
    if sampling is not None:
        choose = partial(choose_random, sampling=sampling)
    rules = {"choose": choose, "alpha": length_penalty, "min_length": min_length}
    extend_all = jax.vmap(partial(extend, **rules), in_axes=(0, 0, 0, 0, None))
    limit = jnp.clip(max_length - prefix.length, 1, steps)
    rows = Row(prefix.length, limit, None if sampling is None else key)

    def advance(rows, state):
        index, live, kept, cache = state
        logits, cache = step(live.token, cache)
        logits = logits[:, : live.token.shape[1]]
        _check_vocabulary(logits.shape[-1])
        live, kept, parents = extend_all(live, kept, logits, rows, index)
        return index + 1, live, kept, reorder(cache, parents) if crossing else cache

    def go_on(rows, state, more_than=0, room=steps):
        return jax.lax.while_loop(
            lambda state: (_is_live(state[1]).sum() > more_than) & (state[0] < room),
            partial(advance, rows),
            state,
        )

    # Where hypotheses compete, there is but one to begin with: others would be the same again.
    first = 1 if crossing else beam_size
    state = jnp.int32(0), *_begin(prefix, steps, first, n_best), cache
    if crossing:
        state = advance(rows, state)
    batch = prefix.last.shape[0]
    few = min(max(FEW, -(-batch // 4)), batch)
    # A batch of few stays in its room, which is smaller.
    enough = few if few < batch else 0
    rooms = [room for room in rooms if room < steps]
    for number, room in enumerate(rooms or [steps]):
        if number:
            state = *state[:3], grow(state[3], room)
        state = go_on(rows, state, enough, room)
    index, live, kept, cache = state
    if not rooms and not enough:
        return kept
    is_live = _is_live(live)
    live_first = jnp.argsort(~is_live)

    def finish_few(finished):
        number, all_kept = finished
        # Clamped at the end: the last few may be searched twice, with the same result.
        chosen = jax.lax.dynamic_slice_in_dim(live_first, number * few, few)
        own_rows, *own = _pick((rows, live, kept, cache), chosen)
        own = index, *own
        if enough and rooms and few * steps > batch * rooms[-1]:
            own = go_on(own_rows, own, room=rooms[-1])  # all the room would cost more than it saves
        if rooms:
            own = *own[:3], grow(own[3], steps)
        own_kept = go_on(own_rows, own)[2]
        all_kept = jax.tree.map(lambda all, own: all.at[chosen].set(own), all_kept, own_kept)
        return number + 1, all_kept

    return jax.lax.while_loop(
        lambda finished: finished[0] * few < is_live.sum(), finish_few, (jnp.int32(0), kept)
    )[1]


def _is_live(live: Live) -> Bool[Array, " batch"]:
    """Whether any hypothesis of a sentence goes on."""
    return (live.log_prob > -jnp.inf).any(axis=-1)


def _pick(tree: Any, sentences: Int[Array, " few"]) -> Any:
    """The rows of these sentences; a scalar is of all."""
    return jax.tree.map(lambda leaf: leaf[sentences] if leaf.ndim else leaf, tree)


def _begin(prefix: Prefix, steps: int, live: int, n_best: int) -> tuple[Live, Hypotheses]:
    """Nothing written, nothing kept."""
    batch = prefix.last.shape[0]
    token = jnp.broadcast_to(prefix.last[:, None], (batch, live))
    log_prob = jnp.broadcast_to(prefix.log_prob[:, None], (batch, live))
    nothing = jnp.full((batch, n_best), -jnp.inf)
    kept = Hypotheses(jnp.full((batch, n_best, steps), PAD, jnp.int32), nothing, nothing)
    return Live(token, log_prob, jnp.full((batch, live, steps), PAD, jnp.int32)), kept


def _check_search(
    steps: int, beam_size: int, n_best: int, length_penalty: float, min_length: int
) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, for EOS; got {steps}. Allow more new tokens.")
    if beam_size < 1:
        raise ValueError(f"beam_size must be at least 1, which is greedy; got {beam_size}.")
    if not 1 <= n_best <= beam_size:
        raise ValueError(
            "n_best must be from 1 to beam_size, the hypotheses that there are; "
            f"got n_best={n_best}, beam_size={beam_size}. Ask for fewer, or widen the beam."
        )
    if not 0 <= length_penalty <= LENGTH_PENALTY_LIMIT:
        raise ValueError(
            "length_penalty must be at least 0, or the search could not tell when to stop, and at "
            f"most {LENGTH_PENALTY_LIMIT}; got {length_penalty}. 0 prefers short translations most."
        )
    if min_length < 0:
        raise ValueError(f"min_length must be at least 0, which is no minimum; got {min_length}.")


def _check_sampling(sampling: Sampling | None, key: Key[Array, " batch"] | None) -> None:
    if sampling is None:
        if key is not None:
            raise ValueError(
                "key is for sampling, and none was asked for. Give sampling=Sampling()."
            )
        return
    temperature, top_k, top_p = sampling
    if key is None:
        raise ValueError(
            "sampling needs a key for each sentence: key=jax.random.split(key, batch)."
        )
    if not temperature >= 1e-6:
        raise ValueError(
            f"temperature must be at least 1e-6; got {temperature}. "
            "For the likeliest token, leave sampling out and set beam_size=1."
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1; got {top_k}. None draws from all tokens.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1; got {top_p}. 1 keeps all tokens.")


def _check_vocabulary(vocab: int) -> None:
    if vocab <= FIRST_WORD:
        raise ValueError(
            f"step must offer more than the {FIRST_WORD} special tokens, or there is no word to "
            f"choose; got {vocab} logits."
        )

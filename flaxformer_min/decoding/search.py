"""The search for a translation, token by token (section 6.1).

A choice (see `choices`) is a pure function of ONE sentence: from its alive hypotheses and the
logits of their next tokens it decides which of them end now and how the others continue. One loop
calls the model, calls the choice, and keeps the best finished hypotheses, as long as an alive one
may beat them.

Finished hypotheses are kept apart from alive ones, so they never take a slot of the beam. A slot
without a hypothesis (hopeless, or a sample that has ended) has log-probability -inf.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from flaxformer_min.config_fields import plain
from flaxformer_min.decoding.checks import (
    check_begin,
    check_search,
    check_suppressed,
    check_vocabulary,
)
from flaxformer_min.decoding.choices import (
    Best,
    Choice,
    Sampling,
    check_sampling,
    choose_beam,
    choose_greedy,
    choose_random,
)
from flaxformer_min.runtime.generator import GENERATOR
from flaxformer_min.tokens import BOS, EOS, PAD

Cache = Any
"""The model's state: any pytree whose arrays have one row for each sentence."""

DecodeStep = Callable[
    [Int[Array, "batch beam"], Cache], tuple[Float[Array, "batch beam vocab"] | Best, Cache]
]
"""Read one token of each hypothesis; return float32 logits (or log-probabilities) of the next one
and the updated cache. For greedy decoding without scores the `Best` of the logits will do."""

Reorder = Callable[[Cache, Int[Array, "batch beam"]], Cache]
"""Return the cache in which hypothesis i of each sentence continues hypothesis `parents[i]`."""


NEVER_ENOUGH = 1 << 30  # more than the hypotheses that can ever end


class Prefix(NamedTuple):
    """How each sentence begins: with BOS alone, or with forced target tokens.

    last:     the first token to read: BOS, or the last forced token. Those before it are already
              in the cache.
    length:   the number of forced tokens, 0 for BOS alone. They count in every length.
    log_prob: of the forced tokens in nats; part of every score.
    """

    last: Int[Array, " batch"]
    length: Int[Array, " batch"]
    log_prob: Float[Array, " batch"]


def no_prefix(batch: int) -> Prefix:
    """Return the prefix of sentences that begin with BOS alone.

    >>> no_prefix(2).last
    Array([2, 2], dtype=int32)
    """
    none = jnp.zeros(batch, jnp.int32)
    return Prefix(jnp.full(batch, BOS, jnp.int32), none, jnp.zeros(batch, jnp.float32))


class Hypotheses(NamedTuple):
    """Finished hypotheses, best first.

    ids:      tokens after the prefix, ending in EOS; then PAD.
    log_prob: of prefix, tokens and EOS in nats; -inf (and ids all PAD) for an empty slot.
    score:    log_prob / length_penalty(length of prefix, tokens and EOS, alpha).

    A search without scores leaves other numbers in their place (see `Rules`).
    """

    ids: Int[Array, "*batch n_best length"]
    log_prob: Float[Array, "*batch n_best"]
    score: Float[Array, "*batch n_best"]


class Alive(NamedTuple):
    """The unfinished hypotheses of one sentence; log_prob is -inf for an empty slot."""

    token: Int[Array, " beam"]
    log_prob: Float[Array, " beam"]
    ids: Int[Array, "beam length"]


class Row(NamedTuple):
    """Constants of one sentence: forced tokens, most new tokens, the data of its random key."""

    prefix_length: Int[Array, ""]
    limit: Int[Array, ""]
    key: UInt32[Array, " words"] | None


class Progress(NamedTuple):
    """How far the search for one sentence has come.

    length: new tokens so far.
    ended:  how many hypotheses have ended so far, whether they were kept or not.
    """

    length: Int[Array, ""]
    ended: Int[Array, ""]
    alive: Alive
    finished: Hypotheses


class State(NamedTuple):
    """The search of a batch; all arrays have one row for each sentence."""

    rows: Row
    progress: Progress
    cache: Cache

    def is_alive(self) -> Bool[Array, " batch"]:
        """Return whether any hypothesis of a sentence is alive."""
        return (self.progress.alive.log_prob > -jnp.inf).any(axis=-1)


def length_penalty(length: Int[Array, "*batch"], alpha: float) -> Float[Array, "*batch"]:
    """Return the divisor of a log-probability that makes up for the length of the hypothesis.

    ((5 + length) / 6) ** alpha: Wu et al. 2016, equation 14; alpha is 0.6 in section 6.1.

    >>> length_penalty(jnp.array([1, 7, 13]), alpha=1.0)
    Array([1., 2., 3.], dtype=float32)
    """
    length = jnp.asarray(length, jnp.float32)
    return ((5.0 + length) / 6.0) ** alpha


def merge_finished(finished: Hypotheses, ended: Hypotheses) -> Hypotheses:
    """Return the best by score of both; an earlier finished hypothesis wins a tie."""
    if finished.score.size == ended.score.size == 1:  # a comparison takes a fraction of sorting
        return jax.tree.map(partial(jnp.where, ended.score > finished.score), ended, finished)
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new]), finished, ended)
    _, best = jax.lax.top_k(both.score, finished.score.size)
    return jax.tree.map(lambda column: column[best], both)


def advance(
    progress: Progress,
    logits: Float[Array, "beam vocab"] | Best,
    row: Row,
    *,
    choose: Callable[..., Choice],
    alpha: float,
    min_length: int,
    enough: int,
    suppressed: tuple[int, ...] = (),
    scored: bool = True,
) -> tuple[Progress, Int[Array, " next"] | None]:
    """Take one step of any search for one sentence; return its progress and `Choice.parent`.

    A hypothesis stays alive only while its bound, log_prob / length_penalty(longest possible
    length), is better than the worst finished score (-inf while fewer than n_best have finished).
    This loses nothing. A log-probability only falls and, with alpha >= 0, the penalty only grows
    with length, so (both at or below zero) no continuation has a score above the bound, and an
    earlier hypothesis wins a tie. Nor does it gain anything: the bound falls with log_prob alone,
    so the slot of a hopeless hypothesis could only be taken by a less likely one, hopeless as well.

    Once `enough` have ended, the score so far takes the place of the bound. What is worse by then
    could win only if further tokens cost less than the length penalty makes up for.
    """
    index, alive, finished = progress.length, progress.alive, progress.finished
    length = row.prefix_length + index + 1
    must_end = index + 1 >= row.limit
    may_end = must_end | (length > min_length)
    key = None
    if row.key is not None:
        key = jax.random.fold_in(jax.random.wrap_key_data(row.key, impl=GENERATOR), index)
    if scored:
        # Log-probabilities of the whole vocabulary would be written only to be read once.
        base = alive.log_prob - jax.nn.logsumexp(logits, axis=-1)
    else:
        base = jnp.where(alive.log_prob > -jnp.inf, 0.0, -jnp.inf)
    if suppressed and not isinstance(logits, Best):
        logits = logits.at[:, jnp.array(suppressed)].set(-jnp.inf)
    choice = choose(base, logits, may_end, must_end, key)
    score = choice.ended / length_penalty(length, alpha)
    ended = Hypotheses(alive.ids.at[:, index].set(EOS), choice.ended, score)
    finished = merge_finished(finished, ended)
    count = progress.ended + (choice.ended > -jnp.inf).sum(dtype=jnp.int32)
    reached = jnp.where(count < enough, row.prefix_length + row.limit, length)
    bound = choice.log_prob / length_penalty(reached, alpha)
    log_prob = jnp.where(bound > finished.score[-1], choice.log_prob, -jnp.inf)
    ids = alive.ids if choice.parent is None else alive.ids[choice.parent]
    alive = Alive(choice.token, log_prob, ids.at[:, index].set(choice.token))
    return Progress(index + 1, count, alive, finished), choice.parent


@dataclasses.dataclass(frozen=True)
class Rules:
    """How to search; the defaults are the paper's (section 6.1). `search` describes the fields.

    scores: whether log-probabilities and scores are needed. A single hypothesis competes with none,
            so it can do without, which saves the logsumexp of its logits.
    """

    beam_size: int = 4
    n_best: int = 1
    length_penalty: float = 0.6
    min_length: int = 0
    early_stopping: bool = True
    suppressed: tuple[int, ...] = ()
    sampling: Sampling | None = None
    scores: bool = True

    def __post_init__(self):
        """Raise ValueError for rules out of range or contradictory.

        Numbers of numpy become Python's: with x64 they would make all results float64.
        """
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        check_search(self.beam_size, self.n_best, self.length_penalty, self.min_length)
        check_suppressed(self.suppressed)
        check_sampling(self.sampling)

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are computed: several hypotheses are compared by them."""
        return self.scores or self.beam_size > 1

    @property
    def only_likeliest(self) -> bool:
        """Whether nothing counts but the likeliest token, as greedily without scores."""
        return not self.scored and self.sampling is None

    @property
    def competing(self) -> bool:
        """Whether hypotheses compete for slots, as neither greedily nor in sampling."""
        return self.beam_size > 1 and self.sampling is None


class Search:
    """A search by these rules: `begin`, and `step` while a sentence `is_alive`."""

    def __init__(self, decode_step: DecodeStep, reorder: Reorder, rules: Rules):
        """Take the functions of a model (see `search`)."""
        self.decode_step, self.reorder, self.rules = decode_step, reorder, rules
        self.advance = jax.vmap(
            partial(
                advance,
                choose=_choice(rules.beam_size, rules.sampling),
                alpha=rules.length_penalty,
                min_length=rules.min_length,
                enough=rules.beam_size if rules.early_stopping else NEVER_ENOUGH,
                suppressed=rules.suppressed,
                scored=rules.scored,
            )
        )

    def begin(
        self,
        cache: Cache,
        prefix: Prefix,
        max_length: Int[Array, " batch"],
        steps: int,
        key: Key[Array, " batch"] | None = None,
    ) -> State:
        """Return the state with the initial hypotheses. Arguments as for `search`."""
        rules = self.rules
        check_begin(steps, rules.sampling, key, prefix.last.shape[0])
        limit = jnp.clip(max_length - prefix.length, 1, steps)
        rows = Row(prefix.length, limit, None if key is None else jax.random.key_data(key))
        return State(rows, _begin(prefix, steps, rules), cache)

    def step(self, state: State) -> State:
        """Choose one more token for each hypothesis."""
        logits, cache = self.decode_step(state.progress.alive.token, state.cache)
        if not isinstance(logits, Best):
            check_vocabulary(logits.shape[-1], self.rules.suppressed)
        progress, parents = self.advance(state.progress, logits, state.rows)
        if parents is not None:
            cache = self.reorder(cache, parents)
        return State(state.rows, progress, cache)


def search(
    decode_step: DecodeStep,
    reorder: Reorder,
    cache: Cache,
    prefix: Prefix,
    max_length: Int[Array, " batch"],
    *,
    steps: int,
    beam_size: int,
    n_best: int = 1,
    length_penalty: float = 0.6,
    min_length: int = 0,
    early_stopping: bool = True,
    suppressed: tuple[int, ...] = (),
    sampling: Sampling | None = None,
    key: Key[Array, " batch"] | None = None,
) -> Hypotheses:
    """Return the best translations of each sentence. Call it inside a `jax.jit` of your own.

    `beam_size` 1 is greedy decoding; more is beam search. With `sampling`, `beam_size` samples are
    drawn with each sentence's own `key`; two may be equal, and their log_prob is the model's,
    untempered. The `n_best` best by score are returned. The result for a sentence depends neither
    on the other sentences of the batch nor on `steps`, if that is enough.

    cache:          with room for `steps` tokens of each hypothesis: the `capacity` of
                    `Transformer.prefill` is `beam_size * steps`.
    max_length:     most tokens of prefix, translation and EOS. The last one is EOS, at its own
                    log-probability, even if the prefix already has as many tokens.
    steps:          most new tokens of any sentence, EOS included: the size of the result.
    length_penalty: alpha of `length_penalty`.
    min_length:     least tokens of prefix and translation before EOS; max_length takes precedence.
    early_stopping: once `beam_size` hypotheses of a sentence have ended, go on with those alone
                    whose score so far is better; otherwise with all that can become better.
    suppressed:     ids of further tokens that are never chosen.

    PAD, UNK and BOS are never chosen either. The rest is not renormalised, so a log_prob is what
    teacher forcing gives the same tokens. NaN counts as -inf, and may affect its neighbours: a
    broken model finds nothing. Raises ValueError for contradictory settings.

    Greedy decoding takes the likelier "4" (0.6), half of which then ends. A beam of two finds that
    "5" (0.4) is sure to end:

    >>> table = jnp.zeros((6, 6)).at[BOS, 4].set(0.6).at[BOS, 5].set(0.4)
    >>> table = jnp.log(table.at[4, EOS].set(0.5).at[4, 4].set(0.5).at[5, EOS].set(1.0))
    >>> decode_step = lambda tokens, cache: (table[tokens], cache)
    >>> reorder = lambda cache, parents: cache
    >>> begin = decode_step, reorder, None, no_prefix(1), jnp.array([3])
    >>> for beam_size in (1, 2):
    ...     found = search(*begin, steps=3, beam_size=beam_size, length_penalty=0.0)
    ...     print(found.ids[0, 0], f"{jnp.exp(found.log_prob[0, 0]):.2f}")
    [4 3 0] 0.30
    [5 3 0] 0.40
    """
    rules = Rules(
        beam_size, n_best, length_penalty, min_length, early_stopping, suppressed, sampling
    )
    loop = Search(decode_step, reorder, rules)
    state = loop.begin(cache, prefix, max_length, steps, key)
    state = jax.lax.while_loop(lambda state: state.is_alive().any(), loop.step, state)
    return state.progress.finished


def _choice(beam_size: int, sampling: Sampling | None) -> Callable[..., Choice]:
    if sampling is not None:
        return partial(choose_random, sampling=sampling)
    return choose_greedy if beam_size == 1 else partial(choose_beam, beam_size=beam_size)


def _begin(prefix: Prefix, steps: int, rules: Rules) -> Progress:
    """Return the initial hypotheses, with nothing finished."""
    batch, beam, n_best = prefix.last.shape[0], rules.beam_size, rules.n_best
    token = jnp.broadcast_to(prefix.last[:, None], (batch, beam))
    log_prob = jnp.broadcast_to(prefix.log_prob[:, None], (batch, beam))
    if rules.competing:
        # One hypothesis is alive: the others would be its copies, and fill the beam with theirs.
        log_prob = log_prob.at[:, 1:].set(-jnp.inf)
    none, nothing = jnp.zeros(batch, jnp.int32), jnp.full((batch, n_best), -jnp.inf, jnp.float32)
    return Progress(
        none,
        none,
        Alive(token, log_prob, jnp.full((batch, beam, steps), PAD, jnp.int32)),
        Hypotheses(jnp.full((batch, n_best, steps), PAD, jnp.int32), nothing, nothing),
    )

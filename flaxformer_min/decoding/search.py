"""The search for translations, token by token (section 6.1): one loop for a batch of sentences.

    encode the sources, read the prefixes                                  `search`
    while more than half of the sentences are alive: take a step           `_step`
        the model reads the newest tokens                                  `decode_step`
        each sentence ends some hypotheses and extends the others          `advance`, `choices`
    keep the alive half, with twice the room in its cache, and go on;      `_halve`
    the last loop runs until no sentence is alive

Finished hypotheses are kept apart from live ones, so they never take a slot of the beam. A slot
without a hypothesis (hopeless, or a sample that has ended) has log-probability -inf.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from flaxformer_min.config import SearchConfig
from flaxformer_min.decoding.checks import check_begin, check_logits
from flaxformer_min.decoding.choices import Choice, choose_beam, choose_greedy, choose_random
from flaxformer_min.decoding.ensemble import EnsembleCache
from flaxformer_min.model.transformer import first_tokens
from flaxformer_min.system.generator import GENERATOR
from flaxformer_min.tokens import EOS, PAD, one_sentence_per_row

NEVER = 1 << 30
"""More hypotheses than can ever end: an exact search is never stopped by their number."""


class Hypotheses(NamedTuple):
    """Translations, best first.

    ids:         tokens after the prefix, ending in EOS; then PAD.
    log_prob:    of prefix, tokens and EOS in nats; -inf (and ids all PAD) for an empty slot.
    score:       log_prob / length_penalty(length of prefix, tokens and EOS, alpha).
    is_outgrown: whether the search for a sentence was given up, because its cache was full.
    """

    ids: Int[Array, "batch n_best length"]
    log_prob: Float[Array, "batch n_best"]
    score: Float[Array, "batch n_best"]
    is_outgrown: Bool[Array, " batch"]


class Finished(NamedTuple):
    """The best finished hypotheses of a sentence so far; fields as in `Hypotheses`."""

    ids: Int[Array, "*batch n_best length"]
    log_prob: Float[Array, "*batch n_best"]
    score: Float[Array, "*batch n_best"]


class LiveBeams(NamedTuple):
    """The unfinished hypotheses of one sentence; log_prob is -inf for an empty slot."""

    token: Int[Array, "*batch beam"]
    log_prob: Float[Array, "*batch beam"]
    ids: Int[Array, "*batch beam length"]


class Sentence(NamedTuple):
    """The search for one sentence.

    row:           its row in the batch of `search`.
    prefix_length: forced tokens.
    limit:         most new tokens, EOS included.
    key:           data of its random key; None without sampling.
    ended:         how many hypotheses have ended so far, whether they were kept or not.
    is_outgrown:   whether its cache has filled up.
    """

    row: Int[Array, "*batch"]
    prefix_length: Int[Array, "*batch"]
    limit: Int[Array, "*batch"]
    key: UInt32[Array, "*batch words"] | None
    ended: Int[Array, "*batch"]
    is_outgrown: Bool[Array, "*batch"]
    live: LiveBeams
    finished: Finished

    def is_alive(self) -> Bool[Array, "*batch"]:
        """Return whether any hypothesis is alive."""
        return (self.live.log_prob > -jnp.inf).any(axis=-1)


class State(NamedTuple):
    """The search of a batch after `step` new tokens; all arrays but `step` have a row a sentence.

    cross, cache: what the model reads besides the newest tokens.
    """

    step: Int[Array, ""]
    sentences: Sentence
    cross: Any
    cache: Any

    def count_alive(self) -> Int[Array, ""]:
        """Return how many sentences are not done."""
        return self.sentences.is_alive().sum(dtype=jnp.int32)


def length_penalty(length: Int[Array, "*batch"], alpha: float) -> Float[Array, "*batch"]:
    """Return the divisor of a log-probability that makes up for the length of the hypothesis.

    ((5 + length) / 6) ** alpha: Wu et al. 2016, equation 14; alpha is 0.6 in section 6.1.

    >>> length_penalty(jnp.array([1, 7, 13]), alpha=1.0)
    Array([1., 2., 3.], dtype=float32)
    """
    length = jnp.asarray(length, jnp.float32)
    return ((5.0 + length) / 6.0) ** alpha


def merge_finished(finished: Finished, ended: Finished) -> Finished:
    """Return the best by score of both; an earlier finished hypothesis wins a tie."""
    if finished.score.size == ended.score.size == 1:  # a comparison takes a fraction of sorting
        return jax.tree.map(partial(jnp.where, ended.score > finished.score), ended, finished)
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new]), finished, ended)
    _, best = jax.lax.top_k(both.score, finished.score.size)
    return jax.tree.map(lambda column: column[best], both)


def advance(
    sentence: Sentence,
    logits: Float[Array, "beam vocab"],
    step: Int[Array, ""],
    *,
    config: SearchConfig,
    scores: bool = True,
) -> tuple[Sentence, Int[Array, " beam"] | None]:
    """Take one step of any search for one sentence; return it and `Choice.parent`.

    A hypothesis stays alive only while its bound, log_prob / length_penalty(longest possible
    length), is better than the worst finished score (-inf while fewer than n_best have finished).
    This loses nothing. A log-probability is at most zero and only falls; with alpha >= 0, the
    penalty only grows with length. So no continuation has a score above the bound, and an earlier
    hypothesis wins a tie. It frees no slot for a better hypothesis, either: whatever took it would
    be less likely, so hopeless as well. But a sentence is done when no hypothesis is alive.

    With early stopping, once `beam_size` hypotheses have ended, the score so far takes the place of
    the bound. What is worse by then could win only if further tokens cost less than the length
    penalty makes up for.
    """
    live, finished, alpha = sentence.live, sentence.finished, config.length_penalty
    length = sentence.prefix_length + step + 1
    must_end = step + 1 >= sentence.limit
    may_end = must_end | (length > config.min_length)
    key = None
    if sentence.key is not None:
        key = jax.random.fold_in(jax.random.wrap_key_data(sentence.key, impl=GENERATOR), step)
    if scores or config.beam_size > 1:
        # Log-probabilities of the whole vocabulary would be written only to be read once.
        base = live.log_prob - jax.nn.logsumexp(logits, axis=-1)
    else:
        base = jnp.where(live.log_prob > -jnp.inf, 0.0, -jnp.inf)
    if config.suppressed:
        logits = logits.at[:, jnp.array(config.suppressed)].set(-jnp.inf)
    choice = _choice(config)(base, logits, may_end, must_end, key)
    score = choice.ended / length_penalty(length, alpha)
    ended = Finished(live.ids.at[:, step].set(EOS), choice.ended, score)
    finished = merge_finished(finished, ended)
    count = sentence.ended + (choice.ended > -jnp.inf).sum(dtype=jnp.int32)
    enough = config.beam_size if config.early_stopping else NEVER
    reached = jnp.where(count < enough, sentence.prefix_length + sentence.limit, length)
    bound = choice.log_prob / length_penalty(reached, alpha)
    log_prob = jnp.where(bound > finished.score[-1], choice.log_prob, -jnp.inf)
    ids = live.ids if choice.parent is None else live.ids[choice.parent]
    live = LiveBeams(choice.token, log_prob, ids.at[:, step].set(choice.token))
    return sentence._replace(ended=count, live=live, finished=finished), choice.parent


def _choice(config: SearchConfig) -> Callable[..., Choice]:
    if config.sample:
        return partial(choose_random, config=config)
    return partial(choose_greedy if config.beam_size == 1 else choose_beam, config=config)


def search(
    model: Any,
    params: Any,
    source: Int[Array, "batch source"],
    config: SearchConfig,
    *,
    max_length: Int[Array, " batch"] | None = None,
    prefix: Int[Array, "batch prefix"] | None = None,
    keys: Key[Array, " batch"] | None = None,
    steps: int | None = None,
    capacity: int | None = None,
    halvings: int = 0,
    scores: bool = True,
) -> Hypotheses:
    """Return translations of each source. Call it inside a `jax.jit`.

    `config` has the settings, of which the seed is replaced by `keys`. The result for a sentence
    depends neither on the others of the batch nor on its padding, nor on `steps`, `capacity` and
    `halvings`, if these give it room. Section 6.1.

    model:      a `Transformer`, or another model for decoding (docs/extending.md).
    source:     token ids that end in EOS, padded with PAD. Nothing is searched for a row of PAD.
    max_length: most tokens of prefix, translation and EOS; None: `config.max_extra_tokens` more
                than the source. The last one is EOS, at its own log-probability, even if the prefix
                already has as many tokens.
    prefix:     forced tokens of each translation, without BOS and EOS, padded with PAD.
    keys:       a random key of each sentence, for samples: `jax.random.split(key, batch)`, of
                `jax.random.key(seed, impl="threefry2x32")`.
    steps:      most new tokens of any sentence: the length of the result. None: always enough.
    capacity:   entries of the cache of each sentence, for the new tokens of all its hypotheses.
                None: as many as there can be. With fewer, look at `Hypotheses.is_outgrown`.
    halvings:   how often the batch is halved once half of its sentences are done; what is left
                has twice the capacity then. Compiling takes about as long again for each.
    scores:     False: a single hypothesis, which competes with none, goes without log-probabilities
                (log_prob and score are then NaN), which saves 8 % of a greedy search.

    PAD, UNK and BOS are never chosen. The rest is not renormalised, so a log_prob is what teacher
    forcing gives the same tokens. NaN counts as -inf, and may affect its neighbours: a broken model
    finds nothing. Raises ValueError for keys without samples, and the other way round.

    >>> from flaxformer_min.config import ModelConfig
    >>> from flaxformer_min.model.transformer import Transformer
    >>> from flaxformer_min.tokens import Batch
    >>> source = jnp.array([[5, 6, 3], [7, 3, 0]])
    >>> model = Transformer(ModelConfig(vocab_size=10, num_layers=1, d_model=8, d_ff=8))
    >>> params = model.init(jax.random.key(0), Batch(*(one_sentence_per_row(source),) * 2))
    >>> config = SearchConfig(beam_size=2, n_best=2, max_extra_tokens=1)
    >>> found = jax.jit(lambda params: search(model, params, source, config))(params["params"])
    >>> found.ids.shape, bool((found.score[:, 0] >= found.score[:, 1]).all())
    ((2, 2, 4), True)
    """
    apply = partial(model.apply, {"params": params})
    if prefix is None:
        prefix = jnp.zeros((source.shape[0], 0), jnp.int32)
    if steps is None:
        steps = source.shape[1] + config.max_extra_tokens
    check_begin(config, keys, source.shape[0], steps)
    if max_length is None:
        max_length = (source != PAD).sum(1, dtype=jnp.int32) + config.max_extra_tokens
    room = steps * config.beam_size
    capacity = room if capacity is None else min(capacity, room)
    cross, cache, log_probs = _prefill(apply, source, prefix, capacity, config)
    if not _can_fill(cache):
        cache, capacity = cache.resize(prefix.shape[1] + room), room
    sentences = _first_sentences(source, prefix, log_probs.sum(1), keys, max_length, steps, config)
    state = State(jnp.int32(0), sentences, cross, cache)
    found = Hypotheses(*sentences.finished, sentences.is_outgrown)
    for halving in range(halvings + 1):
        rest = 0 if halving == halvings else state.sentences.row.shape[0] // 2
        step = partial(_step, apply, config, scores, capacity < room)
        state = jax.lax.while_loop(lambda now, rest=rest: now.count_alive() > rest, step, state)
        found = _record(found, state.sentences)
        if rest:
            capacity = min(2 * capacity, room)
            state = _halve(state, rest, prefix.shape[1] + capacity)
    return found if scores or config.beam_size > 1 else _without_scores(found)


def _without_scores(found: Hypotheses) -> Hypotheses:
    """Return hypotheses with NaN in place of numbers that are no scores."""
    nothing = jnp.where(found.log_prob > -jnp.inf, jnp.nan, -jnp.inf)
    return found._replace(log_prob=nothing, score=nothing)


def _prefill(
    apply: Callable[..., Any],
    source: Int[Array, "batch source"],
    prefix: Int[Array, "batch prefix"],
    capacity: int,
    config: SearchConfig,
) -> tuple[Any, Any, Float[Array, "batch prefix"]]:
    """Return what the model reads in each step, and the log-probabilities of the prefix."""
    tokens = one_sentence_per_row(source)
    cross = apply(apply(tokens, method="encode"), tokens, method="precompute_cross_attention")
    cache, log_probs = apply(cross, config.beam_size, capacity, prefix, method="prefill")
    return cross, cache, log_probs


def _can_fill(cache: Any) -> bool:
    """Return whether a cache knows when it is full; another needs all the room from the start."""
    caches = cache if isinstance(cache, EnsembleCache) else (cache,)
    return all(hasattr(each, "is_full") for each in caches)


def _first_sentences(
    source: Int[Array, "batch source"],
    prefix: Int[Array, "batch prefix"],
    log_prob: Float[Array, " batch"],
    keys: Key[Array, " batch"] | None,
    max_length: Int[Array, " batch"],
    steps: int,
    config: SearchConfig,
) -> Sentence:
    """Return the sentences after their prefixes, with nothing finished."""
    batch, beam, n_best = source.shape[0], config.beam_size, config.n_best
    slots = jnp.arange(beam, dtype=jnp.int32)[None, :]
    # Without samples one hypothesis is alive: others would be its copies, and fill the beam.
    is_alive = (source != PAD).any(1)[:, None] & (config.sample | (slots == 0))
    token = jnp.broadcast_to(first_tokens(prefix)[:, None], (batch, beam))
    nothing = jnp.full((batch, n_best), -jnp.inf, jnp.float32)
    length = (prefix != PAD).sum(1, dtype=jnp.int32)
    return Sentence(
        row=jnp.arange(batch, dtype=jnp.int32),
        prefix_length=length,
        limit=jnp.clip(max_length - length, 1, steps),
        key=None if keys is None else jax.random.key_data(keys),
        ended=jnp.zeros(batch, jnp.int32),
        is_outgrown=jnp.zeros(batch, bool),
        live=LiveBeams(
            token,
            jnp.where(is_alive, log_prob[:, None], -jnp.inf),
            jnp.full((batch, beam, steps), PAD, jnp.int32),
        ),
        finished=Finished(jnp.full((batch, n_best, steps), PAD, jnp.int32), nothing, nothing),
    )


def _step(
    apply: Callable[..., Any], config: SearchConfig, scores: bool, may_outgrow: bool, state: State
) -> State:
    """Choose one more token for each hypothesis."""
    logits, cache = apply(
        state.sentences.live.token, state.cross, state.cache, method="decode_step"
    )
    check_logits(logits.shape[-1], config.suppressed)
    batched_advance = jax.vmap(partial(advance, config=config, scores=scores), in_axes=(0, 0, None))
    sentences, parents = batched_advance(state.sentences, logits, state.step)
    if parents is not None:
        cache = cache.reorder(parents)
    if may_outgrow:
        sentences = _give_up(sentences, cache.is_full())
    return State(state.step + 1, sentences, state.cross, cache)


def _give_up(sentences: Sentence, is_full: Bool[Array, " batch"]) -> Sentence:
    """Return the sentences; alive ones with a full cache are ended."""
    outgrown = sentences.is_alive() & is_full
    live = sentences.live
    log_prob = jnp.where(outgrown[:, None], -jnp.inf, live.log_prob)
    return sentences._replace(
        is_outgrown=sentences.is_outgrown | outgrown, live=live._replace(log_prob=log_prob)
    )


def _record(found: Hypotheses, sentences: Sentence) -> Hypotheses:
    """Return `found`, updated with what these sentences have found so far."""
    new = Hypotheses(*sentences.finished, sentences.is_outgrown)
    return jax.tree.map(
        lambda old, new: old.at[sentences.row].set(new, unique_indices=True), found, new
    )


def _halve(state: State, rows: int, entries: int) -> State:
    """Return the search of the sentences that are alive, in this many rows."""
    kept = jnp.argsort(~state.sentences.is_alive(), stable=True)[:rows]
    sentences, cross, cache = jax.tree.map(lambda leaf: leaf[kept], state[1:])
    return State(state.step, sentences, cross, cache.resize(entries))

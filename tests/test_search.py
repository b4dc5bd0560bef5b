"""The search against brute force, plain Python and hand arithmetic, on random tables as models."""

import inspect
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import slow_search

from flaxformer_min.config import SearchConfig
from flaxformer_min.decoding.choices import choose_greedy, nucleus, sample_token, top_k_tokens
from flaxformer_min.decoding.search import Finished, merge_finished, search
from flaxformer_min.kernels.backend import compiling_for
from flaxformer_min.tokens import BOS, EOS, PAD, UNK

STATES = 997
"""The state of a model is a number computed from ALL tokens so far. It selects the row of the table
that predicts the next token, so a hypothesis that continues the wrong history gets wrong numbers.
"""

BATCH, VOCAB, STEPS = 8, 9, 12
"""Shapes of most searches below. They share compiled programs, which take most of the time."""

SETTINGS = {"beam_size": 1, "early_stopping": False, "sampling": None}
"""Besides the defaults of `SearchConfig`."""


def Sampling(temperature=1.0, **others):
    """The settings of a search for samples."""
    return {"sample": True, "temperature": temperature, **others}


def random_table(vocab=VOCAB, seed=0, spread=2.0):
    return log_softmax(np.random.default_rng(seed).normal(0, spread, (STATES, vocab)))


def log_softmax(logits):
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


def next_state(state, token):
    return (state * 31 + token * 7 + 1) % STATES


BATCHES = []
"""Sentences in each step of all searches so far."""


class States(NamedTuple):
    """The cache of `TableModel`: the state of each hypothesis, and entries that it fills."""

    states: jax.Array
    used: jax.Array
    entries: jax.Array

    def reorder(self, parents):
        return self._replace(states=jnp.take_along_axis(self.states, parents, 1))

    def resize(self, entries):
        return self._replace(entries=jnp.zeros((len(self.states), entries)))

    def is_full(self):
        return self.used + self.states.shape[1] > self.entries.shape[1]


class TableModel:
    """A model for decoding whose parameters are a table; a source is its seed and one."""

    def apply(self, variables, *args, method):
        return getattr(self, method)(variables["params"], *args)

    def encode(self, table, source):
        return source.ids[:, 0] - 1

    def precompute_cross_attention(self, table, encoded, source):
        return encoded

    def prefill(self, table, seeds, beam_size, capacity, prefix):
        states, newest, log_probs = seeds, jnp.full(len(seeds), BOS), []
        for token in prefix.T:
            after = next_state(states, newest)
            log_probs.append(jnp.where(token != PAD, table[after, token], 0.0))
            states = jnp.where(token != PAD, after, states)
            newest = jnp.where(token != PAD, token, newest)
        states = jnp.repeat(states[:, None], beam_size, axis=1)
        cache = States(states, jnp.zeros_like(seeds), jnp.zeros((len(seeds), 0)))
        cache = cache.resize(prefix.shape[1] + capacity)
        return cache, jnp.stack(log_probs, 1) if log_probs else jnp.zeros(prefix.shape)

    def decode_step(self, table, tokens, seeds, cache):
        jax.debug.callback(partial(BATCHES.append, len(tokens)))
        states = next_state(cache.states, tokens)
        used = cache.used + tokens.shape[1]
        return table[states], cache._replace(states=states, used=used)


def slow_model(table, seed, first=BOS):
    """The same for `slow_search`, recomputed from the whole history each time."""
    rows = np.asarray(table).tolist()

    def model(history):
        state = seed
        for token in (first, *history):
            state = next_state(state, token)
        return rows[state]

    return model


@partial(jax.jit, static_argnames=("config", "steps", "halvings", "capacity"))
def run(table, source, max_length, keys, prefix, *, config, **sizes):
    given = {"max_length": max_length, "keys": keys, "prefix": prefix}
    return search(TableModel(), table, source, config, **given, **sizes)


def find(
    table,
    seeds,
    max_length,
    *,
    prefix=None,
    key=None,
    batch=BATCH,
    steps=STEPS,
    halvings=1,
    capacity=None,
    **settings,
):
    """`search` for one sentence per seed, in batches of `batch`; rows of PAD fill up the last.

    `key` has one key for each sentence of the batch.
    """
    if batch < len(seeds):
        assert prefix is key is None
        parts = [slice(start, start + batch) for start in range(0, len(seeds), batch)]
        found = [find(table, seeds[each], max_length[each], **settings) for each in parts]
        return jax.tree.map(lambda *columns: np.concatenate(columns), *found)
    more = batch - len(seeds)
    source = np.array([*(seed + 1 for seed in seeds), *[PAD] * more], np.int32)[:, None]
    max_length = np.array([*max_length, *[1] * more], np.int32)
    if prefix is not None:
        prefix = np.concatenate([prefix, np.zeros((more, prefix.shape[1]), np.int32)])
    settings = {**SETTINGS, **settings}
    config = SearchConfig(**(settings.pop("sampling") or {}), **settings)
    sizes = {"steps": steps, "halvings": halvings, "capacity": capacity}
    found = run(table, source, max_length, key, prefix, config=config, **sizes)
    return jax.tree.map(lambda column: np.asarray(column)[: batch - more], found)


def listed(found, row):
    """The hypotheses of a sentence as `slow_search` writes them."""
    ids, log_prob, score, _ = (column[row] for column in found)
    lists = [tuple(line[: line.index(EOS) + 1]) for line in ids.tolist() if EOS in line]
    for line, tokens in zip(ids.tolist(), lists, strict=False):
        assert set(line[len(tokens) :]) <= {PAD}
    return lists, log_prob[: len(lists)], score[: len(lists)]


def assert_same(found, row, expected):
    ids, log_prob, score = listed(found, row)
    assert ids == [tokens for tokens, _, _ in expected]
    np.testing.assert_allclose(log_prob, [value for _, value, _ in expected], atol=1e-5)
    np.testing.assert_allclose(score, [value for _, _, value in expected], atol=1e-5)


def table_of(*row):
    """The same probabilities after any history, for hand arithmetic; other tokens have 0."""
    row = np.pad(np.array(row, np.float32), (0, VOCAB - len(row)))
    with np.errstate(divide="ignore"):
        return np.log(np.broadcast_to(row, (STATES, VOCAB)))


def keys(seed, count=BATCH):
    return jax.random.split(jax.random.key(seed), count)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def test_a_beam_as_wide_as_the_space_finds_the_best_of_all_sentences():
    """Four words at five positions: 341 sentences, tried one by one; the best ten, in order."""
    table = random_table(vocab=8)
    settings = {"beam_size": 256, "n_best": 10, "length_penalty": 0.6, "steps": 5, "batch": 2}
    found = find(table, [5, 11], [5, 5], **settings)
    for row, seed in enumerate([5, 11]):
        everything = slow_search.every_sentence(slow_model(table, seed), 5, alpha=0.6)
        assert len(everything) == 341
        assert_same(found, row, everything[:10])


@pytest.mark.parametrize(
    "alpha, beam_size, n_best, min_length, vocab",
    [
        (0.0, 2, 2, 0, 9),
        (0.6, 3, 1, 2, 9),
        slow(1.0, 5, 4, 2, 139),
    ],
)
def test_a_narrow_beam_is_the_one_in_plain_python(alpha, beam_size, n_best, min_length, vocab):
    """Hypothesis by hypothesis. The slow one never stops early: so the stop rule loses nothing."""
    table, seeds, max_length = random_table(vocab, spread=3.0), list(range(8)), [12, 7, 1, 9] * 2
    settings = {"beam_size": beam_size, "n_best": n_best, "min_length": min_length}
    found = find(table, seeds, max_length, length_penalty=alpha, **settings)
    for row, seed in enumerate(seeds):
        settings["max_length"] = max_length[row]
        expected = slow_search.beam(slow_model(table, seed), alpha=alpha, **settings)
        assert_same(found, row, expected)


def test_suppressed_tokens_are_passed_over_and_the_others_keep_their_probability():
    """As in plain Python. Without suppression each of the two tokens does come out."""
    table, seeds, suppressed = random_table(spread=3.0), range(8), (5, 7)
    beam, greedy = ({"beam_size": size, "n_best": n} for size, n in ((3, 2), (1, 1)))
    for settings in (beam, greedy):
        assert set(suppressed) <= set(find(table, seeds, [12] * 8, **settings).ids.ravel().tolist())
    found, one = (
        find(table, seeds, [12] * 8, suppressed=suppressed, **each) for each in (beam, greedy)
    )
    for row, seed in enumerate(seeds):
        model, limits = slow_model(table, seed), {"max_length": 12, "suppressed": suppressed}
        assert_same(found, row, slow_search.beam(model, alpha=0.6, **limits, **beam))
        ids = slow_search.greedy(model, **limits)
        assert listed(one, row)[0] == [ids]
        np.testing.assert_allclose(one.log_prob[row], slow_search.forced(model, ids), atol=1e-5)


def test_early_stopping_ends_what_is_worse_once_as_many_as_the_beam_have_ended():
    """As in plain Python. In some sentence the exact search goes on, and finds better."""
    table, seeds, max_length = random_table(spread=1.5), range(8), [12, 7, 9, 12, 3, 12, 10, 11]
    settings = {"beam_size": 3, "n_best": 2}
    early, exact = (
        find(table, seeds, max_length, early_stopping=stops, length_penalty=3.0, **settings)
        for stops in (True, False)
    )
    for row, seed in enumerate(seeds):
        limits = {"max_length": max_length[row], "enough": 3}
        expected = slow_search.beam(slow_model(table, seed), alpha=3.0, **limits, **settings)
        assert_same(early, row, expected)
    assert (exact.score > early.score).any()


def test_logits_count_as_the_log_probabilities_they_stand_for():
    """A constant added to all logits of a step is no preference."""
    table, settings = random_table(), {"beam_size": 3, "n_best": 3}
    found, expected = (find(t, [0, 5], [9, 9], **settings) for t in (table + 50, table))
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.score, expected.score, atol=1e-4)


def test_a_beam_of_one_takes_the_likeliest_token_until_it_is_eos():
    table, seeds = random_table(), list(range(8))
    found = find(table, seeds, [9] * 8, min_length=3)
    for row, seed in enumerate(seeds):
        expected = slow_search.greedy(slow_model(table, seed), max_length=9, min_length=3)
        assert listed(found, row)[0] == [expected]


@pytest.mark.parametrize(
    "sampling", [Sampling(top_k=1), slow(Sampling(temperature=1e-4)), slow(Sampling(top_p=1e-6))]
)
def test_sampling_from_the_likeliest_alone_is_greedy(sampling):
    table, seeds = random_table(), list(range(8))
    found = find(table, seeds, [9] * 8, min_length=3)
    sampled = find(table, seeds, [9] * 8, min_length=3, sampling=sampling, key=keys(0))
    np.testing.assert_array_equal(sampled.ids, found.ids)
    np.testing.assert_allclose(sampled.score, found.score, atol=1e-5)


@pytest.mark.parametrize(
    "beam, vocab, platform",
    [
        *[(4, vocab, "cpu") for vocab in (5, 41, 64, 80, 197)],
        (4, 300, "tpu"),
        *[slow(1, 197, "cpu"), slow(4, 5, "tpu"), slow(4, 128, "tpu")],
    ],
)
def test_the_top_k_tokens_are_those_of_a_full_top_k(vocab, beam, platform):
    """Whole numbers tie all the time; the lower parent wins, then the lower token."""
    # A new function each time: shapes of one that was traced before are cached.
    top_k = jax.jit(lambda *arrays: top_k_tokens(*arrays, beam))
    for seed in range(10):
        random = np.random.default_rng(seed)
        log_probs = jnp.asarray(-random.integers(0, 30, (beam, vocab)), jnp.float32)
        log_prob = jnp.asarray(-random.integers(0, 3, beam), jnp.float32)
        sums = (log_prob[:, None] + log_probs[:, 4:]).reshape(-1)
        order = np.argsort(-np.asarray(sums), kind="stable")[:beam]
        with compiling_for([SimpleNamespace(platform=platform)]):
            best, parent, token = top_k(log_prob, log_probs)
        np.testing.assert_array_equal(best, sums[order])
        np.testing.assert_array_equal(parent, order // (vocab - 4))
        np.testing.assert_array_equal(token, 4 + order % (vocab - 4))


def test_where_there_are_fewer_words_than_asked_for_the_rest_is_impossible():
    """One hypothesis and two words besides the four special tokens."""
    logits = jnp.log(jnp.array([[0.25, 0.25, 0.125, 0.125, 0.0625, 0.1875]]))
    best, parent, token = jax.jit(top_k_tokens, static_argnums=2)(jnp.zeros(1), logits, 70)
    np.testing.assert_allclose(best[:2], np.log([0.1875, 0.0625]), rtol=1e-6)
    assert (best[2:] == -jnp.inf).all() and parent.tolist() == [0] * 70
    assert token.tolist() == [5, 4] + [PAD] * 68


@pytest.mark.parametrize(
    "n_best, alpha, early, steps",
    [
        slow(1, 0.0, False, 1),  # EOS at once has 0.9, what is alive 0.05
        (2, 0.0, False, 2),  # a word and EOS have 0.045, what is alive 0.0025
        # ln 0.045 / (7 / 6) = -2.66 beats n ln 0.05 / (17 / 6) = -1.06 n from n = 3,
        (2, 1.0, False, 3),
        # and 2 ln 0.05 / (7 / 6) = -5.14.
        (2, 1.0, True, 2),
    ],
)
def test_the_search_stops_when_nothing_alive_can_be_better(n_best, alpha, early, steps):
    """At every step EOS has probability 0.9 and two words 0.05 each; 12 tokens are allowed."""
    table = table_of(0, 0, 0, 0.9, 0.05, 0.05)
    settings = {"beam_size": 2, "n_best": n_best, "length_penalty": alpha, "early_stopping": early}
    jax.effects_barrier()
    BATCHES.clear()
    find(table, [0, 1], [12, 12], **settings)
    jax.effects_barrier()
    assert len(BATCHES) == steps


WIDE = {"beam_size": 8, "n_best": 8}


def test_a_sentence_depends_on_nothing_but_itself():
    table, seeds, max_length = random_table(), [3, 4, 5, 6], [6, 9, 4, 8]
    sampling = Sampling(top_k=3, top_p=0.7)
    for settings, key in ((WIDE, None), ({"sampling": sampling, **WIDE}, keys(1))):
        together = find(table, seeds, max_length, key=key, **settings)
        for row in range(4):
            one = slice(row, row + 1)
            own = {"key": None if key is None else key[one], "batch": 1, "steps": 20}
            alone = find(table, seeds[one], max_length[one], **own, **settings)
            np.testing.assert_array_equal(alone.ids[0, :, :STEPS], together.ids[row])
            np.testing.assert_array_equal(alone.ids[0, :, STEPS:], PAD)
            np.testing.assert_array_equal(alone.score[0], together.score[row])


LONG = {"beam_size": 3, "n_best": 3, "min_length": 5, "length_penalty": 1.0}


@pytest.mark.parametrize("sampling", [None, Sampling(2.0)])
def test_a_log_prob_is_what_teacher_forcing_gives(sampling):
    """Untempered, EOS included, even if the longest length forced it; the score follows."""
    table, seeds = random_table(), [1, 2, 3]
    key = None if sampling is None else keys(2)
    found = find(table, seeds, [7, 7, 7], sampling=sampling, key=key, **LONG)
    for row, seed in enumerate(seeds):
        ids, log_prob, score = listed(found, row)
        assert len(ids) == 3 and all(6 <= len(tokens) <= 7 for tokens in ids)
        expected = [slow_search.forced(slow_model(table, seed), tokens) for tokens in ids]
        np.testing.assert_allclose(log_prob, expected, atol=1e-5)
        lengths = np.array([len(tokens) for tokens in ids])
        np.testing.assert_allclose(score, log_prob / ((5 + lengths) / 6), atol=1e-5)
        assert (np.diff(score) <= 0).all()


def test_a_forced_prefix_counts_in_length_and_score():
    """One of three tokens, one of one and none: the rest is searched as if after them."""
    table, seeds = random_table(), [8, 9, 10]
    prefix = np.array([[6, 4, 7], [5, 0, 0], [0, 0, 0]], np.int32)
    found = find(table, seeds, [9] * 3, prefix=prefix, **LONG)
    for row, (seed, forced) in enumerate(zip(seeds, [(6, 4, 7), (5,), ()], strict=True)):
        model = slow_model(table, seed)
        given = len(forced), slow_search.forced(model, forced)
        expected = slow_search.beam(
            lambda history, model=model, forced=forced: model((*forced, *history)),
            prefix=given,
            **{"beam_size": 3, "n_best": 3, "min_length": 5, "alpha": 1.0, "max_length": 9},
        )
        assert_same(found, row, expected)
        assert all(len(forced) + len(tokens) <= 9 for tokens, _, _ in expected)


@pytest.mark.parametrize("length, max_length", [(0, 1), (4, 5), (4, 4), (4, 2)])
def test_where_nothing_else_fits_the_end_is_forced(length, max_length):
    """EOS alone, at its own log-probability; there are no other hypotheses."""
    table = table_of(0, 0, 0, 0.25, 0.5, 0.25)
    prefix = np.full((1, length), 4, np.int32)
    found = find(table, [0], [max_length], prefix=prefix if length else None, **LONG)
    np.testing.assert_array_equal(found.ids[0, :, 0], [EOS, PAD, PAD])
    np.testing.assert_array_equal(found.ids[0, :, 1:], PAD)
    expected = [[np.log(0.25) + length * np.log(0.5), -np.inf, -np.inf]]
    np.testing.assert_allclose(found.log_prob, expected, rtol=1e-6)
    assert (found.score[0, 1:] == -np.inf).all()


def test_a_sentence_whose_cache_fills_up_is_reported_and_the_others_lose_nothing():
    """A beam of two fills two entries a step; what is left of a batch has twice as many."""
    table, seeds = random_table(spread=3.0), list(range(8))
    max_length, settings = [3, 12, 1, 12, 2, 12, 4, 12], {"beam_size": 2, "n_best": 2}
    whole = find(table, seeds, max_length, **settings)
    found = find(table, seeds, max_length, capacity=6, halvings=2, **settings)
    assert found.is_outgrown.any() and not found.is_outgrown.all()
    for row in np.flatnonzero(~found.is_outgrown):
        np.testing.assert_array_equal(found.ids[row], whole.ids[row])
        np.testing.assert_array_equal(found.score[row], whole.score[row])
    assert not find(table, seeds, max_length, capacity=24, **settings).is_outgrown.any()


def test_a_batch_is_halved_when_half_of_its_sentences_are_done():
    """Of eight sentences two are left after two steps, and one after six; the batch follows."""
    table = table_of(0, 0, 0, 0, 1)
    jax.effects_barrier()
    BATCHES.clear()
    find(table, list(range(8)), [2, 2, 2, 2, 2, 2, 6, 9], halvings=3)
    jax.effects_barrier()
    assert BATCHES == [8] * 2 + [2] * 4 + [1] * 3


SAMPLINGS = [None, Sampling(top_k=3, top_p=0.7)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_special_tokens_never_come_out(sampling):
    """PAD, UNK and BOS have nine tenths of the probability, and are not chosen."""
    table = table_of(0.3, 0.3, 0.3, 0.05, 0.03, 0.02)
    key = None if sampling is None else keys(3)
    found = find(table, [0, 1], [4, 4], key=key, sampling=sampling, **WIDE)
    for row in range(2):
        ids, _, _ = listed(found, row)
        assert len(ids) == 8
        assert not {PAD, UNK, BOS} & {token for tokens in ids for token in tokens}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("nothing", [-jnp.inf, jnp.nan])
def test_a_model_that_offers_nothing_finds_nothing(sampling, nothing):
    table = random_table()
    table[next_state(0, BOS)] = nothing
    key = None if sampling is None else keys(4)
    found = find(table, [0, 1], [6, 6], sampling=sampling, key=key, **WIDE)
    np.testing.assert_array_equal(found.ids[0], PAD)
    np.testing.assert_array_equal(found.score[0], -jnp.inf)
    assert len(listed(found, 1)[0]) == 8


def test_a_hypothesis_that_is_not_a_number_takes_no_slot_of_the_beam():
    """NaN after the likeliest word: the others of its beam continue as if it were -inf."""
    table, first, found = random_table(), next_state(0, BOS), []
    table[:, EOS] -= 9
    after = next_state(first, 4 + int(table[first, 4:].argmax()))
    for value in (np.nan, -np.inf):
        table[after] = value
        found.append(find(table, [0], [7], beam_size=3, n_best=3))
    broken, without = found
    np.testing.assert_array_equal(broken.ids, without.ids)
    np.testing.assert_array_equal(broken.score, without.score)
    assert len(listed(without, 0)[0]) == 3


def test_a_greedy_choice_does_not_depend_on_what_came_before_it():
    """A float32 near -100,000 is a multiple of 1/128: both sums round to the same."""
    logits = jnp.zeros((1, VOCAB)).at[0, 5].set(1.0).at[0, 7].set(1.001)
    before = jnp.array([-100_000.0])
    assert before + logits[0, 5] == before + logits[0, 7]
    choice = choose_greedy(
        before, logits, jnp.array(True), jnp.array(False), config=SearchConfig(beam_size=1)
    )
    assert (choice.token, choice.ended, choice.log_prob) == (7, -jnp.inf, before + 1.001)


PROBABILITIES = [0.0, 0.05, 0.2, 0.1, 0.4, 0.25]


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (Sampling(), [0, 0.05, 0.2, 0.1, 0.4, 0.25]),
        (Sampling(temperature=0.5), [0, 0.0025, 0.04, 0.01, 0.16, 0.0625]),
        (Sampling(top_k=3), [0, 0, 0.2, 0, 0.4, 0.25]),
        (Sampling(top_p=0.66), [0, 0, 0.2, 0, 0.4, 0.25]),
        (Sampling(top_k=3, top_p=0.5), [0, 0, 0, 0, 0.4, 0.25]),
        slow(Sampling(temperature=0.5, top_p=0.6), [0, 0, 0, 0, 0.16, 0.0625]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should(sampling, expected):
    """10,000 draws; chi-square with at most four degrees of freedom is above 25 once in 20,000."""
    count = 10_000
    log_probs = jnp.log(jnp.array(PROBABILITIES))
    draw = jax.jit(jax.vmap(partial(sample_token, log_probs, config=SearchConfig(**sampling))))
    drawn = draw(keys(0, count))
    often = np.bincount(drawn, minlength=6)
    expected = count * np.array(expected) / sum(expected)
    np.testing.assert_array_equal(often > 0, expected > 0)
    drawable = expected > 0
    assert ((often - expected)[drawable] ** 2 / expected[drawable]).sum() < 25


# Without these tests' own check of types, so that one program serves every top_p.
any_nucleus = jax.jit(inspect.unwrap(nucleus))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
def test_the_nucleus_is_the_shortest_sorted_list_that_has_enough(top_p):
    for size, spread in [(1, 1.0), (7, 3.0), (100, 0.3), (1000, 4.0)]:
        share = np.exp(log_softmax(np.random.default_rng(size).normal(0, spread, size)))
        order = np.argsort(-share)
        enough = 1 + np.searchsorted(np.cumsum(share.astype(np.float64)[order]), top_p)
        assert set(np.flatnonzero(any_nucleus(share, top_p))) == set(order[:enough])


def test_every_sample_of_a_sentence_is_drawn_on_its_own():
    """Two words at four positions: the samples differ within a sentence and between sentences."""
    table = table_of(0, 0, 0, 0.2, 0.4, 0.4)
    found = find(table, list(range(8)), [5] * 8, sampling=Sampling(), key=keys(5), **WIDE)
    samples = [listed(found, row)[0] for row in range(8)]
    assert all(len(set(ids)) > 3 for ids in samples)
    assert len({tuple(ids) for ids in samples}) == 8
    together = [ids for of_row in samples for ids in of_row]
    assert len(set(together)) > 15
    # 0.2 end at once: 12.8 of 64, with a standard deviation of 3.2.
    assert 3 <= together.count((EOS,)) <= 23


@pytest.mark.parametrize(
    "vocab, steps, message",
    [
        (VOCAB, 0, "steps must be at least 1, for EOS; got 0"),
        (4, 3, "more than the special tokens, which are 4; got 4"),
    ],
)
def test_a_search_that_can_find_nothing_is_refused(vocab, steps, message):
    with pytest.raises(ValueError, match=message):
        find(random_table(vocab), [0], [3], steps=steps)


def test_a_greedy_search_without_scores_finds_the_same():
    table, source = random_table(), np.arange(1, 9, dtype=np.int32)[:, None]
    config = SearchConfig(beam_size=1, max_extra_tokens=9)
    both = [
        jax.jit(partial(search, TableModel(), config=config, scores=scores))(table, source)
        for scores in (True, False)
    ]
    np.testing.assert_array_equal(both[0].ids, both[1].ids)
    assert np.isnan(both[1].log_prob).all() and np.isnan(both[1].score).all()


@pytest.fixture
def types_are_not_checked():
    """As a user has it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("types_are_not_checked")
@pytest.mark.parametrize(
    "key, got",
    [
        (jax.random.key(0), r"\(2,\)"),
        (keys(0, BATCH + 1), rf"\({BATCH + 1}, 2\)"),
        (jax.random.split(jax.random.key(0, impl="rbg"), BATCH), rf"\({BATCH}, 4\)"),
    ],
)
def test_sampling_needs_a_key_of_threefry_for_each_sentence(key, got):
    table, options = random_table(), {"sampling": Sampling(), "key": key}
    with pytest.raises(ValueError, match=rf"a key for .*threefry.*; got .* {got} for {BATCH} sent"):
        find(table, list(range(BATCH)), [3] * BATCH, **options)


def test_what_is_suppressed_is_in_the_vocabulary_of_the_model():
    table = random_table(12)
    find(table, [0], [3], suppressed=(11,))
    for suppressed in ((12,), (5, 50)):
        with pytest.raises(ValueError, match="must be ids of the vocabulary, which has 12; got"):
            find(table, [0], [3], suppressed=suppressed)


@pytest.mark.parametrize(
    "scores, winner", [((-2.0, -1.0), 1), ((-1.0, -2.0), 0), ((-1.0, -1.0), 0), ((-np.inf, -1), 1)]
)
def test_of_two_finished_hypotheses_the_better_stays_and_the_earlier_if_they_tie(scores, winner):
    both = [
        Finished(jnp.full((1, 3), number), jnp.array([score]), jnp.array([score]))
        for number, score in enumerate(scores)
    ]
    best = merge_finished(*both)
    assert best.ids.tolist() == [[winner] * 3]
    assert best.score.tolist() == best.log_prob.tolist() == [scores[winner]]

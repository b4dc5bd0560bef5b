"""The search against brute force, plain Python and hand arithmetic, on random tables as models."""

from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_search

from flaxformer_min.decoding.choices import Sampling, draw, nucleus, top_k_tokens
from flaxformer_min.decoding.search import Prefix, no_prefix, search
from flaxformer_min.tokens import BOS, EOS, PAD, UNK

STATES = 997
"""A model's state is a number made from ALL tokens so far, and its row of the table says what comes
next: a hypothesis that continues the wrong history gets the wrong numbers."""


def random_table(vocab, seed=0, spread=2.0):
    logits = np.random.default_rng(seed).normal(0, spread, (STATES, vocab)).astype(np.float32)
    return jax.nn.log_softmax(jnp.asarray(logits))


def next_state(state, token):
    return (state * 31 + token * 7 + 1) % STATES


def fast_model(table, called=None):
    """`step` and `reorder`; the cache holds each hypothesis' state."""

    def step(tokens, states):
        if called is not None:
            jax.debug.callback(partial(called, len(tokens)))
        states = next_state(states, tokens)
        return table[states], states

    return step, lambda states, parents: jnp.take_along_axis(states, parents, 1)


def slow_model(table, seed, first=BOS):
    """The same for `slow_search`: from the history anew each time."""
    rows = np.asarray(table).tolist()

    def model(history):
        state = seed
        for token in (first, *history):
            state = next_state(state, token)
        return rows[state]

    return model


@partial(jax.jit, static_argnames=("called", "settings"))
def run(table, seeds, prefix, max_length, key, called, settings):
    settings = dict(settings)
    states = jnp.repeat(seeds[:, None], settings["beam_size"], axis=1)
    return search(*fast_model(table, called), states, prefix, max_length, key=key, **settings)


def find(table, seeds, max_length, *, prefix=None, key=None, called=None, **settings):
    """`search`, for a sentence per seed."""
    settings = tuple({"beam_size": 1, "steps": max(max_length), **settings}.items())
    prefix = no_prefix(len(seeds)) if prefix is None else prefix
    return run(table, jnp.array(seeds), prefix, jnp.array(max_length), key, called, settings)


def listed(found, row):
    """A sentence's hypotheses as `slow_search` writes them."""
    ids, log_prob, score = (np.asarray(column)[row] for column in found)
    lists = [tuple(line[: line.index(EOS) + 1]) for line in ids.tolist() if EOS in line]
    for line, tokens in zip(ids.tolist(), lists, strict=False):
        assert set(line[len(tokens) :]) <= {PAD}
    return lists, log_prob[: len(lists)], score[: len(lists)]


def assert_same(found, row, expected):
    ids, log_prob, score = listed(found, row)
    assert ids == [tokens for tokens, _, _ in expected]
    np.testing.assert_allclose(log_prob, [value for _, value, _ in expected], atol=1e-5)
    np.testing.assert_allclose(score, [value for _, _, value in expected], atol=1e-5)


def table_of(*rows):
    """Probabilities, the same after any history: one line, for hand arithmetic."""
    return jnp.log(jnp.broadcast_to(jnp.array(rows), (STATES, len(rows))))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_beam_as_wide_as_the_space_finds_the_best_of_all_sentences(alpha):
    """Four words, five places: 341 sentences, tried one by one; the best ten, in order."""
    table = random_table(vocab=8)
    settings = {"beam_size": 256, "n_best": 10, "length_penalty": alpha}
    found = find(table, [5, 11], [5, 5], **settings)
    for row, seed in enumerate([5, 11]):
        everything = slow_search.every_sentence(slow_model(table, seed), 5, alpha)
        assert len(everything) == 341
        assert_same(found, row, everything[:10])


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("beam_size, n_best, vocab", [(2, 2, 9), (3, 1, 9), (5, 4, 139)])
def test_a_narrow_beam_is_the_one_in_plain_python(alpha, beam_size, n_best, vocab):
    """Hypothesis by hypothesis. The slow one never stops early: so the stop rule loses nothing."""
    table, seeds, max_length = random_table(vocab, spread=3.0), list(range(8)), [12, 7, 1, 9] * 2
    settings = {"beam_size": beam_size, "n_best": n_best, "min_length": 2}
    found = find(table, seeds, max_length, length_penalty=alpha, **settings)
    for row, seed in enumerate(seeds):
        settings["max_length"] = max_length[row]
        expected = slow_search.beam(slow_model(table, seed), alpha=alpha, **settings)
        assert_same(found, row, expected)


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize(
    "sentences, rooms", [(41, (4,)), (41, (1, 2, 3)), (6, (2, 11)), (6, (12,))]
)
def test_a_cache_that_grows_on_the_way_changes_nothing(beam_size, sentences, rooms):
    """This one holds all tokens so far, and what has no place in it is lost."""
    table, seeds, steps = random_table(9, spread=3.0), jnp.arange(sentences), 12
    max_length = jnp.tile(jnp.array([12, 7, 1, 9, 12, 3]), 7)[:sentences]

    def step(tokens, cache):
        seeds, written, column = cache
        written = written.at[:, :, column].set(tokens, mode="drop")
        states = jnp.broadcast_to(seeds[:, None], tokens.shape)
        for place in range(written.shape[2]):
            read = next_state(states, written[:, :, place])
            states = jnp.where(place <= column, read, states)
        return table[states], (seeds, written, column + 1)

    def reorder(cache, parents):
        seeds, written, column = cache
        return seeds, jnp.take_along_axis(written, parents[:, :, None], axis=1), column

    def grow(cache, room):
        seeds, written, column = cache
        more = room - written.shape[2]
        return seeds, jnp.pad(written, ((0, 0), (0, 0), (0, more))), column

    cache = seeds, jnp.zeros((sentences, beam_size, rooms[0]), jnp.int32), jnp.int32(0)
    settings = {"steps": steps, "beam_size": beam_size, "n_best": beam_size}
    found = jax.jit(partial(search, step, reorder, rooms=rooms, grow=grow, **settings))(
        cache, no_prefix(sentences), max_length
    )
    expected = find(table, list(range(sentences)), max_length.tolist(), **settings)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.score, expected.score, atol=1e-6)


@pytest.mark.parametrize("long", [0, 1, 16, 17, 40])
def test_the_last_live_sentences_go_on_without_those_that_are_done(long):
    """Sixteen at most, of 40; and each is searched as in plain Python."""
    table = jax.nn.log_softmax(random_table(9).at[:, EOS].set(-30.0))  # all end at their limit
    max_length = [4] * 40
    for row in range(long):
        max_length[row * 7 % 40] = 10
    sizes = Mock()
    settings = {"beam_size": 2, "n_best": 2, "length_penalty": 1.0}
    found = find(table, list(range(40)), max_length, called=sizes, steps=10, **settings)
    jax.effects_barrier()
    together = 4 if long <= 16 else 10
    expected_sizes = [40] * together + [16] * (10 - together) * (long > 0)
    assert [call.args[0] for call in sizes.call_args_list] == expected_sizes
    for row in (0, 1, 7, 39):
        expected = slow_search.beam(
            slow_model(table, row), max_length=max_length[row], alpha=1.0, beam_size=2, n_best=2
        )
        assert_same(found, row, expected)


@pytest.mark.parametrize("logit", [-50.0, 50.0])
def test_logits_count_as_the_log_probabilities_they_stand_for(logit):
    """A constant added to all logits of a step is no preference."""
    table, settings = random_table(9), {"beam_size": 3, "n_best": 3}
    found, expected = (find(t, [0, 5], [9, 9], **settings) for t in (table + logit, table))
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.score, expected.score, atol=1e-4)


@pytest.mark.parametrize("min_length", [0, 3])
def test_a_beam_of_one_takes_the_likeliest_token_until_it_is_eos(min_length):
    """And so do sampling from the likeliest one, and sampling at hardly any temperature."""
    table, seeds = random_table(9), list(range(8))
    keys = jax.random.split(jax.random.key(0), 8)
    shared = {"min_length": min_length, "length_penalty": 1.0}
    found = find(table, seeds, [9] * 8, **shared)
    for row, seed in enumerate(seeds):
        model = slow_model(table, seed)
        expected = slow_search.greedy(model, max_length=9, min_length=min_length)
        assert listed(found, row)[0] == [expected]
    for sampling in (Sampling(top_k=1), Sampling(temperature=1e-4), Sampling(top_p=1e-6)):
        sampled = find(table, seeds, [9] * 8, sampling=sampling, key=keys, **shared)
        np.testing.assert_array_equal(sampled.ids, found.ids)
        np.testing.assert_allclose(sampled.score, found.score, atol=1e-5)


def test_a_beam_of_one_stops_at_its_first_eos():
    """Also where going on would end better: ln 0.55 now, or ln 0.45 / (14 / 6) nine tokens long."""
    table = jnp.broadcast_to(jnp.array([-9.0, -9, -9, -0.001, 0, -9]), (STATES, 6))
    table = table.at[next_state(0, BOS), 3:5].set(jnp.log(jnp.array([0.55, 0.45])))
    found = find(table, [0], [9], length_penalty=1.0)
    assert listed(found, 0)[0] == [(EOS,)]


def test_an_unlikely_eos_ends_nothing():
    """A beam of two drops the third likeliest continuation, also if that is EOS: kept, the empty
    sentence (0.01) would beat every other (at most 0.5 * 0.01)."""
    table = table_of(0, 0, 0, 0.01, 0.5, 0.49)
    found = find(table, [0], [9], beam_size=2, length_penalty=0.0)
    assert listed(found, 0)[0] == [(4,) * 8 + (EOS,)]


@pytest.mark.parametrize("vocab", [5, 39, 41, 64, 65, 80, 197])
@pytest.mark.parametrize("beam", [1, 4])
def test_the_best_words_are_those_of_a_full_top_k(vocab, beam):
    """Whole numbers tie all the time; the lower parent wins, then the lower token."""
    for seed in range(10):
        random = np.random.default_rng(seed)
        log_probs = jnp.asarray(-random.integers(0, 30, (beam, vocab)), jnp.float32)
        log_prob = jnp.asarray(-random.integers(0, 3, beam), jnp.float32)
        sums = (log_prob[:, None] + log_probs[:, 4:]).reshape(-1)
        order = np.argsort(-np.asarray(sums), kind="stable")[:beam]
        best, parent, token = jax.jit(top_k_tokens, static_argnums=2)(log_prob, log_probs, beam)
        np.testing.assert_array_equal(best, sums[order])
        np.testing.assert_array_equal(parent, order // (vocab - 4))
        np.testing.assert_array_equal(token, 4 + order % (vocab - 4))


def test_where_there_are_fewer_words_than_asked_for_the_rest_is_impossible():
    """One hypothesis and two words besides the four special tokens."""
    logits = jnp.log(jnp.array([[0.25, 0.25, 0.125, 0.125, 0.0625, 0.1875]]))
    best, parent, token = top_k_tokens(jnp.zeros(1), logits, 70)
    np.testing.assert_allclose(best[:2], np.log([0.1875, 0.0625]), rtol=1e-6)
    assert (best[2:] == -jnp.inf).all() and parent.tolist() == [0] * 70
    assert token.tolist() == [5, 4] + [PAD] * 68


@pytest.mark.parametrize(
    "n_best, alpha, steps",
    [
        (1, 0.0, 1),  # EOS at once has 0.9, what is live 0.05
        (2, 0.0, 2),  # a word and EOS have 0.045, what is live 0.0025
        (2, 1.0, 9),  # ln 0.045 / (7 / 6) = -2.66 beats n ln 0.05 / (55 / 6) = -0.327 n from n = 9
    ],
)
def test_the_search_stops_when_nothing_live_can_be_better(n_best, alpha, steps):
    """At every step EOS has probability 0.9 and two words 0.05 each; 50 tokens are allowed."""
    called, table = Mock(), table_of(0, 0, 0, 0.9, 0.05, 0.05)
    settings = {"beam_size": 2, "n_best": n_best, "length_penalty": alpha}
    jax.block_until_ready(find(table, [0, 1], [50, 50], called=called, **settings))
    jax.effects_barrier()
    assert called.call_count == steps


@pytest.mark.parametrize("sampling", [None, Sampling(1.5, top_k=5, top_p=0.9)])
def test_a_sentence_depends_on_nothing_but_itself(sampling):
    """Not on the sentences beside it, and not on how many steps there might be."""
    table, seeds, max_length = random_table(9), [3, 4, 5, 6], [6, 9, 4, 8]
    keys = None if sampling is None else jax.random.split(jax.random.key(1), 4)
    settings = {"beam_size": 3, "n_best": 3, "sampling": sampling}
    together = find(table, seeds, max_length, steps=9, key=keys, **settings)
    for row in range(4):
        one = slice(row, row + 1)
        key = None if keys is None else keys[one]
        alone = find(table, seeds[one], max_length[one], steps=20, key=key, **settings)
        np.testing.assert_array_equal(alone.ids[0, :, :9], together.ids[row])
        np.testing.assert_array_equal(alone.ids[0, :, 9:], PAD)
        np.testing.assert_array_equal(alone.score[0], together.score[row])


@pytest.mark.parametrize("sampling", [None, Sampling(2.0)])
def test_a_log_prob_is_what_teacher_forcing_gives(sampling):
    """Untempered, EOS included, also where the longest length forced it; the score follows."""
    table, seeds = random_table(9), [1, 2, 3]
    key = None if sampling is None else jax.random.split(jax.random.key(2), 3)
    settings = {"beam_size": 4, "n_best": 4, "length_penalty": 0.6, "min_length": 3}
    found = find(table, seeds, [5, 5, 5], sampling=sampling, key=key, **settings)
    for row, seed in enumerate(seeds):
        ids, log_prob, score = listed(found, row)
        assert len(ids) == 4 and all(4 <= len(tokens) <= 5 for tokens in ids)
        expected = [slow_search.forced(slow_model(table, seed), tokens) for tokens in ids]
        np.testing.assert_allclose(log_prob, expected, atol=1e-5)
        lengths = np.array([len(tokens) for tokens in ids])
        np.testing.assert_allclose(score, log_prob / ((5 + lengths) / 6) ** 0.6, atol=1e-5)
        assert (np.diff(score) <= 0).all()


def test_a_forced_prefix_counts_in_length_and_score():
    """Three tokens with log-probability -2 stand: the rest is searched as if after them."""
    table, prefix = random_table(9), Prefix(jnp.array([6]), jnp.array([3]), jnp.array([-2.0]))
    settings = {"beam_size": 3, "n_best": 3, "min_length": 5}
    found = find(table, [8], [9], prefix=prefix, length_penalty=1.0, **settings)
    model, settings["max_length"] = slow_model(table, 8, first=6), 9
    expected = slow_search.beam(model, alpha=1.0, prefix=(3, -2.0), **settings)
    assert_same(found, 0, expected)
    assert all(3 <= len(tokens) <= 6 for tokens, _, _ in expected)


@pytest.mark.parametrize("length, max_length", [(0, 1), (4, 5), (4, 4), (4, 2)])
def test_where_nothing_else_fits_the_end_is_forced(length, max_length):
    """EOS alone, at its own log-probability; more hypotheses than this one there are not."""
    table = table_of(0, 0, 0, 0.25, 0.5, 0.25)
    prefix = Prefix(jnp.array([BOS]), jnp.array([length]), jnp.array([0.0]))
    settings = {"beam_size": 2, "n_best": 2, "min_length": 3, "steps": 3}
    found = find(table, [0], [max_length], prefix=prefix, **settings)
    np.testing.assert_array_equal(found.ids, [[[EOS, PAD, PAD], [PAD, PAD, PAD]]])
    np.testing.assert_allclose(found.log_prob, [[np.log(0.25), -np.inf]], rtol=1e-6)
    assert found.score[0, 1] == -np.inf


@pytest.mark.parametrize("sampling", [None, Sampling(), Sampling(top_k=2), Sampling(top_p=0.5)])
def test_special_tokens_never_come_out(sampling):
    """PAD, UNK and BOS have nine tenths of the probability, and are not chosen."""
    table = table_of(0.3, 0.3, 0.3, 0.05, 0.03, 0.02)
    key = None if sampling is None else jax.random.split(jax.random.key(3), 2)
    settings = {"beam_size": 8, "n_best": 8, "sampling": sampling}
    found = find(table, [0, 1], [4, 4], key=key, **settings)
    for row in range(2):
        ids, _, _ = listed(found, row)
        assert len(ids) == 8
        assert not {PAD, UNK, BOS} & {token for tokens in ids for token in tokens}


@pytest.mark.parametrize("sampling", [None, Sampling(), Sampling(top_k=3), Sampling(top_p=0.7)])
@pytest.mark.parametrize("nothing", [-jnp.inf, jnp.nan])
def test_a_model_that_offers_nothing_finds_nothing(sampling, nothing):
    """-inf or NaN for every token: no hypothesis, and the sentence beside it is not disturbed."""
    table = random_table(9).at[next_state(0, BOS)].set(nothing)
    key = None if sampling is None else jax.random.split(jax.random.key(4), 2)
    settings = {"beam_size": 2, "n_best": 2, "sampling": sampling, "key": key}
    found = find(table, [0, 1], [6, 6], **settings)
    np.testing.assert_array_equal(found.ids[0], PAD)
    np.testing.assert_array_equal(found.score[0], -jnp.inf)
    assert len(listed(found, 1)[0]) == 2


def test_a_hypothesis_that_is_not_a_number_takes_no_place_in_the_beam():
    """NaN after the likeliest word: the others of its beam go on as if it were -inf."""
    table, first = random_table(9), next_state(0, BOS)
    after = next_state(first, 4 + int(table[first, 4:].argmax()))
    settings = {"beam_size": 3, "n_best": 3, "min_length": 3}
    broken, without = (
        find(table.at[after].set(value), [0], [7], **settings) for value in (jnp.nan, -jnp.inf)
    )
    np.testing.assert_array_equal(broken.ids, without.ids)
    np.testing.assert_array_equal(broken.score, without.score)
    assert len(listed(without, 0)[0]) == 3


PROBABILITIES = [0.0, 0.05, 0.2, 0.1, 0.4, 0.25]


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (Sampling(), [0, 0.05, 0.2, 0.1, 0.4, 0.25]),
        (Sampling(temperature=0.5), [0, 0.0025, 0.04, 0.01, 0.16, 0.0625]),
        (Sampling(top_k=3), [0, 0, 0.2, 0, 0.4, 0.25]),
        (Sampling(top_p=0.6), [0, 0, 0, 0, 0.4, 0.25]),
        (Sampling(top_p=0.66), [0, 0, 0.2, 0, 0.4, 0.25]),
        (Sampling(top_p=0.3), [0, 0, 0, 0, 1, 0]),
        (Sampling(top_k=3, top_p=0.5), [0, 0, 0, 0, 0.4, 0.25]),
        (Sampling(top_k=50), [0, 0.05, 0.2, 0.1, 0.4, 0.25]),
        (Sampling(temperature=0.5, top_p=0.6), [0, 0, 0, 0, 0.16, 0.0625]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_should(sampling, expected):
    """10,000 draws; chi-square with at most four degrees of freedom is above 25 once in 20,000."""
    count = 10_000
    keys = jax.random.split(jax.random.key(0), count)
    log_probs = jnp.log(jnp.array(PROBABILITIES))
    drawn = jax.jit(jax.vmap(partial(draw, log_probs, sampling=sampling)))(keys)
    often = np.bincount(drawn, minlength=6)
    expected = count * np.array(expected) / sum(expected)
    np.testing.assert_array_equal(often > 0, expected > 0)
    drawable = expected > 0
    assert ((often - expected)[drawable] ** 2 / expected[drawable]).sum() < 25


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
def test_the_nucleus_is_the_shortest_sorted_list_that_has_enough(top_p):
    """Sorted and added up in numpy, for vocabularies of any size and sharpness."""
    for size, spread in [(1, 1.0), (7, 3.0), (100, 0.3), (1000, 4.0)]:
        logits = jnp.asarray(np.random.default_rng(size).normal(0, spread, size), jnp.float32)
        share = jax.nn.softmax(logits)
        order = np.argsort(-np.asarray(share))
        enough = 1 + np.searchsorted(np.cumsum(np.asarray(share, np.float64)[order]), top_p)
        assert set(np.flatnonzero(nucleus(share, top_p))) == set(order[:enough])


def test_every_sample_of_a_sentence_is_drawn_on_its_own():
    """Two words, four places: 64 samples are many sentences, and not those of the row beside."""
    table = table_of(0, 0, 0, 0.2, 0.4, 0.4)
    keys = jax.random.split(jax.random.key(5), 2)
    settings = {"beam_size": 64, "n_best": 64, "sampling": Sampling(), "key": keys}
    found = find(table, [0, 1], [5, 5], **settings)
    samples = [listed(found, row)[0] for row in range(2)]
    assert all(len(set(ids)) > 15 for ids in samples)
    assert samples[0] != samples[1]
    # 0.2 end at once: 12.8 of 64, with a standard deviation of 3.2.
    assert all(3 <= ids.count((EOS,)) <= 23 for ids in samples)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"beam_size": 0}, "beam_size must be at least 1"),
        ({"n_best": 0}, "n_best must be from 1 to beam_size"),
        ({"n_best": 5}, "got n_best=5, beam_size=4"),
        ({"length_penalty": -0.1}, "length_penalty must be at least 0"),
        ({"length_penalty": float("nan")}, "length_penalty must be at least 0"),
        ({"length_penalty": 10.5}, "and at most 10; got 10.5"),
        ({"min_length": -1}, "min_length must be at least 0"),
        ({"sampling": Sampling()}, "sampling needs a key"),
        ({"keyed": True}, "key is for sampling"),
        ({"keyed": True, "sampling": Sampling(temperature=0.0)}, "temperature must be at least"),
        ({"keyed": True, "sampling": Sampling(top_k=0)}, "top_k must be at least 1"),
        ({"keyed": True, "sampling": Sampling(top_p=0.0)}, "top_p must be above 0"),
        ({"keyed": True, "sampling": Sampling(top_p=1.1)}, "top_p must be above 0"),
        ({"vocab": 4}, "more than the 4 special tokens"),
    ],
)
def test_settings_without_sense_are_refused(wrong, message):
    """The rule, what was found, the way out."""
    settings = {"steps": 3, "beam_size": 4, "vocab": 6, "keyed": False, **wrong}
    model = fast_model(jnp.zeros((STATES, settings.pop("vocab"))))
    key = jax.random.split(jax.random.key(0), 1) if settings.pop("keyed") else None
    states = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=message):
        search(*model, states, no_prefix(1), jnp.array([3]), key=key, **settings)

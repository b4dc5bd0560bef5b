"""Batches of many sentences: few shapes, nothing lost, and no sentence depends on the others."""

import gc
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from tiny_run import random_params

from flaxformer_min.config import ModelConfig, SearchConfig
from flaxformer_min.decoding import batches
from flaxformer_min.decoding.batches import FEW, ROWS, WIDTHS, BatchRunner, cut
from flaxformer_min.decoding.ensemble import Ensemble
from flaxformer_min.kernels.backend import compiling_for
from flaxformer_min.model.cache import Cache
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import EOS

CONFIG = ModelConfig(vocab_size=20, num_layers=1, d_model=16, d_ff=16, num_heads=2)
SEARCH = SearchConfig(beam_size=2, n_best=2, max_extra_tokens=8)


def make_sources(lengths, seed=0):
    numbers = np.random.default_rng(seed)
    return {
        line: [*numbers.integers(4, 20, length - 1).tolist(), EOS]
        for line, length in enumerate(lengths, start=1)
    }


def make_runner(**settings):
    return BatchRunner(Transformer(CONFIG), random_params(CONFIG), **settings)


def found_by(runner, sources, config=SEARCH):
    """The hypotheses of each line."""
    found = {}
    for lines, hypotheses in runner.search(sources, dict.fromkeys(sources, []), config):
        for row, line in enumerate(lines):
            assert line not in found
            found[line] = [column[row] for column in hypotheses[:3]]
    assert found.keys() == sources.keys()
    return found


def assert_same(found, expected):
    for line, (ids, log_prob, _) in expected.items():
        for mine, other in zip(found[line][0], ids, strict=True):
            assert [i for i in mine if i] == [i for i in other if i], line
        np.testing.assert_allclose(found[line][1], log_prob, atol=1e-4)


@pytest.fixture(scope="module")
def sources():
    return make_sources([*np.random.default_rng(1).integers(2, 15, 40).tolist(), 30])


@pytest.fixture(scope="module")
def alone(sources):
    """What each line gets by itself, with all the room there can be."""
    runner, found = make_runner(), {}
    for line, ids in sources.items():
        found |= found_by(runner, {line: ids})
    assert runner.compilations == 2, "one for each width"
    return found


@pytest.mark.parametrize("entries", [pytest.param(None, marks=pytest.mark.slow), 16])
def test_a_line_gets_what_it_gets_alone(sources, alone, entries, monkeypatch):
    """In batches that halve, in any order; also where most caches are full after 8 steps."""
    if entries:
        monkeypatch.setattr(batches, "capacity_of", lambda *_: entries)
    full, runner = [], make_runner()
    prepare = BatchRunner._prepare

    def watched(self, *arguments):
        *_, full_room, batch = arguments
        full.extend(batch.numbers if full_room else [])
        return prepare(self, *arguments)

    monkeypatch.setattr(BatchRunner, "_prepare", watched)
    backwards = dict(reversed(sources.items()))
    assert_same(found_by(runner, backwards), alone)
    assert len(full) > 10 if entries else not full


def test_accelerators_share_the_rows_of_a_batch(sources, alone):
    runner = make_runner()
    runner.devices, runner.cores = jax.devices(), 1
    runner.use_params(runner.params)
    assert len(runner.devices) == 2
    assert_same(found_by(runner, sources), alone)


@pytest.mark.slow
def test_an_ensemble_of_a_model_and_itself_finds_what_it_finds_alone(sources, alone, monkeypatch):
    monkeypatch.setattr(batches, "capacity_of", lambda *_: 16)
    model, params = Transformer(CONFIG), random_params(CONFIG)
    runner = BatchRunner(Ensemble([model, model]), [params, params])
    some = {line: sources[line] for line in list(sources)[:10]}
    assert_same(found_by(runner, some), {line: alone[line] for line in some})


class Unasked(NamedTuple):
    """The cache without the method that tells whether it is full, which is optional."""

    cache: Cache

    def reorder(self, parents):
        return Unasked(self.cache.reorder(parents))

    def resize(self, entries):
        return Unasked(self.cache.resize(entries))


class WithoutTelling(Transformer):
    """The model with such a cache."""

    def prefill(self, cross, beam_size, capacity, prefix):
        cache, log_probs = super().prefill(cross, beam_size, capacity, prefix)
        return Unasked(cache), log_probs

    def decode_step(self, tokens, cross, cache):
        logits, after = super().decode_step(tokens, cross, cache.cache)
        return logits, Unasked(after)


@pytest.mark.slow
def test_a_cache_that_cannot_tell_whether_it_is_full_has_all_its_room(monkeypatch):
    """Greedily, with room for two tokens otherwise; more would be lost without a word."""
    monkeypatch.setattr(batches, "capacity_of", lambda *_: 2)
    greedy = SearchConfig(beam_size=1, max_extra_tokens=4)
    sources = make_sources([4, 3, 4, 2])
    expected = found_by(make_runner(), sources, greedy)
    runner = BatchRunner(WithoutTelling(CONFIG), random_params(CONFIG))
    assert_same(found_by(runner, sources, greedy), expected)


@pytest.mark.parametrize("count, programs", [(1, 1), (5, 1), (FEW, 1), (1000, 3)])
def test_few_lines_need_one_program_and_captions_three(count, programs):
    """As many lengths as those of captions: 4 to 45 tokens, most of them short."""
    lengths = 4 + np.random.default_rng(0).gamma(4, 2.5, count).astype(int).clip(0, 41)
    found = cut(dict(enumerate(lengths.tolist())), WIDTHS, ROWS["cpu"], cores=2)
    assert len({batch[1:] for batch in found}) == programs
    assert sorted(number for batch in found for number in batch.numbers) == list(range(count))
    for numbers, rows, width in found:
        assert len(numbers) <= rows and lengths[numbers].max() <= width <= 4 * 16


@pytest.mark.parametrize("rows", [1, 32, 512])
@pytest.mark.parametrize("longest", [12, 300, 1024])
def test_long_sentences_come_in_small_batches(rows, longest):
    for count in (1, 20, 300):
        for batch in cut(dict.fromkeys(range(count), longest), WIDTHS, rows):
            assert batch.rows * batch.width <= max(rows * 192, batch.width)
            assert len(batch.numbers) <= batch.rows <= rows


def test_a_long_line_does_not_pad_the_short_ones_behind_it():
    long, *short = cut({0: 267, **dict.fromkeys(range(1, 50), 9)}, WIDTHS, 32)
    assert long.numbers == [0] and long.width == 384
    assert {batch.width for batch in short} == {16}


@pytest.mark.parametrize(
    "platform, cores, flags, names",
    [
        ("cpu", 1, "", {"xla_disable_hlo_passes"}),
        ("cpu", 2, "", {"xla_disable_hlo_passes", "xla_cpu_multi_thread_eigen"}),
        ("cpu", 2, "--xla_disable_hlo_passes=dce --xla_a", {"xla_cpu_multi_thread_eigen"}),
        ("gpu", 1, "", {"xla_gpu_enable_command_buffer"}),
        ("gpu", 1, "--xla_gpu_enable_command_buffer=", set()),
        ("tpu", 1, "", set()),
    ],
)
def test_an_option_of_the_compiler_that_the_user_has_set_stays(
    platform, cores, flags, names, monkeypatch
):
    """An option of a program would go before XLA_FLAGS."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    with compiling_for([SimpleNamespace(platform=platform, compute_capability="9.0")]):
        assert set(batches.compiler_options(cores)) == names


def test_programs_are_freed_with_the_runner_that_compiled_them():
    """Otherwise a process that compares many runs would keep the programs of all of them."""
    runner = make_runner()
    found_by(runner, make_sources([5]))
    model = weakref.ref(runner.model)
    del runner
    gc.collect()
    assert model() is None

"""Continuous batching: each sentence is searched as if it were alone, and few lanes stay empty."""

import contextlib
import dataclasses
import gc
import inspect
import re
import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_search

from flaxformer_min.config import ModelConfig
from flaxformer_min.decoding import batching, moves, programs, scheduling, shapes
from flaxformer_min.decoding.batching import BatchRunner
from flaxformer_min.decoding.choices import Sampling
from flaxformer_min.decoding.job import Job, Options
from flaxformer_min.decoding.moves import rows
from flaxformer_min.decoding.pool import Newcomers, Pool, PoolShape, begin
from flaxformer_min.decoding.search import Rules
from flaxformer_min.model.target import compiling_for
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import BOS, EOS, Batch, one_sentence_per_row

STATES, VOCAB = 997, 11


def next_state(state, token):
    return (state * 31 + token * 7 + 1) % STATES


class History(NamedTuple):
    """All tokens of each hypothesis; what exceeds the capacity is lost."""

    seeds: jax.Array
    read: jax.Array
    positions: jax.Array

    def reorder(self, parents):
        return self._replace(read=jnp.take_along_axis(self.read, parents[:, :, None], axis=1))

    def resize(self, capacity):
        more = max(capacity - self.read.shape[2], 0)
        return self._replace(read=jnp.pad(self.read, ((0, 0), (0, 0), (0, more)))[:, :, :capacity])

    def is_full(self):
        """As if each token were shared by half of the hypotheses."""
        distinct = min(self.read.shape[1], 2)
        return (self.positions + 1) * distinct > self.read.shape[2]


class Source(NamedTuple):
    """A source as it is, padded to the width of the pool."""

    ids: jax.Array

    @property
    def seeds(self):
        return self.ids.sum(1) % STATES


class Table:
    """A model that predicts from a number made of the source and of all tokens so far."""

    def apply(self, params, *arguments, method):
        return getattr(self, method)(params["params"], *arguments)

    def encode(self, table, source):
        return source.ids * source.segments

    def precompute_cross_attention(self, table, encoded, source):
        return Source(encoded)

    def prefill(self, table, cross, beam_size, capacity, prefix):
        batch, length = prefix.shape
        read = jnp.zeros((batch, beam_size, length + capacity), jnp.int32)
        history = History(cross.seeds, read, jnp.zeros(batch, jnp.int32))
        return history, jnp.zeros((batch, length), jnp.float32)

    def decode_step(self, table, tokens, cross, history):
        batch = jnp.arange(len(tokens))
        read = history.read.at[batch, :, history.positions].set(tokens, mode="drop")
        states = jnp.broadcast_to(history.seeds[:, None], read.shape[:2])

        def read_one(column, states):
            is_read = (column <= history.positions)[:, None]
            return jnp.where(is_read, next_state(states, read[:, :, column]), states)

        states = jax.lax.fori_loop(0, read.shape[2], read_one, states)
        return table[states], History(history.seeds, read, history.positions + 1)


def slow_model(table, source):
    rows, seed = np.asarray(table).tolist(), sum(source) % STATES

    def model(history):
        state = seed
        for token in (BOS, *history):
            state = next_state(state, token)
        return rows[state]

    return model


def make_table(eos, seed=0):
    logits = np.random.default_rng(seed).normal(0, 2, (STATES, VOCAB))
    logits[:, EOS] = eos
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


def make_sources(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return {
        line: [*rng.integers(4, VOCAB, length - 1).tolist(), EOS]
        for line, length in enumerate(lengths, start=1)
    }


def find(table, sources, batch_size=8, cores=1, devices=1, kind="cpu", **options):
    """Search on so many cores, which share a device, or on so many devices, as if accelerators."""
    runner = BatchRunner([Table()], [jnp.asarray(table)], batch_size)
    runner.cores, runner.devices, runner.kind = cores, jax.local_devices()[:devices], kind
    runner.use_params([jnp.asarray(table)])
    found = {}
    for batch, hypotheses in runner.search(
        sources, {line: [] for line in sources}, Options(**{"early_stopping": False, **options})
    ):
        for row, line in enumerate(batch):
            assert line not in found
            found[line] = jax.tree.map(lambda array, row=row: array[row], hypotheses)
    assert sorted(found) == sorted(sources)
    return found, runner


def expect_as_alone(found, table, sources, extra, enough=1e9, **settings):
    """Check all hypotheses beside plain Python, a sentence at a time."""
    for line, source in sources.items():
        expected = slow_search.beam(
            slow_model(table, source),
            alpha=0.6,
            enough=enough,
            max_length=len(source) + extra,
            **settings,
        )
        rows = zip(found[line].ids.tolist(), found[line].score, strict=True)
        for (ids, score), (tokens, _, of_slow) in zip(rows, expected, strict=True):
            assert ids[: ids.index(EOS) + 1] == list(tokens)
            assert score == pytest.approx(of_slow, abs=1e-4)


def watch_builds(monkeypatch, see):
    """Call `see` with the arguments of each `PoolScheduler._build` before it."""
    build = scheduling.PoolScheduler._build

    def building(*arguments):
        see(*arguments)
        build(*arguments)

    monkeypatch.setattr(scheduling.PoolScheduler, "_build", building)


@pytest.fixture
def schedule(monkeypatch):
    """The shapes of all pools but those in which others take turns, and the lines that paused.

    And the most that paused at once.
    """
    shapes, paused, most = [], set(), [0]
    pause = scheduling.PoolScheduler._pause

    def see(_, shape, resumed, sizes, arrays):
        if len(sizes) == 1:
            shapes.append(shape)

    def pausing(self, device, slots):
        pause(self, device, slots)
        paused.update(self.paused)
        most[0] = max(most[0], len(self.paused))

    watch_builds(monkeypatch, see)
    monkeypatch.setattr(scheduling.PoolScheduler, "_pause", pausing)
    return shapes, paused, most


@pytest.mark.parametrize(
    "cores, devices, kind",
    [
        (1, 1, "cpu"),
        (1, 2, "cpu"),
        (1, 2, "accelerator"),
        pytest.param(1, 1, "accelerator", marks=pytest.mark.slow),
        pytest.param(2, 1, "cpu", marks=pytest.mark.slow),
    ],
)
def test_sentences_that_join_move_and_pause_are_searched_as_alone(cores, devices, kind, schedule):
    """The pool gets wider twice, and some translations outgrow it and go on in the next."""
    shapes, paused, _ = schedule
    lengths = [*[52] * 9, *[30] * 20, *range(3, 15), *[9] * 22, 12]
    sources = make_sources(np.random.default_rng(1).permutation(lengths).tolist())
    table, settings = make_table(eos=0.7), {"beam_size": 3, "n_best": 2}
    found, runner = find(
        table,
        sources,
        cores=cores,
        devices=devices,
        kind=kind,
        max_extra_tokens=20,
        early_stopping=True,
        **settings,
    )
    assert len({shape.width for shape in shapes}) >= 3 and 0 < len(paused) < len(sources)
    expect_as_alone(found, table, sources, extra=20, enough=3, **settings)
    assert runner.usage.needed <= runner.usage.computed


@contextlib.contextmanager
def as_on_a_gpu():
    """Newcomers join three at once. Yields a list of how many groups moved to each pool."""
    moved = []

    def arrangement(groups, arrays, runner):
        assert all(isinstance(each, moves.OnDevice) for group in groups for each in group)
        in_numpy = moves._in_numpy(groups, arrays, runner.devices)
        with pytest.MonkeyPatch.context() as without:
            without.setattr(moves, "_in_numpy", None)
            make = moves.arrangement(groups, arrays, runner)
        jax.tree.map(np.testing.assert_array_equal, make(), in_numpy)
        moved.append(sum(map(len, groups)))
        return make

    device = SimpleNamespace(platform="gpu", compute_capability="9.0")
    with pytest.MonkeyPatch.context() as patch, compiling_for([device]):
        patch.setattr(scheduling, "arrangement", arrangement)
        patch.setattr(programs, "_join", None)
        patch.setattr(programs, "JOINING", 3)
        yield moved


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_pools_of_gpus_hold_all_steps_and_move_on_the_devices(schedule, devices):
    """To the same pools as numpy would build. Newcomers join together, and nobody pauses."""
    shapes, paused, _ = schedule
    lengths = [*[52] * 9, *[30] * 20, *range(3, 15), *[9] * 22, 12]
    sources = make_sources(np.random.default_rng(1).permutation(lengths).tolist())
    table, settings = make_table(eos=0.7), {"beam_size": 3, "n_best": 2}
    options = {"max_extra_tokens": 20, "early_stopping": True, **settings}
    with as_on_a_gpu() as moved:
        found, _ = find(table, sources, devices=devices, kind="accelerator", **options)
    assert len({shape.width for shape in shapes}) >= 3 and not paused
    assert moved[0] == 0 and sum(moved) > 0
    expect_as_alone(found, table, sources, extra=20, enough=3, **settings)


@pytest.mark.parametrize(
    "sampling, batch_size",
    [pytest.param(None, 8, marks=pytest.mark.slow), (Sampling(top_k=4), 8), (None, 32)],
)
def test_on_a_gpu_hypotheses_that_do_not_compete_are_those_of_a_cpu(sampling, batch_size):
    """Many end as they join: half of the limits are two tokens. 32 newcomers are four parts."""
    sources = make_sources([*[1] * 30, *range(3, 15), *[30] * 9])
    options = {"beam_size": 1, "sampling": sampling, "max_extra_tokens": 1, "seed": 5}
    on_cpu, _ = find(make_table(eos=0.7), sources, batch_size, **options)
    with as_on_a_gpu() as moved:
        on_gpu, _ = find(make_table(eos=0.7), sources, batch_size, kind="accelerator", **options)
    assert sum(moved) > 0
    for line in sources:
        np.testing.assert_array_equal(on_gpu[line].ids, on_cpu[line].ids)


@pytest.mark.parametrize("platform, is_graph", [("gpu", True), ("tpu", False), ("cpu", False)])
def test_an_nvidia_gpu_repeats_a_loop_as_a_graph(monkeypatch, platform, is_graph):
    """By an option that jax knows, whose value it checks for any device."""
    compiled, given = jax.stages.Lowered.compile, []

    def compile(lowered, options):
        given.append(options)
        return compiled(lowered, options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    with compiling_for([SimpleNamespace(platform=platform, compute_capability="9.0")]):
        find(make_table(eos=0.7), make_sources([3]))
    kinds = [each.get("xla_gpu_enable_command_buffer", "").split(",") for each in given]
    assert kinds and {"WHILE" in each for each in kinds} == {is_graph}


@pytest.mark.parametrize(
    "platform, cores, flags, names",
    [
        ("cpu", 1, "", {"xla_disable_hlo_passes"}),
        ("cpu", 2, "", {"xla_disable_hlo_passes", "xla_cpu_multi_thread_eigen"}),
        ("cpu", 2, "--xla_disable_hlo_passes=dce --xla_a", {"xla_cpu_multi_thread_eigen"}),
        ("cpu", 2, "--xla_cpu_multi_thread_eigen", {"xla_disable_hlo_passes"}),
        ("gpu", 1, "--xla_disable_hlo_passes=dce", {"xla_gpu_enable_command_buffer"}),
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
        assert set(programs.compiler_options(cores)) == names


@pytest.mark.parametrize(
    "platform, slots, steps, capacity",
    [("gpu", 256, 256, 1024), ("gpu", 256, 257, 64), ("gpu", 8, 74, 304), ("tpu", 8, 74, 64)],
)
def test_caches_of_a_gpu_hold_all_tokens_unless_there_are_very_many(
    platform, slots, steps, capacity
):
    """31 tokens are usual with sources of 24; each further hypothesis has a quarter of its own."""
    with compiling_for([SimpleNamespace(platform=platform, compute_capability="9.0")]):
        shape = shapes.pool_shape(slots, 24, steps, batching.Rules(beam_size=4))
    assert shape.capacity == capacity


def test_when_all_outgrow_the_pool_at_once_few_of_them_pause(schedule):
    """None ends before its limit. Others begin in the larger pool in which these go on."""
    shapes, paused, most = schedule
    sources = make_sources([9] * 40)
    table, settings = make_table(eos=-30.0), {"beam_size": 3, "n_best": 1}
    found, _ = find(table, sources, max_extra_tokens=40, **settings)
    assert paused == {*range(1, 9)} and most == [8]
    assert [shape.slots for shape in shapes] == [8, 8]
    expect_as_alone(found, table, sources, extra=40, **settings)


@pytest.mark.parametrize("beam", [1, 2, 4, 16, 17, 20, 32, 64])
def test_where_a_sentence_that_paused_goes_on_there_is_room_for_a_token_of_each_hypothesis(beam):
    """It pauses with less room than that; without, tokens would be lost without a word."""
    capacities = [shapes.in_blocks(entries, beam) for entries in range(1, 1000)]
    larger = np.diff(np.unique(capacities))
    assert larger.min() >= beam and min(capacities) >= beam


@pytest.mark.parametrize("devices", [1, 2])
def test_the_last_sentences_may_outgrow_the_fewer_slots_in_which_they_go_on(
    monkeypatch, schedule, devices
):
    """Those that do so go on in a larger pool."""
    # As soon as nobody waits.
    for module in (scheduling, shapes):
        monkeypatch.setattr(module, "most_last", lambda slots, in_turn: slots)
    monkeypatch.setattr(scheduling, "rooms", lambda tokens, rules: (64, 3 * tokens))
    _, paused, _ = schedule
    sources, settings = make_sources([9] * 9), {"beam_size": 3, "n_best": 2}
    table = make_table(eos=0.7)
    found, runner = find(table, sources, devices=devices, max_extra_tokens=90, **settings)
    assert [key[0] for key in runner._programs][:2] == ["run", "finish"]
    assert 0 < len(paused) < len(sources)
    expect_as_alone(found, table, sources, extra=90, **settings)


@pytest.mark.parametrize(
    "in_turn, beam, slots, expected",
    [
        (True, 4, 64, (8, 24)),
        (True, 4, 8, (1, 3)),
        (True, 1, 64, (8, 24)),
        (True, 1, 8, (2, 2)),
        (True, 1, 3, (1, 0)),
        (False, 4, 256, (85, 0)),
    ],
)
def test_half_of_a_pool_takes_few_slots_in_turn_or_a_third_as_many_as_they_are(
    in_turn, beam, slots, expected
):
    shape = shapes.last_shape(PoolShape(slots, slots, 24, 64, 74), 160, in_turn, beam)
    assert shape == PoolShape(*expected, 24, 160, 74)


def test_those_that_wait_for_one_of_the_last_slots_have_as_much_room(monkeypatch):
    rooms = []

    def see(_, shape, resumed, sizes, arrays):
        rooms.append([pool.state.cache[0][1].read.shape[-1] for pool in arrays()])

    watch_builds(monkeypatch, see)
    sources, settings = make_sources([9] * 40), {"beam_size": 3, "n_best": 1}
    table = make_table(eos=2.0)
    found, _ = find(table, sources, 16, max_extra_tokens=90, **settings)
    # 40 tokens of 1.5 hypotheses, and twice the most, 114, in 16s
    assert rooms == [[64], [240, 240]]
    expect_as_alone(found, table, sources, extra=90, **settings)


@pytest.mark.parametrize(
    "eos, expected",
    [
        (1.1, [(8, 7, [1, 19, 24, 23, 22]), (8, 0, [19, 24, 23, 22])]),
        (1.2, [(8, 8, [19, 23]), (8, 0, [19, 23])]),
        (1.3, [(8, 7, [19])]),
    ],
    ids=["one", "none", "all"],
)
def test_sentences_that_paused_go_on_among_the_last_or_after_them_if_these_leave_no_room(
    monkeypatch, eos, expected
):
    """All calls are of one program."""
    sources, settings = make_sources([9] * 40), {"beam_size": 3, "n_best": 2}
    table, calls = make_table(eos=eos), []

    def see(scheduler, shape, resumed, sizes, arrays):
        if len(sizes) > 1:
            alive = sum(line is not None for line in scheduler.lines[0])
            calls.append((shape.slots + shape.newcomers, alive, resumed))

    watch_builds(monkeypatch, see)
    found, runner = find(table, sources, 16, max_extra_tokens=90, **settings)
    assert calls == expected
    assert [key[0] for key in runner._programs] == ["run", "finish"]
    expect_as_alone(found, table, sources, extra=90, **settings)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_encoder_is_traced_once_for_each_program(monkeypatch, devices):
    traced = []
    encode = Table.encode

    def counting(self, table, source):
        traced.append(source.ids.shape)
        return encode(self, table, source)

    monkeypatch.setattr(Table, "encode", counting)
    sources = make_sources([*[36] * 9, *[9] * 20])
    _, runner = find(make_table(eos=0.7), sources, devices=devices, max_extra_tokens=3)
    runs = [key for key in runner._programs if key[0] == "run"]
    assert len(runs) >= 2
    assert len(traced) == len(runs)


@pytest.mark.parametrize("in_turn, devices", [(True, 1), (False, 1), (False, 2)])
def test_lanes_and_bytes_are_counted_as_by_hand(monkeypatch, in_turn, devices):
    """Without EOS, a beam of 4 needs one lane at first, then four up to the limit.

    Sources are padded to 24 tokens. The four hypotheses of a sentence have room for 80 tokens each,
    and for 112 among the last ones. Each device has the same lengths.
    """
    monkeypatch.setattr(BatchRunner, "suits_few", lambda runner: in_turn)
    sources = make_sources([5, 9, 7, 16, 12] * devices)
    table, settings = make_table(eos=-30.0), {"max_extra_tokens": 3, "length_penalty": 0.0}
    _, runner = find(table, sources, batch_size=32, devices=devices, **settings)
    limits = [len(source) + 3 for source in sources.values()]
    usage = runner.usage
    # Of 4 bytes each: a source, what four hypotheses have read, a seed and a position.
    in_pool, among_last = (4 * (24 + 4 * room + 1 + 1) for room in (80, 112))
    assert usage.needed == sum(1 + 4 * (limit - 1) for limit in limits)
    if in_turn:  # Four are left after eight steps of 8 slots, and take one in turn.
        last = sum(limit - 8 for limit in limits)
        assert usage.steps == 8 + last
        assert usage.computed == 8 * 8 * 4 + last * 4
        assert usage.cache_bytes == 8 * 8 * in_pool + last * among_last
    else:  # Two are left after twelve steps, and go on in so many slots.
        assert usage.steps == max(limits) * devices
        assert usage.computed == (12 * 8 * 4 + 7 * 2 * 4) * devices
        assert usage.cache_bytes == (12 * 8 * in_pool + 7 * 2 * among_last) * devices


def test_a_pool_stays_full():
    """300 sentences of 3 to 16 tokens in 64 slots: the last to begin are short and done soon."""
    lengths = np.random.default_rng(0).integers(3, 17, 300).tolist()
    _, runner = find(
        make_table(eos=-30.0),
        make_sources(lengths),
        batch_size=64,
        beam_size=1,
        max_extra_tokens=3,
    )
    assert runner.usage.share > 0.95


def test_lines_are_sorted_by_width_and_then_the_longest_first():
    runner = BatchRunner([Table()], [jnp.asarray(make_table(eos=0.7))], batch_size=1)
    sources = make_sources([9, 49, 24, 25, 24, 48])
    job = Job(runner, sources, {}, Options(), 0)
    assert sorted(sources, key=job.order) == [3, 5, 1, 6, 4, 2]


def test_an_array_of_a_pool_is_freed_once_its_sentences_have_moved():
    pool = Pool(*(jnp.full((1, 4, 2), float(number)) for number in range(3)))
    alive = [weakref.ref(array) for array in pool]
    moving = rows(pool, 0, [1, 3])
    del pool
    for number in range(3):
        np.testing.assert_array_equal(next(moving), np.full((2, 2), number))
        assert [array() is not None for array in alive] == [n >= number for n in range(3)]


def watch_programs(monkeypatch, see):
    """Call `see` before a program is loaded or compiled."""
    find_program = BatchRunner._find

    def finding(runner, key):
        if not runner.has_compiled(key):
            see()
        return find_program(runner, key)

    monkeypatch.setattr(BatchRunner, "_find", finding)


def test_a_pool_is_freed_before_the_next_program_is_loaded_or_compiled(monkeypatch):
    pool, alive = [], []
    run = scheduling.PoolScheduler.run

    def running(scheduler, launched):
        report = run(scheduler, launched)
        pool[:] = [weakref.ref(array) for array in jax.tree.leaves(scheduler.pool)]
        return report

    monkeypatch.setattr(scheduling.PoolScheduler, "run", running)
    watch_programs(monkeypatch, lambda: alive.append([array() is not None for array in pool]))
    sources = make_sources([*[9] * 20, *[30] * 20])
    _, runner = find(make_table(eos=0.7), sources, max_extra_tokens=9)
    assert [key[0] for key in runner._programs].count("run") > 1
    assert alive[0] == []
    after_a_run = [arrays for arrays in alive if arrays]
    assert len(after_a_run) > 1
    assert not any(map(any, after_a_run))


def test_all_pools_search_while_the_caller_has_what_was_found(monkeypatch):
    """Two cores, so two searches are on their way, unless none is left to begin."""
    launched, done = [], []
    run, collect = scheduling.PoolScheduler.run, scheduling.PoolScheduler.collect

    def running(scheduler, event):
        launched.append(scheduler)
        return run(scheduler, event)

    def collecting(scheduler, report):
        done.append(scheduler)
        return collect(scheduler, report)

    monkeypatch.setattr(scheduling.PoolScheduler, "run", running)
    monkeypatch.setattr(scheduling.PoolScheduler, "collect", collecting)
    table = jnp.asarray(make_table(eos=0.7))
    runner = BatchRunner([Table()], [table], 8)
    runner.cores, sources = 2, make_sources([9] * 60)
    found = runner.search(sources, {line: [] for line in sources}, Options(beam_size=2))
    left = [len(launched) - len(done) for _ in found]
    assert len(left) > 4
    assert left[:4] == [2] * 4


def test_a_search_that_fails_as_it_is_launched_raises(monkeypatch):
    def compiled(runner, *arguments, **settings):
        return lambda *_: 1 // 0

    monkeypatch.setattr(BatchRunner, "compiled", compiled)
    with pytest.raises(ZeroDivisionError):
        find(make_table(eos=0.7), make_sources([9] * 20))


def test_no_core_searches_while_a_program_is_loaded_or_compiled(monkeypatch):
    """So that each has left the pool that it outgrew."""
    searching, seen = [], []
    run = scheduling.PoolScheduler.run

    def running(scheduler, launched):
        searching.append(scheduler)
        time.sleep(0.02 * len(searching))
        report = run(scheduler, launched)
        searching.remove(scheduler)
        return report

    monkeypatch.setattr(scheduling.PoolScheduler, "run", running)
    watch_programs(monkeypatch, lambda: seen.append(len(searching)))
    sources = make_sources([*[9] * 21, *[40] * 12])
    find(make_table(eos=0.7), sources, cores=2, max_extra_tokens=9)
    assert len(seen) > 2
    assert not any(seen)


def test_a_short_sum_is_one_operation_on_a_cpu():
    """XLA would sum 128 numbers in four windows first."""
    runner = BatchRunner([Table()], [jnp.zeros((1, VOCAB))])

    def program(params, array):
        return (array * array).sum(-1)

    text = runner.compiled("sum", program, jnp.ones((1, 16, 128))).as_text()
    assert "reduce" in text
    assert "reduce-window" not in text


def test_programs_are_freed_with_the_runner_that_compiled_them():
    """Otherwise a process that compares many runs would keep the programs of all of them."""
    _, runner = find(make_table(eos=0.7), make_sources([9, 11]), max_extra_tokens=2)
    models = [weakref.ref(model) for model in runner.models]
    del runner
    gc.collect()
    assert [model() for model in models] == [None]


def test_a_pool_of_fewer_longer_sentences_waits_until_they_have_room(monkeypatch):
    """Seven of up to 24 tokens do not fit into four slots for 40; all are found, and the same."""
    sources = make_sources([*range(17, 25), *range(17, 25), *[36] * 10])
    table, settings = make_table(eos=-30.0), {"max_extra_tokens": 9, "n_best": 2}
    expected, _ = find(table, sources, **settings)
    monkeypatch.setattr(batching, "LONGEST_OF_A_FULL_BATCH", 3)  # 64 * 3 = 8 * 24
    found, _ = find(table, sources, **settings)
    for line in sources:
        ids, others = (each[line].ids[:, :33] for each in (found, expected))
        assert ids.tolist() == others.tolist()


def test_a_cache_that_says_it_is_always_full_gets_all_the_room_there_is(monkeypatch):
    """A model of one's own may be too careful: nothing is lost, and the search ends."""
    sources = make_sources([*[17] * 6, *[60] * 3])
    table, settings = make_table(eos=0.7), {"beam_size": 3, "n_best": 2}
    monkeypatch.setattr(History, "is_full", lambda self: jnp.ones(len(self.positions), bool))
    found, _ = find(table, sources, max_extra_tokens=20, early_stopping=True, **settings)
    expect_as_alone(found, table, sources, extra=20, enough=3, **settings)


def test_one_long_sentence_has_a_pool_of_its_own():
    """100 tokens among thirty of 8: no short one is computed in its width."""
    shapes = set()
    make = BatchRunner.shape

    class Recording(BatchRunner):
        def shape(self, *arguments):
            shapes.add(make(self, *arguments))
            return make(self, *arguments)

    sources = make_sources([100, *[8] * 30])
    runner = Recording([Table()], [jnp.asarray(make_table(eos=-30.0))], 8)
    lines = {line: [] for line in sources}
    found = [
        line
        for batch, _ in runner.search(sources, lines, Options(max_extra_tokens=2))
        for line in batch
    ]
    assert sorted(found) == sorted(sources)
    assert {(shape.slots, shape.width) for shape in shapes} == {(1, 128), (8, 24)}


def test_a_long_sentence_has_a_pool_of_its_own_though_short_ones_pause(schedule):
    """They cannot go on in its width, more than four times their own, so it needs no slot more."""
    shapes, paused, _ = schedule
    sources, table = make_sources([*[9] * 30, 200]), make_table(eos=-1.0)
    found, _ = find(table, sources, None, beam_size=1, max_extra_tokens=90, early_stopping=True)
    assert {shape.slots for shape in shapes if shape.width > 24} == {1}
    assert len(paused) > 1
    settings = {"beam_size": 1, "n_best": 1, "enough": 1}
    expect_as_alone(found, table, sources, extra=90, **settings)


def test_a_few_short_sentences_need_no_room_for_a_long_one_behind_them():
    """It comes when they are done, in a pool of its own."""
    sources = make_sources([9, 500, 11])
    _, runner = find(make_table(eos=-30.0), sources, batch_size=64, max_extra_tokens=2)
    capacities = {key[2].width: key[2].capacity for key in runner._programs if key[0] == "run"}
    assert capacities == {24: 80, 512: 4 * 514}  # 40 tokens of 1.75 hypotheses, in 16s


def test_short_sentences_in_small_pools_are_not_padded_to_those_behind_them():
    sources = make_sources([9, 9, 9, 9, 60])
    _, runner = find(make_table(eos=0.7), sources, batch_size=2, max_extra_tokens=2)
    assert {key[2].width for key in runner._programs} == {24, 64}


def test_all_cores_search_in_the_same_widths():
    """One line is of 64 tokens. The other core's few of 48 need no program of their own."""
    sources = make_sources([*[9] * 40, *[30] * 6, 60])
    table, settings = make_table(eos=0.7), {"beam_size": 3, "n_best": 1}
    found, runner = find(table, sources, 64, cores=2, max_extra_tokens=2, **settings)
    assert {key[2].width for key in runner._programs} == {24, 64}
    expect_as_alone(found, table, sources, extra=2, **settings)


@pytest.mark.parametrize(
    "counts, few, expected",
    [
        ({24: 900, 48: 68, 64: 1}, 32, {24: 24, 48: 48, 64: 64}),
        ({24: 900, 48: 68, 64: 1}, 128, {24: 24, 48: 64, 64: 64}),
        ({24: 2, 48: 2, 64: 1}, 3, {24: 48, 48: 48, 64: 64}),
        ({24: 2, 48: 2, 96: 1, 128: 9}, 8, {24: 96, 48: 96, 96: 96, 128: 128}),
        ({24: 1, 128: 1}, 8, {24: 24, 128: 128}),
        ({}, 8, {}),
    ],
)
def test_few_sources_take_the_next_width_up_to_four_times_their_own(counts, few, expected):
    widths = [width for width, count in counts.items() for _ in range(count)]
    assert shapes.common_widths(widths, few) == expected


@pytest.mark.parametrize("seed", [None, 3])
def test_one_hypothesis_is_found_without_scores_too(seed):
    """The same tokens, and NaN for what was not computed."""
    sources, table = make_sources([9, 3, 16, 21, 5, 30, 7, 12, 4, 11]), make_table(eos=0.7)
    settings = {"beam_size": 1, "max_extra_tokens": 9}
    if seed is not None:
        settings |= {"sampling": Sampling(temperature=0.7, top_k=5), "seed": seed}
    with_scores, _ = find(table, sources, batch_size=8, **settings)
    without, _ = find(table, sources, batch_size=8, scores=False, **settings)
    for line, hypotheses in with_scores.items():
        np.testing.assert_array_equal(without[line].ids, hypotheses.ids)
        assert np.isfinite(hypotheses.log_prob).all()
        assert np.isnan(without[line].log_prob).all() and np.isnan(without[line].score).all()


def rules_of(**options):
    """What programs are compiled for in a search with these options."""
    runner = BatchRunner([Table()], [jnp.asarray(make_table(eos=0.7))])
    return Job(runner, {}, {}, Options(**options), 0).rules


@pytest.mark.parametrize(
    "settings, differ",
    [({}, False), ({"beam_size": 1}, True), ({"beam_size": 2, "sampling": Sampling()}, False)],
)
def test_scores_make_other_programs_only_where_there_is_one_hypothesis(settings, differ):
    """Several are compared by their scores, whoever asks for them."""
    without, scored = (rules_of(scores=scores, **settings) for scores in (False, True))
    assert (without != scored) is differ


@pytest.mark.parametrize(
    "settings, differ",
    [({}, True), ({"beam_size": 1}, False), ({"beam_size": 2, "sampling": Sampling()}, False)],
)
def test_early_stopping_makes_other_programs_only_where_hypotheses_compete(settings, differ):
    exact, early = (rules_of(early_stopping=early, **settings) for early in (False, True))
    assert (exact != early) is differ


@pytest.mark.parametrize(
    "beam_size, given, slots", [(3, None, 64), (4, 64, 64), (1, 32, 32), (1, 128, 128)]
)
def test_a_pool_has_as_many_sentences_as_given_or_64_on_a_cpu(beam_size, given, slots):
    runner = BatchRunner([Table()], [jnp.asarray(make_table(eos=0.7))], given)
    job = Job(runner, {}, {}, Options(beam_size=beam_size), 0)
    shape = runner.shape(job, 24, 500)
    assert (shape.slots, shape.newcomers) == (slots, slots)


@pytest.mark.parametrize(
    "width, slots, newcomers, capacity, narrow",
    [(24, 16, 64, 48, 16), (48, 8, 32, 96, 0), (64, 8, 16, 120, 0), (256, 8, 8, 312, 0)],
)
def test_greedily_a_small_model_has_small_pools_on_a_cpu(width, slots, newcomers, capacity, narrow):
    """Of 384 source tokens, with room for twice as many new ones; a large model has others."""
    runner = BatchRunner([Table()], [jnp.zeros(4 << 20, jnp.float32)])
    job = Job(runner, {}, {}, Options(beam_size=1), 0)
    shape = runner.shape(job, width, 500)
    assert shape == PoolShape(slots, newcomers, width, capacity, width + 50, narrow=narrow)
    runner.use_params([jnp.zeros((4 << 20) + 1, jnp.float32)])
    assert runner.shape(job, width, 500).slots == min(64, 64 * 128 // width)
    accelerator = BatchRunner([Table()], [jnp.zeros(4)])
    accelerator.kind = "accelerator"
    shape = accelerator.shape(dataclasses.replace(job, runner=accelerator), width, 500)
    assert shape.slots == shape.newcomers > slots


@pytest.mark.parametrize(
    "l2, width, slots, newcomers",
    [
        (1 << 19, 24, 64, 256),
        (1 << 19, 48, 16, 64),
        (1 << 19, 64, 8, 32),
        (1 << 19, 256, 8, 8),
        ((1 << 20) - 1, 24, 64, 256),
        (1 << 20, 24, 16, 64),
        (1 << 21, 24, 16, 64),
        (None, 24, 16, 64),
    ],
)
def test_small_pools_are_two_or_four_times_as_large_with_a_small_l2_cache(
    l2, width, slots, newcomers, monkeypatch
):
    """Of 1,536 source tokens, or 768 in long sources, with less than a megabyte of it per core."""
    monkeypatch.setattr(shapes, "l2_cache_size", lambda: l2)
    runner = BatchRunner([Table()], [jnp.asarray(make_table(eos=0.7))])
    job = Job(runner, {}, {}, Options(beam_size=1), 0)
    shape = runner.shape(job, width, 500)
    assert (shape.slots, shape.newcomers) == (slots, newcomers)


@pytest.mark.parametrize("width, slots", [(24, 32), (48, 16), (64, 8), (256, 8)])
def test_with_a_beam_a_small_model_has_small_pools_of_768_source_tokens(width, slots):
    """A large model has as large ones as without a beam; samples do not compete."""
    runner = BatchRunner([Table()], [jnp.zeros(4 << 20, jnp.float32)])
    shapes_of = [
        runner.shape(Job(runner, {}, {}, options, 0), width, 500)
        for options in (Options(beam_size=4), Options(beam_size=4, sampling=Sampling()))
    ]
    usual = min(64, 64 * 128 // width)
    assert [(each.slots, each.newcomers) for each in shapes_of] == [
        (slots, 2 * slots),
        (usual, usual),
    ]
    runner.use_params([jnp.zeros((4 << 20) + 1, jnp.float32)])
    job = Job(runner, {}, {}, Options(beam_size=4), 0)
    assert runner.shape(job, width, 500).slots == usual


@pytest.mark.parametrize("beam_size", [1, 2, 4])
def test_a_long_prefix_leaves_a_pool_as_few_sentences_as_a_long_source(beam_size):
    """All of them have room for it, and are begun with it, whoever has one."""
    runner = BatchRunner([Table()], [jnp.asarray(make_table(eos=0.7))])
    options = Options(beam_size=beam_size)
    of_source, of_prefix = (
        runner.shape(Job(runner, {}, {}, options, prefix), width, 500)
        for width, prefix in ((1024, 0), (24, 1024))
    )
    assert (of_prefix.slots, of_prefix.newcomers) == (of_source.slots, of_source.newcomers)
    short = Job(runner, {}, {}, options, 24)
    assert runner.shape(short, 24, 500).slots > of_source.slots


def test_newcomers_are_begun_a_part_at_a_time_as_they_join(monkeypatch):
    """Of eleven sentences for four slots, eight are a part: three begin after some steps."""
    events = []

    def noting(name):
        method = getattr(Table, name)

        def noted(self, *arguments):
            # Of the arguments, so that it is called when they are there, and not before.
            some = sum(leaf.sum() for leaf in jax.tree.leaves(arguments))
            jax.debug.callback(lambda _: events.append(name), some)
            return method(self, *arguments)

        monkeypatch.setattr(Table, name, noted)

    noting("encode")
    noting("decode_step")
    monkeypatch.setattr(batching, "pool_shape", lambda *_: PoolShape(4, 16, 24, 64, 74))
    table, sources = make_table(eos=0.7), make_sources([9] * 11)
    found, _ = find(table, sources, beam_size=2, n_best=1, max_extra_tokens=60)
    begun = [number for number, name in enumerate(events) if name == "encode"]
    assert len(begun) == 2
    assert begun[0] == 0
    assert begun[1] > 1
    expect_as_alone(found, table, sources, extra=60, beam_size=2, n_best=1)


@pytest.mark.parametrize(
    "slots, newcomers, part",
    [(256, 256, 64), (64, 256, 16), (16, 64, 16), (8, 32, 8), (8, 8, 8), (4, 16, 8), (1, 1, 1)],
    ids=["an accelerator", "a small cache", "a large one", "long", "few", "fewer", "one"],
)
def test_a_quarter_of_a_pool_is_begun_at_once_or_16(slots, newcomers, part):
    assert PoolShape(slots, newcomers, 24, 48, 74).part == part


@pytest.mark.parametrize("longest, width", [(16, 16), (17, 24)])
def test_newcomers_are_encoded_at_the_narrow_width_if_all_fit(longest, width, monkeypatch):
    """What cross-attention reads has the width of the pool either way."""
    config = ModelConfig(vocab_size=20, num_layers=2, d_model=8, d_ff=8, num_heads=2)
    model, encode, widths = Transformer(config), Transformer.encode, []
    source = shapes.padded([[7] * (length - 1) + [EOS] for length in (5, longest)], 2, 24)
    tokens = one_sentence_per_row(jnp.asarray(source))
    params = model.init(jax.random.key(0), Batch(tokens, tokens))
    encoded = model.apply(params, tokens, method="encode")
    expected = model.apply(params, encoded, tokens, method="precompute_cross_attention")

    def noted(self, tokens):
        jax.debug.callback(lambda _: widths.append(tokens.ids.shape[1]), tokens.ids.sum())
        return encode(self, tokens)

    monkeypatch.setattr(Transformer, "encode", noted)
    shape = PoolShape(2, 2, 24, 8, 8, narrow=16)
    numbers = np.array([9, 9], np.int32)
    newcomers = Newcomers(np.int32(2), source, numbers, numbers, None, None)
    begin_pool = partial(begin, [model], rules=Rules(beam_size=1), shape=shape)
    state = jax.jit(begin_pool)([params["params"]], newcomers)
    jax.effects_barrier()
    assert widths == [width]
    ((cross, cache),) = state.cache
    for layer in (*cross.keys_values, *cache.self_attention_kv):
        assert layer.stored_keys.shape == layer.values.shape  # as suits one hypothesis on a CPU
    is_token = np.asarray(tokens.segments)[:, None, :, None] > 0
    np.testing.assert_array_equal(cross.segments, tokens.segments)
    for layer, of_layer in zip(cross.keys_values, expected.keys_values, strict=True):
        for name in ("keys", "values"):
            found, given = (np.where(is_token, getattr(x, name), 0) for x in (layer, of_layer))
            np.testing.assert_allclose(found, given, atol=1e-6)


def usage_in_small_pools(lengths, eos, beam, cores):
    """Check that a search in pools of the usual size finds what each sentence gets alone."""
    sources, table = make_sources([int(length) for length in lengths]), make_table(eos=eos)
    settings = {"beam_size": beam, "n_best": 1}
    found, runner = find(table, sources, None, cores, early_stopping=True, **settings)
    expect_as_alone(found, table, sources, extra=50, enough=beam, **settings)
    return runner.usage


@pytest.mark.parametrize(
    "cores, l2, slots, least",
    [(1, 1 << 20, {8, 16}, 0.9), (2, 1 << 20, {8, 16}, 0.9), (2, 1 << 19, {8, 32, 64}, 0.8)],
)
def test_small_pools_find_what_each_sentence_gets_alone(
    cores, l2, slots, least, schedule, monkeypatch
):
    """Newcomers fill the slots several times; some outgrow their cache; widths change."""
    monkeypatch.setattr(shapes, "l2_cache_size", lambda: l2)
    rng = np.random.default_rng(3)
    lengths = [*rng.integers(3, 25, 200), *rng.integers(25, 41, 80), *rng.integers(41, 65, 9)]
    usage = usage_in_small_pools(lengths, eos=-2.0, beam=1, cores=cores)
    built, paused, _ = schedule
    assert {shape.slots for shape in built} == slots
    assert paused
    assert usage.share > least


@pytest.mark.parametrize("cores", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_small_pools_of_a_beam_find_what_each_sentence_gets_alone(cores, schedule):
    rng = np.random.default_rng(3)
    lengths = [*rng.integers(3, 25, 200), *rng.integers(25, 41, 40)]
    usage_in_small_pools(lengths, eos=-1.0, beam=4, cores=cores)
    shapes, paused, _ = schedule
    assert {shape.slots for shape in shapes} == {32, 16}
    assert paused


def test_a_small_pool_moves_on_when_the_next_has_room_for_half_of_it(monkeypatch):
    """Those of 16 slots do not have to be done before 200 longer ones begin in 8 slots."""
    alive = {}

    def see(scheduler, shape, *_):
        alive.setdefault(shape.slots, scheduler._fullest())

    watch_builds(monkeypatch, see)
    sources = make_sources([*range(5, 25)] * 5 + [60] * 200)
    find(make_table(eos=0.7), sources, None, beam_size=1, max_extra_tokens=24)
    assert alive[16] == 0
    assert 4 <= alive[8] <= 8


@pytest.mark.slow
def test_one_long_sentence_costs_no_more_than_its_own_lanes():
    """Those of the others are what they are without it."""
    table = make_table(eos=0.7)
    both = make_sources([*np.random.default_rng(2).integers(5, 15, 90).tolist(), 100])
    short = {line: source for line, source in both.items() if len(source) < 100}
    long = {line: source for line, source in both.items() if line not in short}
    computed = [
        find(table, sources, batch_size=32, max_extra_tokens=20)[1].usage.computed
        for sources in (short, long, both)
    ]
    assert computed[2] == computed[0] + computed[1]


def test_a_source_of_thousands_of_tokens_is_searched_where_positions_allow_it():
    """Nobody is alive when it comes, and its width is more than four times any fixed one."""
    sources = make_sources([9, 1100])
    runner = BatchRunner([Table()], [jnp.asarray(make_table(eos=9.0))], 8, max_positions=5000)
    options = Options(beam_size=1, max_extra_tokens=2)
    found = runner.search(sources, {line: [] for line in sources}, options)
    assert sorted(line for batch, _ in found for line in batch) == [1, 2]


def test_a_seed_that_would_be_cut_is_refused():
    Options(seed=2**32 - 1)
    with pytest.raises(ValueError, match=r"seed must be less than 2\*\*32; got 4294967296"):
        Options(seed=2**32)


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"scores": 1}, "scores must be True or False; got 1."),
        ({"early_stopping": "no"}, "early_stopping must be True or False; got 'no'."),
        ({"suppressed": 7}, "suppressed must be several ids; got 7."),
        ({"suppressed": (5.0,)}, "suppressed must be ids, whole numbers; got (5.0,)."),
        ({"length_penalty": True}, "length_penalty must be a number; got True."),
        ({"min_length": 1 << 30}, "min_length must be less than 2**30; got 1073741824."),
        ({"length_penalty": "1"}, "length_penalty must be a number; got '1'."),
        ({"beam_size": 4.0}, "beam_size must be a whole number; got 4.0."),
        ({"beam_size": 1, "n_best": 2}, "n_best must be from 1 to beam_size"),
        ({"length_penalty": -1.0}, "length_penalty must be at least 0"),
        ({"suppressed": (0,)}, "suppressed must be ids from 4 on; got (0,)."),
        ({"max_extra_tokens": 0}, "max_extra_tokens must be at least 1; got 0."),
    ],
)
def test_an_option_of_another_type_or_out_of_range_is_refused(settings, error):
    init = inspect.unwrap(Options.__init__)  # without these tests' own check of types
    with pytest.raises(ValueError, match=re.escape(error)):
        init(object.__new__(Options), **settings)

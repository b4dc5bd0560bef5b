"""benchmarks/accelerators.py and hlo.py: what they read from a compiled program, and the FLOPs."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
import accelerators
import hlo
from common import flops_of_source, flops_of_target

from flaxformer_min.config import Config, DataConfig, ModelConfig
from flaxformer_min.kernels.backend import compiling_for
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import Batch, Tokens
from flaxformer_min.training.step import gradient_sums, initial_state, randomness

PROGRAM = """\
HloModule jit_step

%fused (a: f32[4]) -> f32[4] {
  ROOT %inside = f32[4]{0} add(%a, %a), backend_config={"estimated_cycles":"999"}
}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%state), index=1
  %twice = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/loop/mul"}, \
backend_config={"window_config":{"estimated_cycles":"70"}}
  ROOT %next = (s32[], f32[4]{0}) tuple(%state, %twice)
}

%condition (state: (s32[], f32[4])) -> pred[] {
  %state = (s32[], f32[4]{0}) parameter(0)
  %turn = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(10)
  ROOT %less = pred[] compare(%turn, %limit), direction=LT
}

%until (state: (s32[], f32[4])) -> pred[] {
  %state = (s32[], f32[4]{0}) parameter(0)
  ROOT %go = pred[] custom-call(%state), custom_call_target="decide"
}

ENTRY %main (p: f32[8,4]) -> f32[4] {
  %p = f32[8,4]{1,0:T(8,128)} parameter(0)
  %zero = s32[] constant(0)
  %first = bf16[4]{0} fusion(%p), kind=kLoop, calls=%fused, \
metadata={op_name="jit(f)/transpose(jvp(T))/decoder/layer_1/norm/add"}, \
backend_config={"estimated_cycles":"300"}
  %sum = f32[4]{0} all-reduce(%first), to_apply=%fused
  %start = (s32[], f32[4]{0}) tuple(%zero, %sum)
  %loop = (s32[], f32[4]{0}) while(%start), condition=%condition, body=%body
  %open = (s32[], /*index=1*/f32[4]{0}) while(%loop), condition=%until, body=%body
  ROOT %result = f32[4]{0} get-tuple-element(%open), index=1
}
"""


@pytest.fixture
def program():
    return hlo.parse(PROGRAM)


def test_a_loop_counts_as_often_as_it_turns(program):
    """300 once, 70 in each of 10 turns, and 70 once in the loop whose end the data decide."""
    cycles = {"loop mul": 70 * 10 + 70, "decoder norm add, backward": 300}
    assert hlo.cycles_by_group(program) == cycles
    assert hlo.loops(program) == [("loop", 10, 70), ("open", None, 70)]


def test_a_kernel_moves_its_operands_and_its_result(program):
    """`first` reads 8 x 4 x 4 bytes and writes 4 x 2; `sum` reads 4 x 2 and writes 16.

    What a fusion contains does not run on its own: 1 + 1 in the main computation, 10 + 1 in loops.
    """
    kernels = [times for each, times in hlo.executed(program) if hlo.is_kernel(each)]
    assert sum(kernels) == 13
    assert hlo.bytes_moved(program) == (128 + 8) + (8 + 16) + 11 * (16 + 16)
    assert hlo.collectives(program) == {"all-reduce": (1, 16)}


def test_a_turn_has_those_of_the_loops_inside_it_if_they_are_known(program):
    """`outer` has 5 cycles of its own beside the loop of ten turns; the open one counts nothing."""
    outer = """\
%outer_body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %own = f32[4]{0} add(%state, %state), backend_config={"estimated_cycles":"5"}
  %ten = (s32[], f32[4]{0}) while(%state), condition=%condition, body=%body
  ROOT %some = (s32[], f32[4]{0}) while(%ten), condition=%until, body=%body
}

"""
    text = PROGRAM.replace("ENTRY", outer + "ENTRY").replace(
        "%until, body=%body\n  ROOT %r", "%until, body=%outer_body\n  ROOT %r"
    )
    turns = {name: cycles for name, _, cycles in hlo.loops(hlo.parse(text))}
    assert turns == {"loop": 70, "ten": 70, "some": 70, "open": 5 + 10 * 70}


def test_an_array_without_an_estimate_is_named(program):
    text = PROGRAM.replace("[4]", "[4000]").replace('"estimated_cycles":"300"', "")
    assert hlo.without_estimate(hlo.parse(text)) == ["first", "sum"]


def test_the_model_flops_are_those_of_a_count_by_hand():
    """One layer, d_model 2, d_ff 3, vocabulary 5; a source of 2 tokens, a target of 3.

    Each product of [a b] and [b c] is 2abc. Of a source token: query, key, value, output 4 x 8, the
    feed-forward network 2 x 12, keys and values of cross-attention 2 x 8; scores and sums of 2 x 2
    pairs take 2 x 4 each. Of a target token: self-attention 4 x 8, query and output of
    cross-attention 2 x 8, feed-forward 2 x 12, logits 20; 1 + 2 + 3 earlier tokens and 3 x 2 of the
    source are attended to at 8 each.
    """
    sizes = {"num_layers": 1, "d_model": 2, "d_ff": 3}
    assert flops_of_source(sizes, np.array([2])) == 2 * (32 + 24 + 16) + 4 * 8
    found = flops_of_target(sizes, 5, np.array([3]), np.array([2]))
    assert found == 3 * (32 + 16 + 24 + 20) + (6 + 6) * 8


def test_the_flops_of_a_batch_are_those_of_rows_that_a_sentence_fills():
    sizes = ModelConfig(num_layers=1, d_model=2, d_ff=3, num_heads=1, vocab_size=5)
    data = DataConfig(source_row_length=8, target_row_length=8, rows_per_batch=6)
    # Of a row: 8 tokens of each side, 64 pairs in the encoder, 36 and 64 in the decoder.
    expected = 6 * (8 * 72 + 64 * 8 + 8 * 92 + (36 + 64) * 8)
    assert accelerators.model_flops(Config(data=data, model=sizes)) == expected


TPU, H100 = {"platform": "tpu"}, {"platform": "gpu", "compute_capability": "9.0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "target, attention, remat",
    [(TPU, "explicit", "none"), (H100, "fused", "none"), (H100, "fused", "selective")],
)
def test_what_is_compiled_for_an_accelerator_computes_what_a_cpu_does(target, attention, remat):
    """The loss and every gradient, in float32 and without dropout, whose masks differ.

    Fused attention computes other numbers for padding, which may change no gradient.
    """
    sizes = {"vocab_size": 23, "num_layers": 2, "d_model": 12, "d_ff": 20, "num_heads": 3}
    options = {"dropout": 0.0, "dtype": "float32"}
    model = Transformer(ModelConfig(**sizes, **options))
    other = Transformer(ModelConfig(**sizes, **options, attention=attention, remat=remat))
    config = Config(model=model.config)
    state = jax.jit(lambda: initial_state(model, config, jax.numpy.uint32(3)))()
    numbers, segments = np.random.default_rng(0), np.repeat([[1, 1, 1, 2, 2, 0]], 4, 0)
    positions = np.repeat([[0, 1, 2, 0, 1, 0]], 4, 0)
    sides = (
        Tokens(*map(np.int32, (numbers.integers(4, 23, (4, 6)), positions, segments)))
        for _ in range(2)
    )
    batch = jax.tree.map(jax.numpy.asarray, Batch(*sides))

    def gradients(model, target):
        with compiling_for([SimpleNamespace(**target)]):
            random = randomness(state, 0, 0, 4, config.training)
            return gradient_sums(model, state.params, batch, random, config.training)

    ours = jax.jit(lambda: gradients(other, target))()
    theirs = jax.jit(lambda: gradients(model, {"platform": "cpu"}))()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, theirs)


def run(*arguments, **environment):
    """Run it without the tests' own XLA_FLAGS, some of which libtpu does not know."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "benchmarks/accelerators.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": "", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("target, extra", [("v5e:2x4", "aot"), ("h100:1", "cuda")])
def test_a_target_without_its_compiler_is_an_error_that_names_the_extra(monkeypatch, target, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=rf"not installed. pip install .*\[{extra}\]"):
        accelerators.devices_of(target)


SMALL = (
    *("--programs", "train", "eval", "search", "--rows", "16", "--sentences", "32"),
    *("--model.num-layers", "1", "--model.d-model", "128", "--model.d-ff", "256"),
    *("--model.num-heads", "2", "--model.vocab-size", "512", "--model.dtype", "bfloat16"),
)


def needs(package, extra):
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"needs the extra {extra}"
    )


def figures_of(file):
    return {row["figure"]: row for row in json.loads(file.read_text())["programs"]}


@pytest.mark.slow
@needs("libtpu", "aot")
def test_a_small_model_compiles_for_a_tpu(tmp_path):
    """Training, evaluation and search, each with memory, an estimate and its dearest groups."""
    found = run(
        *("--target", "v5e:2x4", *SMALL, "--json", str(tmp_path / "found.json")),
        *("--hlo", str(tmp_path)),
        LIBTPU_INIT_ARGS="--xla_tpu_prefuse_self_attention=true",
    )
    assert found.returncode == 0, found.stderr
    assert ", --xla_tpu_prefuse_self_attention=true, compiled" in found.stdout
    figures = figures_of(tmp_path / "found.json")
    assert 0 < figures["MFU, %"]["train"] < 100
    # Three times the forward pass, by definition.
    forward = figures["model TFLOP"]["eval"]
    assert figures["model TFLOP"]["train"] == pytest.approx(3 * forward)
    assert figures["collectives"]["train"] >= 1
    assert figures["a step, ms"]["search"] > 0
    program = hlo.parse((tmp_path / "v5e-2x4-search.txt").read_text())
    steps = [turns for _, turns, _ in hlo.loops(program) if turns is None]
    assert len(steps) == 3, "the loop of a batch of 32 sentences, of half and of a quarter"
    tables = json.loads((tmp_path / "found.json").read_text())
    shares = [row["share, %"] for row in tables["dearest groups"] if row["program"] == "train"]
    assert shares == sorted(shares, reverse=True) and sum(shares) <= 100


@pytest.mark.slow
@needs("jax_cuda12_plugin", "cuda")
def test_a_small_model_compiles_for_a_gpu(tmp_path):
    """Training, evaluation and search, each with its kernels and the bytes that they move."""
    found = run("--target", "h100:1", *SMALL, "--json", str(tmp_path / "found.json"))
    assert found.returncode == 0, found.stderr
    figures = figures_of(tmp_path / "found.json")
    for program in ("train", "eval", "search"):
        assert figures["kernels"][program] > 0 and figures["moved, GB"][program] > 0

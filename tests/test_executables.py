"""Compiled programs that later processes find: the same translations, and nothing traced."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from tiny_run import make_tiny_run

from flaxformer_min.decoding.batching import BatchRunner
from flaxformer_min.decoding.translator import Translator
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.runtime import executables

LINES = ["the red house has 3 doors", "the blue house", "the green house has doors"]
PAIRS = [(line, line) for line in LINES]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("runs") / "tiny")


def keeping(run, folder, **settings):
    translator = Translator.load(run, **settings)
    translator.keep_programs(folder)
    return translator


@pytest.fixture(scope="module")
def kept(run, tmp_path_factory):
    """A folder with the programs of a greedy search and of scoring, and what they returned."""
    folder = tmp_path_factory.mktemp("kept")
    translator = keeping(run, folder)
    found = translator.translate(LINES, beam_size=1)
    return folder, found, translator.score(PAIRS)


@pytest.fixture
def compiles_nothing(monkeypatch):
    def compile_program(runner, key, *arguments):
        raise AssertionError(f"{key} is compiled")

    monkeypatch.setattr(BatchRunner, "_compile", compile_program)


def programs(folder):
    return sorted(Path(folder).glob("*.program"))


def test_a_kept_program_is_neither_traced_nor_compiled_again(
    run, kept, compiles_nothing, monkeypatch
):
    folder, found, scores = kept
    for method in ("encode", "decode_step", "prefill", "hidden_states", "logits"):
        monkeypatch.setattr(Transformer, method, None)
    later = keeping(run, folder)
    assert later.translate(LINES, beam_size=1) == found
    assert later.score(PAIRS) == scores
    assert later.runner.compilations == len(programs(folder))


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [1, 4])
def test_pools_that_are_found_search_as_those_that_were_compiled(
    run, tmp_path, beam_size, monkeypatch
):
    """Many lines of several lengths: sentences move between pools, pause, and finish in turn."""
    lines = [" ".join(LINES[:1] * (1 + number % 7)) for number in range(90)]
    plain = Translator.load(run).translate(lines, beam_size=beam_size)
    first = keeping(run, tmp_path)
    assert first.translate(lines, beam_size=beam_size) == plain
    assert first.runner.compilations == len(programs(tmp_path)) > 1
    monkeypatch.setattr(BatchRunner, "_compile", None)
    assert keeping(run, tmp_path).translate(lines, beam_size=beam_size) == plain


@pytest.mark.slow
def test_another_process_finds_what_a_command_has_compiled(run, tmp_path):
    """The commands keep their programs in the folder of jax's own, unless that is disabled."""
    command = [sys.executable, "-m", "flaxformer_min", "translate", str(run), "--beam-size", "1"]

    def translate(**environment):
        done = subprocess.run(
            command,
            input="\n".join(LINES),
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)} | environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    found = translate(JAX_ENABLE_COMPILATION_CACHE="false")
    assert not [*tmp_path.iterdir()]
    assert translate() == found
    before = {path: path.stat().st_mtime_ns for path in programs(tmp_path / "ready")}
    assert before
    assert translate() == found
    assert {path: path.stat().st_mtime_ns for path in programs(tmp_path / "ready")} == before


def test_a_program_that_jax_has_cached_is_kept_as_well(run, tmp_path, monkeypatch):
    """What jax's cache returns for a CPU could not be stored once more."""
    expected = Translator.load(run).score(PAIRS)
    assert keeping(run, tmp_path).score(PAIRS) == expected
    monkeypatch.setattr(BatchRunner, "_compile", None)
    assert keeping(run, tmp_path).score(PAIRS) == expected


def test_jax_keeps_its_own_cache_for_all_else(run, tmp_path):
    before = {path.name for path in Path(jax.config.jax_compilation_cache_dir).iterdir()}
    keeping(run, tmp_path).score(PAIRS)
    jax.jit(lambda x: x * 7 + 5.25)(2.0)
    after = {path.name for path in Path(jax.config.jax_compilation_cache_dir).iterdir()}
    assert [name for name in after - before if name.startswith("jit__lambda")]


@pytest.fixture
def asked_again():
    """What is the same for all programs of a process is asked for again."""
    executables._platform.cache_clear()
    yield
    executables._platform.cache_clear()


def changed_source(monkeypatch):
    monkeypatch.setattr(executables, "_source_digest", lambda: "another")


def changed_cpu(monkeypatch):
    monkeypatch.setattr(executables, "_cpu", lambda: ["flags : sse2"])


def changed_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " ")


def changed_versions(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.0.1")


@pytest.mark.parametrize("change", [changed_source, changed_cpu, changed_flags, changed_versions])
def test_a_program_is_not_found_where_it_would_be_compiled_differently(
    run, kept, compiles_nothing, asked_again, monkeypatch, change
):
    change(monkeypatch)
    with pytest.raises(AssertionError, match="score.* is compiled"):
        keeping(run, kept[0]).score(PAIRS)


def test_a_program_is_not_found_under_another_option_of_jax(run, kept, compiles_nothing):
    translator = keeping(run, kept[0])
    with (
        jax.default_matmul_precision("highest"),
        pytest.raises(AssertionError, match="score.* is compiled"),
    ):
        translator.score(PAIRS)


@pytest.mark.parametrize("settings", [{"norm": "pre"}, {"d_ff": 32}, {"num_heads": 4}])
def test_a_program_is_not_found_for_another_model(kept, compiles_nothing, tmp_path, settings):
    """Its parameters may have the same shapes."""
    other = keeping(make_tiny_run(tmp_path / "run", **settings), kept[0])
    with pytest.raises(AssertionError, match="score.* is compiled"):
        other.score(PAIRS)


def test_a_program_is_not_found_for_another_type_of_computations(run, kept, compiles_nothing):
    other = keeping(run, kept[0], dtype="bfloat16")
    with pytest.raises(AssertionError, match="score.* is compiled"):
        other.score(PAIRS)


def test_a_program_is_not_found_for_parameters_of_another_type(run, kept, compiles_nothing):
    other = Translator.load(run)
    other.use_params([jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), other.runner.params[0])])
    other.keep_programs(kept[0])
    with pytest.raises(AssertionError, match="score.* is compiled"):
        other.score(PAIRS)


@pytest.mark.parametrize(
    "damage",
    [lambda content: b"", lambda content: content[:-100], lambda content: b"x" + content],
    ids=["empty", "cut", "shifted"],
)
def test_a_damaged_program_is_compiled_anew_and_replaced(run, kept, tmp_path, damage, monkeypatch):
    folder, _, scores = kept
    for path in programs(folder):
        (tmp_path / path.name).write_bytes(damage(path.read_bytes()))
    assert keeping(run, tmp_path).score(PAIRS) == scores
    monkeypatch.setattr(BatchRunner, "_compile", None)
    assert keeping(run, tmp_path).score(PAIRS) == scores


def test_a_folder_that_cannot_be_written_does_no_harm(run, kept, tmp_path):
    (tmp_path / "file").write_text("")
    assert keeping(run, tmp_path / "file" / "folder").score(PAIRS) == kept[2]


class Mine(Transformer):
    """A model of one's own."""


class MyAttention(nn.Module):
    """An attention of one's own."""


@pytest.mark.parametrize(
    "own",
    [
        lambda config: Mine(config),
        lambda config: Transformer(config, position_function=lambda *_: None),
        lambda config: Transformer(config, encoder_attention=MyAttention),
    ],
    ids=["model", "positions", "attention"],
)
def test_programs_with_code_of_ones_own_are_not_kept(run, tmp_path, own):
    """It may change while nothing of this package does."""
    translator = Translator.load(run)
    runner = translator.runner
    other = BatchRunner([own(runner.models[0].config)], runner.params)
    other.keep_programs(tmp_path)
    assert other._executables is None
    runner.keep_programs(tmp_path)
    assert runner._executables is not None


def test_an_accelerator_keeps_no_programs(run, tmp_path):
    runner = Translator.load(run).runner
    runner.kind = "accelerator"
    runner.keep_programs(tmp_path)
    assert runner._executables is None


@pytest.mark.parametrize(
    "folder, enabled, found",
    [
        ("/cache", True, Path("/cache/ready")),
        ("/cache", False, None),
        ("gs://bucket/cache", True, None),
        ("", True, None),
        (None, True, None),
    ],
)
def test_the_folder_is_in_that_of_jax(monkeypatch, folder, enabled, found):
    class Config:
        jax_compilation_cache_dir = folder
        jax_enable_compilation_cache = enabled

    monkeypatch.setattr(executables, "jax", type("jax", (), {"config": Config}))
    assert executables.executables_folder() == found


def test_what_linux_tells_of_a_cpu_is_what_programs_depend_on(tmp_path, monkeypatch):
    """Not its clock, and not how many there are."""
    core = "processor\t: {}\nvendor_id\t: A\ncpu MHz\t\t: {}\nmodel\t\t: 1\nflags\t\t: fpu sse2\n"
    monkeypatch.setattr(executables, "CPU_INFO", tmp_path / "cpuinfo")
    executables.CPU_INFO.write_text(core.format(0, 2445.4) + "\n" + core.format(1, 3000.0))
    assert executables._cpu() == ["vendor_id\t: A", "model\t\t: 1", "flags\t\t: fpu sse2"]
    executables.CPU_INFO.unlink()
    assert len(executables._cpu()) == 1

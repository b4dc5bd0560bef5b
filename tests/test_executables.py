"""Compiled programs that later processes find: the same translations, and nothing traced."""

import dataclasses
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import jaxlib
import pytest
from flax import linen as nn
from tiny_run import make_tiny_run

from flaxformer_min.decoding.batching import BatchRunner
from flaxformer_min.decoding.choices import Sampling
from flaxformer_min.decoding.pool import PoolShape
from flaxformer_min.decoding.search import Rules
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


def test_threads_compile_one_after_the_other(run, kept, tmp_path, monkeypatch):
    """They switch jax's cache off meanwhile, for the whole process."""
    Translator.load(run).score(PAIRS)  # jax's cache has it
    translators = [keeping(run, tmp_path / str(number)) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda each: each.score(PAIRS), translators)]
    assert found == [kept[2]] * 4
    assert jax.config.jax_enable_compilation_cache
    monkeypatch.setattr(BatchRunner, "_compile", None)
    for number in range(4):
        assert keeping(run, tmp_path / str(number)).score(PAIRS) == kept[2]


def test_jax_keeps_its_own_cache_for_all_else(run, tmp_path):
    before = {path.name for path in Path(jax.config.jax_compilation_cache_dir).iterdir()}
    keeping(run, tmp_path).score(PAIRS)
    jax.jit(lambda x: x * 7 + 5.25)(2.0)
    after = {path.name for path in Path(jax.config.jax_compilation_cache_dir).iterdir()}
    assert [name for name in after - before if name.startswith("jit__lambda")]


@pytest.fixture
def asked_again():
    """The versions and the CPU are asked for again."""
    executables._platform.cache_clear()
    yield
    executables._platform.cache_clear()


CHANGES = {
    "source": lambda patch: patch.setattr(executables, "SOURCE", "another"),
    "cpu": lambda patch: patch.setattr(executables, "_cpu", lambda: ["flags : sse2"]),
    "flags": lambda patch: patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --one"),
    "python": lambda patch: patch.setattr(sys, "version", "3.0"),
    "jax": lambda patch: patch.setattr(jax, "__version__", "0.0.1"),
    "jaxlib": lambda patch: patch.setattr(jaxlib, "__version__", "0.0.1"),
    "flax": lambda patch: patch.setattr(flax, "__version__", "0.0.1"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_program_is_not_found_where_it_would_be_compiled_differently(
    run, kept, compiles_nothing, asked_again, monkeypatch, change
):
    change(monkeypatch)
    with pytest.raises(AssertionError, match="score.* is compiled"):
        keeping(run, kept[0]).score(PAIRS)


def test_the_content_of_a_file_of_flags_counts(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    (tmp_path / "flags").write_text("--xla_one=1")
    assert executables._xla_flags() == "--xla_one=1"
    (tmp_path / "flags").unlink()
    assert executables._xla_flags() == str(tmp_path / "flags")


@pytest.fixture
def source(monkeypatch, tmp_path):
    """The folder of a package of two files, whose digest is asked for."""
    folder = tmp_path / "package"
    (folder / "runtime").mkdir(parents=True)
    (folder / "model.py").write_text("one")
    (folder / "runtime" / "executables.py").write_text("two")
    monkeypatch.setattr(executables, "__file__", str(folder / "runtime" / "executables.py"))
    return folder


def test_any_change_of_the_package_is_seen(source):
    digests = [executables._source_digest()]
    (source / "model.py").write_text("One")
    digests.append(executables._source_digest())
    (source / "model.py").rename(source / "models.py")
    digests.append(executables._source_digest())
    (source / "runtime" / "more.py").write_text("")
    digests.append(executables._source_digest())
    assert len({*digests}) == 4
    (source / "runtime" / "notes.txt").write_text("no code")
    assert executables._source_digest() == digests[-1]


def test_nothing_is_kept_of_a_package_that_has_no_readable_files(
    source, run, kept, monkeypatch, tmp_path
):
    (source / ".#model.py").symlink_to("an editor's lock")
    assert executables._source_digest() is None
    for path in source.rglob("*.py"):
        path.unlink()
    assert executables._source_digest() is None
    monkeypatch.setattr(executables, "SOURCE", None)
    assert keeping(run, tmp_path / "kept").score(PAIRS) == kept[2]
    assert not programs(tmp_path / "kept")


def test_nothing_is_kept_once_files_have_changed_behind_the_code_in_memory(
    run, kept, monkeypatch, tmp_path
):
    monkeypatch.setattr(executables, "_source_digest", lambda: "that of a later version")
    assert keeping(run, tmp_path).score(PAIRS) == kept[2]
    assert not programs(tmp_path)


def test_each_rule_of_a_search_has_programs_of_its_own(run, tmp_path):
    runner = keeping(run, tmp_path).runner
    shape = PoolShape(8, 8, 24, 48, 74)
    changes = [
        {},
        {"beam_size": 5},
        {"n_best": 2},
        {"length_penalty": 0.5},
        {"min_length": 3},
        {"early_stopping": False},
        {"suppressed": (5,)},
        {"sampling": Sampling()},
        {"sampling": Sampling(temperature=0.5)},
        {"scores": False},
    ]
    assert {name for change in changes for name in change} == {
        field.name for field in dataclasses.fields(Rules)
    }
    keys = [("run", Rules(**change), shape) for change in changes]
    keys += [
        ("run", Rules(), dataclasses.replace(shape, **{field.name: 1}))
        for field in dataclasses.fields(shape)
    ]
    path = runner._executables._path
    paths = {path(runner._key_on_disk(key)) for key in keys}
    assert len(paths) == len(changes) + len(dataclasses.fields(shape))
    runner.cores += 1
    assert path(runner._key_on_disk(keys[0])) not in paths


def test_each_model_of_an_ensemble_counts(run, kept, compiles_nothing, tmp_path):
    one = Translator.load(run).runner
    other = Translator.load(make_tiny_run(tmp_path / "run", norm="pre")).runner
    paths = set()
    for second in one, other:
        both = BatchRunner([*one.models, *second.models], [*one.params, *second.params])
        both.keep_programs(tmp_path)
        paths.add(both._executables._path(both._key_on_disk("score")))
    assert len(paths) == 2


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


@pytest.mark.parametrize("order", [1, -1], ids=["replaced before", "replaced after"])
def test_a_program_is_not_found_for_parameters_of_another_type(run, kept, compiles_nothing, order):
    other = Translator.load(run)
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), other.runner.params[0])
    calls = [lambda: other.use_params([halves]), lambda: other.keep_programs(kept[0])]
    for call in calls[::order]:
        call()
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


def test_a_program_under_the_name_of_another_is_compiled_anew_and_replaced(run, kept, tmp_path):
    """It may have the same shapes, and search by other rules."""
    folder, translation, scores = kept
    names = sorted(path.name for path in programs(folder))
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        (tmp_path / other).write_bytes((folder / name).read_bytes())
    translator = keeping(run, tmp_path)
    assert translator.score(PAIRS) == scores
    assert translator.translate(LINES, beam_size=1) == translation


def test_the_folder_is_known_while_a_program_is_compiled(tmp_path):
    """For which jax's cache is disabled in the whole process."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        with ThreadPoolExecutor() as executor:
            with executables._without_jax_cache():
                found = executor.submit(executables.executables_folder)
                time.sleep(0.1)
            assert found.result() == tmp_path / "ready"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


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


def test_programs_depend_on_the_model_and_the_instructions_of_the_cpu(tmp_path, monkeypatch):
    """Not its clock, and not how many there are."""
    core = "processor\t: {}\nvendor_id\t: A\ncpu MHz\t\t: {}\nmodel\t\t: 1\nflags\t\t: fpu sse2\n"
    monkeypatch.setattr(executables, "CPU_INFO", tmp_path / "cpuinfo")
    executables.CPU_INFO.write_text(core.format(0, 2445.4) + "\n" + core.format(1, 3000.0))
    assert executables._cpu() == ["vendor_id\t: A", "model\t\t: 1", "flags\t\t: fpu sse2"]
    executables.CPU_INFO.unlink()
    assert len(executables._cpu()) == 1

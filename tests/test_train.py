"""train.py: what a run leaves, and that a cut leaves no trace."""

import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import train
from benchmarks.crash import differences, leftovers, newest, write_corpus
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.runs.checkpoint import Checkpoints
from flaxformer_min.runs.folder import RunFolder
from flaxformer_min.training.metrics import read_metrics
from flaxformer_min.training.step import init_state

CONFIG = """
from flaxformer_min.config import *

config = Config(
    data=DataConfig(corpus={corpus!r}, languages="en-es", source_row_length=24,
                    target_row_length=24, rows_per_batch=4),
    model=ModelConfig(vocab_size=300, num_layers=1, d_model=16, d_ff=16, num_heads=2, {model}),
    training=TrainingConfig(steps=9, warmup_steps=5, log_every=4, validate_every=6, save_every=3,
                            validation_sentences=0, keep_checkpoints=2, {training}),
)
"""

make_train_step = functools.cache(train.make_train_step)
make_eval_step = functools.cache(train.make_eval_step)
first_state = functools.cache(train.init_state)


@pytest.fixture(autouse=True)
def programs_are_shared(monkeypatch):
    """Among runs of one config: to trace them takes longer than to train a tiny model."""
    monkeypatch.setattr(train, "make_train_step", make_train_step)
    monkeypatch.setattr(train, "make_eval_step", make_eval_step)
    copied = functools.partial(jax.tree.map, jnp.copy)  # for it is donated

    def init_state(model, training, meanwhile):
        state = first_state(model, training)
        meanwhile(state)
        return copied(state)

    monkeypatch.setattr(train, "init_state", init_state)


def write_config(folder, model="", training=""):
    path = folder / "tiny.py"
    corpus = write_corpus(folder / "corpus", {"train": 100, "val": 40})
    path.write_text(CONFIG.format(corpus=corpus, model=model, training=training))
    return str(path)


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


def run(config, workdir, *overrides):
    return train.main([config, "--workdir", str(workdir), *overrides])


def cut(config, workdir, step, *overrides):
    """Train, and be asked to end while this step is taken."""
    timing = train.timing_the_first

    def asking(train_step):
        def ask(state, batch):
            result = train_step(state, batch)
            if int(result[0].step) == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        return ask

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "timing_the_first", lambda train_step: asking(timing(train_step)))
        assert run(config, workdir, *overrides) == 143
    assert str(step) in os.listdir(workdir / "checkpoints")


@pytest.mark.parametrize(
    "batches, cuts, model, training, data",
    [
        pytest.param(4, (1, 2, 3, 4, 7), "", "", [], id="post-norm"),
        pytest.param(
            2, (2, 5), "norm='pre'", "gradient_accumulation=2", [], id="pre-norm, accumulating"
        ),
        pytest.param(4, (3, 5), "", "", ["--data.workers", "1"], id="worker processes"),
        pytest.param(
            4,
            (4, 7, 8),
            "",
            "ema_decay=0.9, r_drop=1.0, cooldown_steps=5, average_checkpoints=2",
            [],
            id="all that regularises",
        ),
    ],
)
def test_a_run_cut_anywhere_equals_the_uncut_run_bit_for_bit(
    tmp_path, capsys, batches, cuts, model, training, data
):
    """Parameters, optimizer, key, place in the rows, and all metrics but the clock's; dropout on.

    Cuts lie within an epoch and at its end; right before, at and right after a save, which comes
    every 3 steps; within the 4 steps of a line of metrics.
    """
    config = write_config(tmp_path, model, training)
    assert run(config, tmp_path / "uncut") == 0
    assert f"an epoch: {batches} batches" in capsys.readouterr().out
    for step in cuts:
        cut(config, tmp_path / "cut", step, *data)
    assert run(config, tmp_path / "cut", *data) == 0
    assert differences(tmp_path / "uncut", tmp_path / "cut") == []
    step, *params = (RunFolder(tmp_path / name).params() for name in ("uncut", "cut"))
    jax.tree.map(np.testing.assert_array_equal, step, *params)


def test_a_run_that_ended_is_lengthened_as_if_it_had_been_longer_from_the_start(tmp_path, config):
    """All but the validation at the first end, which the longer run has not: a rank, and a line."""
    assert run(config, tmp_path / "long") == 0
    assert run(config, tmp_path / "short", "--training.steps", "5") == 0
    assert run(config, tmp_path / "short") == 0
    found = differences(tmp_path / "long", tmp_path / "short")
    known = ("metrics:", "the number of metrics: 4 and 5", "the description of step 9")
    assert all(text.startswith(known) for text in found)
    metas = [newest(tmp_path / name)[2] for name in ("long", "short")]
    assert len(metas[0].pop("ranks")) == len(metas[1].pop("ranks")) - 1
    assert metas[0] == metas[1]
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("long", "short")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_a_run_that_had_cooled_down_and_is_lengthened_is_told_apart(tmp_path, capsys):
    """What came before is not what a longer run would have learned."""
    config = write_config(tmp_path, "", "cooldown_steps=3")
    for steps, warned in ((6, False), (6, False), (9, True)):
        assert run(config, tmp_path / "run", "--training.steps", str(steps)) == 0
        said = capsys.readouterr().out
        assert ("for the run was cooling down" in said) == warned
    cut(config, tmp_path / "early", 2, "--training.steps", "6")
    capsys.readouterr()
    assert run(config, tmp_path / "early") == 0
    assert "warning" not in capsys.readouterr().out, "before its cooldown"
    cut(config, tmp_path / "shortened", 5)
    capsys.readouterr()
    assert run(config, tmp_path / "shortened", "--training.steps", "6") == 0
    assert "for the run was not cooling down yet; one of 6 steps" in capsys.readouterr().out


def test_a_run_goes_on_with_another_number_of_devices(tmp_path):
    """The same rows, and equal to rounding, from one device to two and from two to one."""
    config = write_config(tmp_path, "dropout=0.0", "adam_epsilon=1e-3")  # which hides noise
    first = ["--training.steps", "5"]
    uncut, growing, shrinking = (tmp_path / name for name in ("uncut", "growing", "shrinking"))
    assert run(config, shrinking, *first) == 0
    on_one_device = (
        f"import sys, train; sys.exit(train.main([{config!r}, '--workdir', {str(growing)!r}, "
        f"*{first!r}]) or train.main([{config!r}, '--workdir', {str(shrinking)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", on_one_device],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 cpu device ") == 2
    for workdir in (uncut, growing):
        assert run(config, workdir) == 0
    _, expected, description = newest(uncut)
    for workdir in (growing, shrinking):
        _, found, meta = newest(workdir)
        assert meta["rows"] == description["rows"]
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
            (found["params"], found["opt_state"]),
            (expected["params"], expected["opt_state"]),
        )


@pytest.fixture(params=["disk", "file size"])
def limited(request, tmp_path):
    """A folder, how to leave no room for a checkpoint in it, and how to make room again."""
    folder = tmp_path / "limited"
    folder.mkdir()
    if request.param == "file size":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE)
        yield folder, lambda: limit((20_000, hard)), lambda: limit((soft, hard))
        limit((soft, hard))
        return

    def mount(*options):
        return subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode

    def fill():
        space = os.statvfs(folder)
        used = (space.f_blocks - space.f_bfree) * space.f_frsize
        assert mount("-o", f"remount,size={used + 100_000}") == 0

    if not shutil.which("mount") or mount("-t", "tmpfs", "-o", "size=16m", "tmpfs"):
        pytest.skip("it takes root to mount a disk of 16 MB")
    yield folder, fill, lambda: mount("-o", "remount,size=16m")
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


# What TensorStore has to say of a write that failed may come when nobody listens any more.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_stops_training_and_costs_only_what_was_not_saved(
    config, tmp_path, limited, capsys, failed_transfers
):
    """A file system without room, and one that refuses to write a large file."""
    folder, fill, make_room = limited
    often = ["--training.save-every", "2"]
    assert run(config, tmp_path / "uncut", *often) == 0
    cut(config, folder / "run", 3, *often)
    fill()
    capsys.readouterr()
    status, error = run(config, folder / "run", *often), capsys.readouterr().err
    make_room()
    assert status == 2
    assert re.fullmatch(
        "train.py: error: a checkpoint must be written whole; in .*/limited/run/checkpoints: "
        "(No space left on device|File too large). Those before it are whole. Make room, and "
        "start again to go on from the newest.\n",
        error,
    )
    assert newest(folder / "run")[0] == 3
    assert run(config, folder / "run", *often) == 0
    assert differences(tmp_path / "uncut", folder / "run") == []
    assert leftovers(folder / "run") == []


def test_a_test_split_without_text_costs_only_its_score(config, tmp_path, capsys):
    """Training may have taken days."""
    for language in ("en", "es"):
        (tmp_path / "corpus" / f"test.{language}").write_text("\n \n")
    train.score_test_set(train.RunFolder(tmp_path / "run"), train.read_arguments([config]))
    assert "No test score: " in capsys.readouterr().out


def test_a_run_folder_holds_all_that_is_needed(config, tmp_path, capsys):
    assert run(config, tmp_path / "run") == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "config.json",
        "tokenizer.model",
        "checkpoints",
        "metrics.jsonl",
        "tensorboard",
        "lock",
    }
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    assert content["format_version"] == 1
    assert content["data"]["languages"] == "en-es"
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {
        "loss",
        "accuracy",
        "learning_rate",
        "gradient_norm",
        "tokens_per_second",
        "padding",
    } <= set(lines[0])
    assert {"validation_loss", "validation_perplexity"} <= set(lines[1])
    printed = capsys.readouterr().out
    for text in (
        "100 pairs read",
        "pieces a word",
        "padding",
        "M parameters",
        "flaxformer-min translate",
    ):
        assert text in printed
    assert "suit this text better" not in printed
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_rows_that_suit_the_text_badly_are_told_with_those_that_would(config, tmp_path, capsys):
    arguments = ["--training.steps", "1", "--data.target-row-length", "48"]
    assert run(config, tmp_path / "run", *arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"better: --data.source-row-length 4\d --data.target-row-length 48\n", printed)


def test_other_settings_in_an_existing_run_are_named_and_refused(config, tmp_path, capsys):
    assert run(config, tmp_path / "run", "--training.steps", "1") == 0
    assert run(config, tmp_path / "run", "--model.d-ff", "32", "--training.seed", "4") == 2
    error = capsys.readouterr().err
    assert "model.d_ff: 16 in the run, 32 now" in error
    assert "training.seed: 0 in the run, 4 now" in error
    assert "choose another --workdir" in error


def test_a_run_goes_on_where_its_text_has_moved_once_its_config_says_where(
    config, tmp_path, capsys
):
    assert run(config, tmp_path / "run", "--training.steps", "1") == 0
    shutil.move(tmp_path / "corpus", tmp_path / "moved")
    moved = ["--training.steps", "2", "--data.corpus", f"text:{tmp_path / 'moved'}"]
    assert run(config, tmp_path / "run", *moved) == 2
    file = tmp_path / "run" / "config.json"
    assert f"If the same text lies elsewhere now, say where in {file}." in capsys.readouterr().err
    file.write_text(file.read_text().replace(f"{tmp_path}/corpus", f"{tmp_path}/moved"))
    assert train.main([str(file), "--training.steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "Going on from step 1." in printed and "warning" not in printed


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--model.d-fff", "3"], "--model.d-ff"),
        (["--training.steps", "many"], "many"),
        (["--model.norm", "middle"], "post"),
    ],
)
def test_an_unknown_or_wrong_setting_names_the_known_ones(config, capsys, arguments, expected):
    with pytest.raises(SystemExit) as ended:
        train.main([config, *arguments])
    assert ended.value.code == 2
    assert expected in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--profile", "-1"], "--profile must be at least 0 steps; got -1"),
        (["--model.dropout", "1.0"], "model.dropout must be less than 1; got 1.0"),
        (["--model.num-heads", "3"], "got d_model=16, num_heads=3"),
        (["--data.rows-per-batch", "5"], "5 rows, 2 devices"),
        (["--data.corpus", "text:/nowhere"], "/nowhere"),
        (["--data.source-row-length", "8", "--data.target-row-length", "4"], "at least 8; got 4"),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence(config, tmp_path, capsys, arguments, expected):
    try:
        status = run(config, tmp_path / "run", *arguments)
    except SystemExit as ended:  # what tyro finds in a box of its own
        status = ended.code
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert status == 2
    assert expected in error
    assert "Traceback" not in error


def test_a_config_file_must_be_there_and_end_in_config(tmp_path, capsys):
    assert train.main([str(tmp_path / "none.py")]) == 2
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert train.main([str(tmp_path / "empty.py")]) == 2
    assert capsys.readouterr().err.count("`config = Config(...)`") == 2


def test_a_config_file_with_a_setting_that_is_none_names_it(tmp_path, capsys):
    path = tmp_path / "config.py"
    path.write_text(
        "from flaxformer_min.config import Config, DataConfig\n"
        "config = Config(DataConfig(rows_per_bach=16))\n"
    )
    assert train.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert "must be a Python file that makes a config; TypeError" in error
    assert "'rows_per_bach'" in error and "--help" in error and "Traceback" not in error


@pytest.mark.parametrize(
    "text, what", [("config = ", "SyntaxError"), ("import no_such_module", "no_such_module")]
)
def test_a_config_file_that_does_not_run_is_told_in_a_sentence(tmp_path, text, what, capsys):
    (tmp_path / "config.py").write_text(text + "\n")
    assert train.main([str(tmp_path / "config.py")]) == 2
    error = capsys.readouterr().err
    assert what in error and "config.py must be a Python file" in error


def test_a_run_goes_on_by_the_settings_it_keeps(tmp_path, config):
    """`train.py RUN/config.json` is that run, wherever its folder is now."""
    assert run(config, tmp_path / "first", "--training.steps", "3") == 0
    os.rename(tmp_path / "first", tmp_path / "moved")
    kept = str(tmp_path / "moved" / "config.json")
    assert train.read_arguments([kept]).workdir == tmp_path / "moved"
    assert train.main([kept, "--training.steps", "6"]) == 0
    assert newest(tmp_path / "moved")[0] == 6


def test_a_reader_who_goes_does_not_end_the_run(tmp_path, config):
    """Nor cost it what it has learned: `train.py | tee log`, and Ctrl-C, which ends both."""
    code = (
        f"import sys, train; status = train.main([{config!r}, '--workdir', "
        f"{str(tmp_path / 'run')!r}]); sys.stderr.write(f'status {{status}}')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as training:
        training.stdout.readline()
        training.stdout.close()
        assert training.stderr.read().endswith("status 0")
    assert newest(tmp_path / "run")[0] == 9


@pytest.mark.parametrize(
    "error, status, expected",
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore"), 2,
         r"train\.py: error: the device has not enough memory .*9 bytes\.\).*--model\.remat.*\n"),
        (KeyboardInterrupt(), 130, r"\nStopped\. The same command goes on\.\n"),
    ],
)  # fmt: skip
def test_what_ends_a_start_is_one_sentence(tmp_path, monkeypatch, capsys, error, status, expected):
    def work(*_):
        raise error

    monkeypatch.setattr(train, "work", work)
    assert train.main(["--workdir", str(tmp_path / "run")]) == status
    assert re.fullmatch(expected, capsys.readouterr().err)


def test_a_command_to_go_on_can_be_pasted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--workdir", "my runs/it's one"])
    words = subprocess.run(
        f"printf '%s\n' {train.command()}", shell=True, capture_output=True, text=True
    )
    assert words.stdout.splitlines() == ["python", "train.py", "--workdir", "my runs/it's one"]


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = "".join(capsys.readouterr())
    for group in ("data", "model", "training", "decoding"):
        for name in vars(getattr(train.Config(), group)):
            assert f"--{group}.{name.replace('_', '-')}" in text
    assert "--profile INT" in text


def test_a_second_process_on_one_run_refuses(config, tmp_path, capsys):
    with train.RunFolder(tmp_path / "run").locked():
        assert run(config, tmp_path / "run") == 2
        assert f"process {os.getpid()} holds" in capsys.readouterr().err
    assert run(config, tmp_path / "run", "--training.steps", "1") == 0


def test_a_finished_run_trains_no_further_and_is_not_saved_again(
    config, tmp_path, capsys, monkeypatch
):
    compiled = []

    def watched(*given):
        step = make_train_step(*given)
        counted = functools.partial(step)
        counted.lower = lambda *arguments: compiled.append(step) or step.lower(*arguments)
        return counted

    monkeypatch.setattr(train, "make_train_step", watched)
    assert run(config, tmp_path / "run", "--training.steps", "2") == 0
    before = newest(tmp_path / "run")[2]
    assert run(config, tmp_path / "run", "--training.steps", "2") == 0
    assert newest(tmp_path / "run")[2] == before
    assert "Going on from step 2" in capsys.readouterr().out
    assert len(compiled) == 1  # the second run takes no step


def test_debugging_names_the_operation_behind_a_rate_that_explodes(config, tmp_path, capsys):
    wild = ["--training.learning-rate-scale", "1e30", "--training.debug-nans"]
    assert run(config, tmp_path / "run", *wild) == 2
    error = capsys.readouterr().err
    assert "train.py: error: training stopped at step 2: " in error
    assert re.search(
        r"made the first (NaN|infinity), .* at flaxformer_min/model/\w+.py:\d+, in", error
    )


def test_a_start_that_failed_does_not_stand_in_the_way_of_the_next(config, tmp_path, capsys):
    """No pair fits the short rows; longer rows are another setting, but nothing was learned yet."""
    corpus = tmp_path / "long"
    corpus.mkdir()
    for name in ("train.en", "train.es", "val.en", "val.es"):
        (corpus / name).write_text("one two three four " * 3 + "\n")
    short = [
        "--data.source-row-length",
        "8",
        "--data.corpus",
        f"text:{corpus}",
        "--training.steps",
        "1",
    ]
    assert run(config, tmp_path / "run", *short) == 2
    assert "at least one usable pair" in capsys.readouterr().err
    assert run(config, tmp_path / "run", "--training.steps", "1") == 0


def test_a_folder_with_other_files_is_not_taken_for_a_run(config, tmp_path, capsys):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("Once")
    assert run(config, tmp_path / "thesis") == 2
    assert "holds chapter1.tex. Choose another --workdir" in capsys.readouterr().err


def test_a_run_begins_from_what_another_translates_with(config, tmp_path, capsys, monkeypatch):
    former, latter = tmp_path / "former", tmp_path / "latter"
    assert run(config, former, "--training.steps", "4") == 0
    (tmp_path / "other").mkdir()
    other = write_config(tmp_path / "other", training="ema_decay=0.9")
    write_corpus(tmp_path / "other" / "corpus", {"train": 60, "val": 40})
    given = []

    def watched(state, *rest, **more):
        given.append(jax.device_get(state.to_dict()))
        return learn(state, *rest, **more)

    learn = train.train
    monkeypatch.setattr(train, "train", watched)
    beginning = ["--training.init-from", str(former), "--data.subword-sampling", "0.5"]
    longer = [*beginning, "--training.steps", "2"]
    assert run(other, latter, *beginning, "--training.steps", "1") == 0
    assert "Beginning from step 4 of" in capsys.readouterr().out
    params = RunFolder(former).params().params
    for name in ("params", "average"):
        jax.tree.map(np.testing.assert_array_equal, given[0][name], params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(given[0]["opt_state"]))
    assert int(given[0]["step"]) == 0
    tokenizers = [(each / "tokenizer.model").read_bytes() for each in (former, latter)]
    assert tokenizers[0] == tokenizers[1]
    former.rename(tmp_path / "away")
    assert run(other, latter, *longer) == 0
    assert int(given[1]["step"]) == 1


def test_a_run_begins_from_one_of_the_same_model_only(config, tmp_path, capsys):
    former = tmp_path / "former"
    assert run(config, former, "--training.steps", "1") == 0
    capsys.readouterr()
    beginning = ["--training.init-from", str(former), "--training.steps", "1"]
    assert run(config, tmp_path / "wide", *beginning, "--model.d-ff", "32") == 2
    error = capsys.readouterr().err
    assert "begins from one of the same model" in error
    assert "model.d_ff: 16 in the run, 32 now" in error
    assert run(config, tmp_path / "calm", *beginning, "--model.dropout", "0.0") == 0
    beginning[1] = str(tmp_path / "nowhere")
    assert run(config, tmp_path / "none", *beginning) == 2
    assert "a run is a folder; there is none at" in capsys.readouterr().err


def test_two_vocabularies_are_trained_for_separate_embeddings(tmp_path):
    config = write_config(tmp_path, "embeddings='separate', source_vocab_size=290")
    assert run(config, tmp_path / "run", "--training.steps", "2") == 0
    names = ("source_tokenizer.model", "target_tokenizer.model")
    source, target = (Tokenizer.load(tmp_path / "run" / name) for name in names)
    assert source != target


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(config, tmp_path, number, status):
    workdir = tmp_path / "run"
    command = [sys.executable, "train.py", config, "--workdir", str(workdir)]
    forever = ["--training.steps", "100000", "--training.save-every", "100000"]
    with subprocess.Popen(
        command + forever, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while len(read_metrics(workdir / "metrics.jsonl")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "finishing this step" in errors
    assert "To go on: python train.py" in printed
    assert newest(workdir)[0] >= 4
    assert not list((workdir / "checkpoints").glob("*tmp*"))


def test_a_run_is_resumed_with_what_its_checkpoint_says(config, tmp_path):
    assert run(config, tmp_path / "run") == 0
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 2)
    model = train.Transformer(train.RunFolder(tmp_path / "run").model_config())
    like = init_state(model, train.RunFolder(tmp_path / "run").config().training)
    step, state, meta = checkpoints.restore(like.to_dict(), pytest.fail)
    checkpoints.close()
    assert step == int(state["step"]) == 9
    assert meta["rows"]["epoch"] >= 1
    before, after = (jax.tree.leaves(tree) for tree in (like.params, state["params"]))
    assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def recorded(workdir):
    """How many steps each timeline of a run holds, and whether all of them hold operations."""
    paths = sorted(workdir.glob("profile/plugins/profile/*/*.xplane.pb"))
    timelines = [jax.profiler.ProfileData.from_file(str(path)) for path in paths]
    names = [
        [event.name for plane in timeline.planes for line in plane.lines for event in line.events]
        for timeline in timelines
    ]
    assert all(any("dot" in name for name in each) for each in names)
    assert len(list(workdir.glob("profile/plugins/profile/*/*.trace.json.gz"))) == len(paths)
    return [each.count("train") for each in names]


def test_a_timeline_of_a_few_steps_can_be_read(config, tmp_path, capsys):
    """Of those after the tenth of each start; what is learned is what would have been learned."""
    workdir, long = tmp_path / "run", ["--training.steps", "14"]
    assert run(config, workdir, *long, "--profile", "3") == 0
    assert recorded(workdir) == [3]
    printed = capsys.readouterr().out
    assert f"Profile of steps 11 to 13: {workdir}/profile. Open" in printed
    assert "https://ui.perfetto.dev" in printed
    assert "profile" not in (workdir / "config.json").read_text()
    assert run(config, tmp_path / "plain", *long) == 0
    assert differences(tmp_path / "plain", workdir) == []
    assert run(config, workdir, "--training.steps", "25", "--profile", "1") == 0
    assert "Profile of steps 25 to 25" in capsys.readouterr().out
    assert sorted(recorded(workdir)) == [1, 3]


def test_a_timeline_that_is_cut_off_is_written_and_nothing_stays_open(config, tmp_path, capsys):
    """By the end of training, and by a signal; then, or where it never began, another can begin."""
    workdir, long = tmp_path / "run", ["--training.steps", "25", "--profile", "9"]
    cut(config, workdir, 12, *long)
    assert "Profile of steps 11 to 12: " in capsys.readouterr().out
    assert run(config, workdir, *long) == 0
    assert "Profile of steps 23 to 25: " in capsys.readouterr().out
    assert sorted(recorded(workdir)) == [2, 3]
    assert run(config, workdir, "--training.steps", "27", "--profile", "9") == 0
    printed = capsys.readouterr().out
    assert "No profile: it begins after 10 steps of a start, and there were 2." in printed
    assert len(recorded(workdir)) == 2


def test_a_timeline_that_cannot_be_written_costs_no_training(config, tmp_path, capsys, monkeypatch):
    stop = jax.profiler.stop_trace

    def failing():
        stop()
        raise OSError("No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", failing)
    assert run(config, tmp_path / "run", "--training.steps", "12", "--profile", "1") == 0
    assert "warning: the profile cannot be written to " in capsys.readouterr().out
    assert newest(tmp_path / "run")[0] == 12

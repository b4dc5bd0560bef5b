"""train.py: what a run leaves, and that a cut leaves no trace."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import train
from flaxformer_min.checkpoint import Checkpoints
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.training.metrics import read_metrics
from flaxformer_min.training.step import init_state

WORDS = {"one": "uno", "two": "dos", "three": "tres", "four": "cuatro", "five": "cinco"}

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


def write_corpus(folder, splits=("train", "val"), lines=40):
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    for split in splits:
        chosen = [[rng.choice(list(WORDS)) for _ in range(rng.randint(1, 4))] for _ in range(lines)]
        english = "".join(" ".join(line) + "\n" for line in chosen)
        spanish = "".join(" ".join(WORDS[word] for word in line) + "\n" for line in chosen)
        (folder / f"{split}.en").write_text(english)
        (folder / f"{split}.es").write_text(spanish)
    return f"text:{folder}"


def write_config(folder, model="", training="", **corpus):
    path = folder / "tiny.py"
    corpus = write_corpus(folder / "corpus", **corpus)
    path.write_text(CONFIG.format(corpus=corpus, model=model, training=training))
    return str(path)


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


def run(config, workdir, *overrides):
    return train.main([config, "--workdir", str(workdir), *overrides])


def final_state(workdir):
    """Everything in the newest checkpoint, as plain arrays, and its description."""
    import orbax.checkpoint as ocp

    folder = workdir / "checkpoints"
    step = max(int(path.name) for path in folder.iterdir())
    handlers = {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder, options=options, item_handlers=handlers) as manager:
        return step, manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))[
            "meta"
        ]


def assert_same_run(one, other):
    """Checksums cover every bit of parameters, optimizer and key; metrics all but the clock."""
    assert final_state(one) == final_state(other)
    clocked = ("tokens_per_second", "steps_per_second")
    lines = [
        [
            {k: v for k, v in line.items() if k not in clocked}
            for line in read_metrics(run / "metrics.jsonl")
        ]
        for run in (one, other)
    ]
    # a run that ends early validates where it ends
    without_extra = [
        [line for line in each if "loss" in line or line["step"] in (6, 9)] for each in lines
    ]
    assert without_extra[0] == without_extra[1]


@pytest.mark.parametrize(
    "cuts, model, training",
    [
        ((1, 5), "norm='post'", ""),
        ((3, 4, 8), "norm='pre'", "gradient_accumulation=2"),
    ],
)
def test_a_run_cut_anywhere_equals_the_uncut_run_bit_for_bit(tmp_path, cuts, model, training):
    """Dropout on; cuts lie within an epoch, after its end, and right before and after a save."""
    config = write_config(tmp_path, model, training)
    assert run(config, tmp_path / "uncut") == 0
    for steps in cuts:
        assert run(config, tmp_path / "cut", "--training.steps", str(steps)) == 0
    assert run(config, tmp_path / "cut") == 0
    assert_same_run(tmp_path / "uncut", tmp_path / "cut")


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
        "40 pairs read",
        "pieces a word",
        "padding",
        "M parameters",
        "flaxformer-min translate",
    ):
        assert text in printed
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_other_settings_in_an_existing_run_are_named_and_refused(config, tmp_path, capsys):
    assert run(config, tmp_path / "run", "--training.steps", "1") == 0
    assert run(config, tmp_path / "run", "--model.d-ff", "32", "--training.seed", "4") == 2
    error = capsys.readouterr().err
    assert "model.d_ff: 16 in the run, 32 now" in error
    assert "training.seed: 0 in the run, 4 now" in error
    assert "choose another --workdir" in error


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


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = "".join(capsys.readouterr())
    for group in ("data", "model", "training", "decoding"):
        for name in vars(getattr(train.Config(), group)):
            assert f"--{group}.{name.replace('_', '-')}" in text


def test_a_second_process_on_one_run_refuses(config, tmp_path, capsys):
    with train.RunFolder(tmp_path / "run").locked():
        assert run(config, tmp_path / "run") == 2
        assert f"process {os.getpid()} holds" in capsys.readouterr().err
    assert run(config, tmp_path / "run", "--training.steps", "1") == 0


def test_a_finished_run_trains_no_further_and_is_not_saved_again(config, tmp_path, capsys):
    assert run(config, tmp_path / "run", "--training.steps", "2") == 0
    before = final_state(tmp_path / "run")
    assert run(config, tmp_path / "run", "--training.steps", "2") == 0
    assert final_state(tmp_path / "run") == before
    assert "Going on from step 2" in capsys.readouterr().out


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
    corpus = write_corpus(tmp_path / "long")
    for split in ("train", "val"):
        for language in ("en", "es"):
            (tmp_path / "long" / f"{split}.{language}").write_text("one two three four " * 3 + "\n")
    short = ["--data.source-row-length", "8", "--data.corpus", corpus, "--training.steps", "1"]
    assert run(config, tmp_path / "run", *short) == 2
    assert "at least one usable pair" in capsys.readouterr().err
    assert run(config, tmp_path / "run", "--training.steps", "1") == 0


def test_a_folder_with_other_files_is_not_taken_for_a_run(config, tmp_path, capsys):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("Once")
    assert run(config, tmp_path / "thesis") == 2
    assert "holds chapter1.tex. Choose another --workdir" in capsys.readouterr().err


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
    step, _ = final_state(workdir)
    assert step >= 4
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

"""`train` leaves a run folder that holds all that is needed, and reports what it does."""

import logging
import os
import re

import jax
import numpy as np
import pytest
from tiny_run import make_tiny_run
from training_jobs import changed, small_config, stopped_after, watched_steps

from benchmarks.crash import newest, write_corpus
from flaxformer_min.cli.train import read_arguments
from flaxformer_min.data.batches import TrainingBatches
from flaxformer_min.data.tokenizer import Tokenizer
from flaxformer_min.experiment.model import with_dtype
from flaxformer_min.experiment.prepare import prepare
from flaxformer_min.experiment.report import report_start
from flaxformer_min.experiment.run import train
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.training.metrics import read_metrics
from flaxformer_min.training.step import TrainState

pytestmark = pytest.mark.usefixtures("programs_are_shared")


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "flaxformer_min")
    return caplog


def with_steps(config, steps, **settings):
    return changed(config, "training", steps=steps, **settings)


def test_a_run_folder_holds_all_that_is_needed(config, tmp_path, log):
    result = train(config, tmp_path / "run")
    names = {path.name for path in result.run.path.iterdir()}
    files = {"config.json", "tokenizer.model", "metrics.jsonl", "lock"}
    assert names == files | {"checkpoints", "tensorboard"}
    assert result.run.config() == with_dtype(config)  # "auto" is resolved
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [4, 6, 8, 9]
    scores = {"loss", "accuracy", "learning_rate", "gradient_norm"}
    assert scores | {"tokens_per_second", "padding"} <= set(lines[0])
    assert {"validation_loss", "validation_perplexity"} <= set(lines[1])
    for text in ("100 pairs read", "pieces per word", "padding", "M parameters"):
        assert text in log.text
    assert "suit this text better" not in log.text
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    assert (result.step, result.stopped, result.test) == (9, False, None)
    assert result.validation["loss"] == lines[-1]["validation_loss"]


def test_rows_that_suit_the_text_badly_are_reported_with_better_lengths(config, tmp_path, log):
    uneven = changed(config, "data", target_row_length=48)
    encoded = prepare(RunFolder(tmp_path / "run"), uneven).encoded["train"]
    epoch = TrainingBatches(encoded, (24, 48), rows=4, seed=0).epoch(0)
    report_start("run", uneven.model, TrainState(0, {}, {}, None), epoch)
    better = "better: --data.source-row-length 4\\d --data.target-row-length 48"
    assert re.search(better, log.messages[-1])


@pytest.mark.parametrize("lines", [None, b"\n \n", b"one\xff\n"])
def test_a_test_split_without_text_costs_only_its_score(config, tmp_path, log, lines):
    """Nor does one that is not UTF-8 cost more. It is told before training, which may take days."""
    if lines is not None:
        for language in ("en", "es"):
            (tmp_path / "corpus" / f"test.{language}").write_bytes(lines)
    result = train(with_steps(config, 1), tmp_path / "run")
    assert (result.step, result.test) == (1, None)
    told, step = (
        next(number for number, line in enumerate(log.messages) if line.startswith(start))
        for start in ("No test score: ", "The first step is done")
    )
    assert lines is not None or told < step


@pytest.mark.parametrize(
    "place, error",
    [
        ("/proc/nothing", "needs a folder to write in; /proc/nothing: .*Choose another"),
        ("{tmp}/file/run", "needs a folder to write in; {tmp}/file/run: .*Choose another"),
        ("{tmp}/link", "needs a folder to write in; {tmp}/link: .*Choose another"),
        ("{tmp}/file", "a run is a folder; .*file is a file. Choose another"),
        ("{tmp}/corpus", r"holds .*\.en.*\. Choose another --workdir"),
    ],
)
def test_a_place_that_cannot_become_a_run_is_named(config, tmp_path, place, error):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises((OSError, ValueError), match=error.format(tmp=tmp_path)):
        train(config, place.format(tmp=tmp_path))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_in_place_of_a_config_is_told_how_to_continue(config, tmp_path):
    (tmp_path / "config.json").write_text(config.to_json())
    with pytest.raises(ValueError, match="is a run folder; continue it with .*/config.json"):
        read_arguments([str(tmp_path)], "train.py")


def test_other_settings_in_an_existing_run_are_named_and_refused(config, tmp_path):
    train(with_steps(config, 1), tmp_path / "run")
    other = changed(changed(config, "model", d_ff=32), "training", seed=4)
    named = r"model.d_ff: 16 in the run, 32 now\n.*training.seed: 0 in the run, 4 now"
    with pytest.raises(ValueError, match=rf"{named}(.|\n)*choose another --workdir"):
        train(other, tmp_path / "run")


def test_an_edited_setting_of_training_is_an_error_that_names_it(config, tmp_path):
    """The text alone may have moved, and whoever translates needs no settings of training."""
    run = train(with_steps(config, 2), tmp_path / "run").run
    file = run.path / "config.json"
    kept = file.read_text()
    file.write_text(kept.replace('"clip_norm": null', '"clip_norm": 0.9'))
    with pytest.raises(ValueError, match="training.clip_norm: .* in the checkpoint, 0.9 in"):
        train(run.config(), run.path)
    assert run.params().step == 2
    file.write_text(kept)
    assert train(run.config(), run.path).step == 2


def test_a_start_that_failed_does_not_stand_in_the_way_of_the_next(config, tmp_path):
    """No pair fits the short rows; longer rows are another setting, but nothing was learned yet."""
    corpus = tmp_path / "long"
    corpus.mkdir()
    for name in ("train.en", "train.es", "val.en", "val.es"):
        (corpus / name).write_text("one two three four " * 3 + "\n")
    short = changed(config, "data", source_row_length=8, corpus=f"text:{corpus}")
    with pytest.raises(ValueError, match="at least one usable pair"):
        train(short, tmp_path / "run")
    assert train(with_steps(config, 1), tmp_path / "run").step == 1


def test_a_second_process_on_one_run_refuses(config, tmp_path):
    with RunFolder(tmp_path / "run").locked():
        with pytest.raises(ValueError, match=f"process {os.getpid()} .*{tmp_path}/run"):
            train(config, tmp_path / "run")
    assert train(with_steps(config, 1), tmp_path / "run").step == 1


@pytest.mark.parametrize(
    "regularised", [{}, pytest.param({"ema_decay": 0.9}, marks=pytest.mark.slow)]
)
def test_a_run_begins_with_the_parameters_that_another_translates_with(
    config, tmp_path, log, regularised
):
    """With its tokenizers, too; later starts do not need the other run any more."""
    former, latter = tmp_path / "former", tmp_path / "latter"
    train(with_steps(config, 4), former)
    (tmp_path / "other").mkdir()
    other = small_config(tmp_path / "other", init_from=str(former), **regularised)
    write_corpus(tmp_path / "other" / "corpus", {"train": 60, "val": 40})
    other = changed(other, "data", subword_sampling=0.5)
    given = []

    def keep(state):
        given.append(jax.device_get(state.to_dict()))

    with watched_steps(before=keep):
        train(with_steps(other, 1), latter)
    assert f"Beginning with the parameters of step 4 of {former}." in log.messages
    params = RunFolder(former).params().params
    for name in {"params", "average"} & set(given[0]):
        jax.tree.map(np.testing.assert_array_equal, given[0][name], params)
    assert ("average" in given[0]) == bool(regularised)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(given[0]["opt_state"]))
    assert int(given[0]["step"]) == 0
    tokenizers = [(each / "tokenizer.model").read_bytes() for each in (former, latter)]
    assert tokenizers[0] == tokenizers[1]
    former.rename(tmp_path / "away")
    with watched_steps(before=keep):
        train(with_steps(other, 2), latter)
    assert [int(state["step"]) for state in given] == [0, 1]


def test_a_run_begins_from_one_of_the_same_model_only(config, tmp_path):
    """Dropout is not a part of the model."""
    former = tmp_path / "former"
    train(with_steps(config, 1), former)
    beginning = with_steps(config, 1, init_from=str(former))
    differs = (
        r"init_from needs a run of the same model; .*/former .*\n  model.d_ff: 16 in the run, 32"
    )
    with pytest.raises(ValueError, match=differs):
        train(changed(beginning, "model", d_ff=32), tmp_path / "wide")
    calm = changed(beginning, "model", dropout=0.0)
    assert prepare(RunFolder(tmp_path / "calm"), calm).tokenizers == RunFolder(former).tokenizers()
    nowhere = with_steps(config, 1, init_from=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="a run is a folder; there is none at"):
        train(nowhere, tmp_path / "none")


def test_a_run_begins_from_one_with_learned_positions_for_rows_of_its_own(config, tmp_path):
    """They are as many as a row has tokens, which here is not the default."""
    learned = {"positional_encoding": "learned", "max_positions": 24, "vocab_size": 284}
    former = make_tiny_run(tmp_path / "former", data=config.data, **learned)
    beginning = with_steps(changed(config, "model", **learned), 1, init_from=str(former))
    prepared = prepare(RunFolder(tmp_path / "run"), beginning)
    assert prepared.tokenizers == RunFolder(former).tokenizers()
    plain = with_steps(config, 1, init_from=str(former))
    with pytest.raises(ValueError, match="model.max_positions: 24 in the run, 0 now"):
        prepare(RunFolder(tmp_path / "plain"), plain)


def test_two_vocabularies_are_prepared_for_separate_embeddings(tmp_path):
    separate, run = {"embeddings": "separate", "source_vocab_size": 280}, tmp_path / "run"
    prepare(RunFolder(run), small_config(tmp_path, model=separate))
    names = ("source_tokenizer.model", "target_tokenizer.model")
    source, target = (Tokenizer.load(run / name) for name in names)
    assert source != target
    config = RunFolder(run).model_config()
    assert (config.source_vocab_size, config.vocab_size) == (source.vocab_size, target.vocab_size)


def recorded(workdir):
    """Return how many steps each timeline of a run holds; all of them must hold operations."""
    paths = sorted(workdir.glob("profile/plugins/profile/*/*.xplane.pb"))
    timelines = [jax.profiler.ProfileData.from_file(str(path)) for path in paths]
    names = [
        [event.name for plane in timeline.planes for line in plane.lines for event in line.events]
        for timeline in timelines
    ]
    assert all(any("dot" in name for name in each) for each in names)
    assert len(list(workdir.glob("profile/plugins/profile/*/*.trace.json.gz"))) == len(paths)
    return [each.count("train") for each in names]


def test_a_timeline_of_a_few_steps_can_be_read(config, tmp_path, log):
    """They come after the tenth step of a start."""
    workdir = tmp_path / "run"
    train(with_steps(config, 14), workdir, profile=3)
    assert recorded(workdir) == [3]
    assert f"Profile of steps 11 to 13: {workdir}/profile. Open" in log.text
    assert "https://ui.perfetto.dev" in log.text
    assert "profile" not in (workdir / "config.json").read_text()


@pytest.mark.slow
def test_a_timeline_that_is_cut_off_is_written_and_nothing_stays_open(config, tmp_path, log):
    """By the end of training, and by a stop; then, or where it never began, another can begin."""
    workdir, long = tmp_path / "run", with_steps(config, 25)
    stopped_after(long, workdir, 12, profile=9)
    assert "Profile of steps 11 to 12: " in log.text
    train(long, workdir, profile=9)
    assert "Profile of steps 23 to 25: " in log.text
    assert sorted(recorded(workdir)) == [2, 3]
    train(with_steps(config, 27), workdir, profile=9)
    assert re.search("No profile .* after 10 steps, and only 2 were taken", log.text)
    assert len(recorded(workdir)) == 2


@pytest.mark.slow
def test_a_timeline_that_cannot_be_written_costs_no_training(config, tmp_path, log, monkeypatch):
    stop = jax.profiler.stop_trace

    def failing():
        stop()
        raise OSError("No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", failing)
    train(with_steps(config, 12), tmp_path / "run", profile=1)
    warnings = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert any(text.startswith("the profile cannot be written to ") for text in warnings)
    assert newest(tmp_path / "run")[0] == 12

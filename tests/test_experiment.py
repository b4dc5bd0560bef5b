"""Training as a library call: what it takes, what it leaves, and how it is interrupted."""

import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from tiny_run import make_tiny_run

from flaxformer_min import (
    Batch,
    Config,
    DataConfig,
    ModelConfig,
    RunFolder,
    SearchConfig,
    TrainingConfig,
    Transformer,
    Translator,
    one_sentence_per_row,
    train,
)
from flaxformer_min.data.batches import shard_batch
from flaxformer_min.data.corpora.pairs import as_pairs
from flaxformer_min.decoding.models import name_of_model
from flaxformer_min.experiment.prepare import open_text, prepare
from flaxformer_min.experiment.run import TrainResult, usable_example
from flaxformer_min.experiment.validation import Validator
from flaxformer_min.storage.metadata import Metric
from flaxformer_min.training.metrics import read_metrics
from flaxformer_min.training.step import init_state, make_eval_step, make_train_step

pytestmark = pytest.mark.usefixtures("programs_are_shared")

WORDS = "one two three four five six".split()


def reversed_words(count, seed):
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(2, 5))) for _ in range(count)]
    return [(text, " ".join(reversed(text.split()))) for text in texts]


PAIRS = {"train": reversed_words(40, 0), "validation": reversed_words(6, 1)}
CONFIG = Config(
    data=DataConfig(source_row_length=16, target_row_length=16, rows_per_batch=4),
    model=ModelConfig(vocab_size=280, num_layers=1, d_model=16, d_ff=16, num_heads=2),
    training=TrainingConfig(
        steps=6, warmup_steps=4, log_every=2, validate_every=4, save_every=3, validation_sentences=0
    ),
    decoding=SearchConfig(beam_size=1, max_extra_tokens=2),
)


def trained_with(**settings):
    """The configuration with other settings of training."""
    return dataclasses.replace(CONFIG, training=dataclasses.replace(CONFIG.training, **settings))


class Bigram(nn.Module):
    """Predicts a token from the one before it alone: the least model that training takes."""

    vocab_size: int
    width: int = 8

    def setup(self):
        self.table = nn.Embed(self.vocab_size, self.width)

    def hidden_states(self, batch):
        previous = jnp.roll(batch.target.ids, 1, axis=1) * (batch.target.positions > 0)
        return self.table(previous)

    def logits(self, x):
        return self.table.attend(x)


def same(first, second):
    """Whether two runs have the same parameters, bit for bit, and metrics but for the clock."""
    ours, theirs = (RunFolder(run).params() for run in (first, second))
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
    lines = [read_metrics(RunFolder(run).metrics) for run in (first, second)]
    for each in (line for run in lines for line in run):
        for name in ("tokens_per_second", "steps_per_second"):
            each.pop(name, None)
    return ours.step == theirs.step and lines[0] == lines[1]


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    """A run that nobody stopped."""
    return train(CONFIG, tmp_path_factory.mktemp("runs") / "uncut", pairs=PAIRS)


def test_a_call_leaves_a_run_that_translates(uncut):
    assert (uncut.step, uncut.stopped, uncut.test) == (6, False, None)
    assert set(uncut.validation) == {"loss", "perplexity", "accuracy"}
    assert uncut.validation["perplexity"] == pytest.approx(np.exp(uncut.validation["loss"]))
    assert uncut.translator.restored[0].step in (4, 6)
    assert len(uncut.translator.translate(["one two", ""])) == 2
    recorded = read_metrics(uncut.run.metrics)[-1]
    assert recorded["validation_loss"] == uncut.validation["loss"]


@pytest.mark.parametrize("validate_every", [1, 50])
def test_a_stop_request_that_is_not_repeated_counts(tmp_path, validate_every):
    """Between two steps, or while the validation asks; the test set is not translated any more."""
    config = trained_with(steps=40, validate_every=validate_every)
    answers = iter([False, False, True])
    pairs = {**PAIRS, "test": reversed_words(4, 2)}
    result = train(config, tmp_path / "run", pairs=pairs, stop=lambda: next(answers, False))
    assert result.stopped and result.step < 40 and result.test is None


@pytest.fixture
def python_handles_ctrl_c():
    """Also where the tests run in the background, whose processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_ctrl_c_saves_and_returns_and_the_same_call_continues_bit_for_bit(tmp_path):
    """As Stop does in a notebook: an exception in the main thread, wherever it is."""

    def interrupt(logits, label):
        """While the step is compiled, which the main thread waits for."""
        if threading.current_thread() is not threading.main_thread():
            interrupted.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return -jax.nn.log_softmax(logits)[label]

    interrupted = []
    plain = train(CONFIG, tmp_path / "plain", pairs=PAIRS, token_loss=plain_loss)
    part = train(CONFIG, tmp_path / "cut", pairs=PAIRS, token_loss=interrupt)
    assert interrupted and part.stopped and part.step < 6
    assert train(CONFIG, tmp_path / "cut", pairs=PAIRS, token_loss=plain_loss).step == plain.step
    assert same(tmp_path / "plain", tmp_path / "cut")


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_after_a_second_ctrl_c_a_run_is_locked_until_its_last_step_has_ended(tmp_path):
    """The call returns at once, but its thread may still be in a step, and saves after it."""
    entered, leave = threading.Event(), threading.Event()

    def slow_stop():
        entered.set()
        leave.wait(60)
        return True

    def interrupt_twice():
        entered.wait(60)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # Python joins two that come at once

    threading.Thread(target=interrupt_twice).start()
    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, tmp_path / "run", pairs=PAIRS, stop=slow_stop)
    with pytest.raises(ValueError, match="only one process may train a run at a time"):
        train(CONFIG, tmp_path / "run", pairs=PAIRS)
    leave.set()
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("train") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with RunFolder(tmp_path / "run").locked():
        pass


def plain_loss(logits, label):
    return -jax.nn.log_softmax(logits)[label]


@pytest.mark.slow
def test_a_call_leaves_the_process_as_it_was(uncut, tmp_path):
    """In a process of its own: signal handlers, jax's settings, and no sys.argv."""
    script = f"""
import signal, sys, jax
sys.argv = ["notebook", "--workdir", "elsewhere"]
numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
before = [signal.getsignal(n) for n in numbers], dict(jax.config.values)
from flaxformer_min import Config, train
config = Config.from_json(open({str(uncut.run.path / "config.json")!r}).read())
import json
pairs = json.loads({json.dumps(json.dumps(PAIRS))})
result = train(config, {str(tmp_path / "run")!r}, pairs=pairs)
assert result.step == 6
after = [signal.getsignal(n) for n in numbers], dict(jax.config.values)
assert before[0] == after[0]
changed = {{n for n in before[1] if before[1][n] != after[1][n]}}
assert not changed, changed
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_messages_go_to_the_logger_and_nothing_is_printed(uncut, tmp_path, caplog, capfd):
    with caplog.at_level(logging.INFO, "flaxformer_min"):
        train(CONFIG, uncut.run.path, pairs=PAIRS)
    assert any("Continuing from step 6." in record.getMessage() for record in caplog.records)
    assert capfd.readouterr() == ("", "")


def test_a_model_of_ones_own_trains_resumes_and_validates(tmp_path, uncut, caplog):
    caplog.set_level(logging.INFO, "flaxformer_min")
    size = uncut.run.model_config().vocab_size
    polls = iter(range(100))
    model = Bigram(size)
    whole = train(CONFIG, tmp_path / "whole", pairs=PAIRS, model=model)
    part = train(CONFIG, tmp_path / "cut", pairs=PAIRS, model=model, stop=lambda: next(polls) > 1)
    assert part.stopped
    train(CONFIG, tmp_path / "cut", pairs=PAIRS, model=model)
    assert same(tmp_path / "whole", tmp_path / "cut")
    assert whole.validation["loss"] > 0 and whole.test is None
    assert "No test score: a Bigram cannot decode." in caplog.messages


def test_a_model_of_another_width_is_refused_and_no_checkpoint_is_moved(tmp_path, uncut):
    """It would be taken for damaged: the width of a model of one's own is no setting of the run.

    Nor does another run begin with its parameters.
    """
    size, folder = uncut.run.model_config().vocab_size, tmp_path / "run"
    former = train(CONFIG, folder, pairs=PAIRS, model=Bigram(size))
    wider = {"pairs": PAIRS, "model": Bigram(size, 9)}
    shapes = rf"is float32\[{size}, 8\] in the checkpoint, float32\[{size}, 9\] in the model"
    with pytest.raises(ValueError, match=f"model with other parameters: table/embedding {shapes}"):
        train(CONFIG, folder, **wider)
    with pytest.raises(ValueError, match=f"the same model; in .*run table/embedding {shapes}"):
        train(trained_with(init_from=str(folder)), tmp_path / "other", **wider)
    assert not (folder / "damaged").exists()
    again = train(CONFIG, folder, pairs=PAIRS, model=Bigram(size))
    assert again.validation == former.validation


def test_parts_of_a_model_are_named_whatever_they_are():
    """Or a run would continue with another model that has the same parameters."""

    class Positions:
        def __call__(self, positions, d_model):
            return jnp.zeros((positions.size, d_model))

    class Wrapped(nn.Module):
        inner: nn.Module

    model = Wrapped(Transformer(CONFIG.model, position_function=Positions()))
    assert name_of_model(model) == "Wrapped(inner=Transformer(position_function=Positions))"


def test_a_second_training_in_a_process_is_refused(tmp_path):
    refused = []

    def stop():
        with pytest.raises(ValueError, match="a process trains one run at a time"):
            train(CONFIG, tmp_path / "second", pairs=PAIRS)
        refused.append(True)
        return True

    assert train(CONFIG, tmp_path / "first", pairs=PAIRS, stop=stop).stopped
    assert refused
    assert not train(CONFIG, tmp_path / "first", pairs=PAIRS).stopped


@pytest.mark.parametrize(
    "model, settings, error",
    [
        (nn.Dense(3), {}, "hidden_states and logits; Dense has no hidden_states"),
        (Bigram(7), {}, r"each of the \d+ pieces .* got 7"),
        (
            Bigram(280),
            {"best_by": "bleu", "validation_sentences": 2},
            "best_by='bleu' needs .*; Bigram cannot .* encode, .*'lo",
        ),
    ],
)
def test_a_model_that_does_not_suit_the_run_is_refused(tmp_path, model, settings, error):
    with pytest.raises(ValueError, match=error):
        train(trained_with(**settings), tmp_path / "run", pairs=PAIRS, model=model)


def test_the_translator_of_a_relative_folder_is_found_from_another(tmp_path, monkeypatch):
    make_tiny_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    result = TrainResult(RunFolder("run"), 1, False, {})
    monkeypatch.chdir("/")
    assert result.run.path == Path("run")
    assert len(result.translator.models) == 1


def test_a_jax_that_may_not_compile_is_named(tmp_path):
    """Programs are compiled ahead of time, of which jax says something that names no variable."""
    run = make_tiny_run(tmp_path / "run")
    for call in (Translator.load, lambda run: train(RunFolder(run).config(), tmp_path / "new")):
        with jax.disable_jit(), pytest.raises(ValueError, match="JAX_DISABLE_JIT .* forbids them"):
            call(run)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "sources, example", [(["", " ", "it's", "a\nb", "a\rb", "\x1b[2J", "c"], "c"), (["'"], "")]
)
def test_an_example_is_a_source_that_a_shell_takes_as_one_line(sources, example):
    assert usable_example([(source, "target") for source in sources]) == example


def constant(positions, d_model):
    return jnp.ones((positions.shape[0], d_model))


@pytest.mark.slow
def test_a_run_of_ones_own_model_is_loaded_with_that_model_only(tmp_path):
    model = Transformer(CONFIG.model, position_function=constant)
    result = train(CONFIG, tmp_path / "run", pairs=PAIRS, model=model)
    assert len(result.translator.translate(["one two"])) == 1
    name = r"Transformer\(position_function=constant\)"
    for other in (None, Bigram(280), Transformer(CONFIG.model)):
        with pytest.raises(ValueError, match=f"was trained with {name}; .* model="):
            Translator.load(tmp_path / "run", model=other)
    with pytest.raises(ValueError, match=f"'{name}' in the run, 'Transformer' now"):
        train(CONFIG, tmp_path / "run", pairs=PAIRS, model=Transformer(CONFIG.model))


class Table(list):
    """Has columns, which have names."""

    def __getitem__(self, name):
        raise KeyError(name)


class Unreadable(list):
    """Is on a disk that is gone."""

    def __getitem__(self, number):
        raise OSError("the disk is gone")


class Versioned(list):
    """Has a fingerprint that is no method."""

    fingerprint = "version 1"


@pytest.mark.parametrize(
    "pairs, error",
    [
        ({"train": PAIRS["train"]}, '"train" and "validation".* got \'train\''),
        ({**PAIRS, "dev": PAIRS["train"]}, "got 'train', 'validation', 'dev'"),
        (PAIRS["train"], "got list.$"),
        ({**PAIRS, "validation": []}, r"pairs\['validation'\] must hold at least one pair"),
        ({**PAIRS, "train": iter([])}, r"must be a sequence .* Make a list of it"),
        ({**PAIRS, "train": {"a": "b"}}, "must be a sequence .* got dict"),
        ({**PAIRS, "train": ["ab"] * 9}, r"pairs\['train'\]\[0\] must be a pair of two texts"),
        ({**PAIRS, "train": [("a", None)] * 9}, r"got \('a', None\)"),
        ({**PAIRS, "train": [{"en": "a", "de": "b"}] * 9}, r"\[0\] must be a pair of two texts"),
        ({**PAIRS, "train": [("a", "b"), ("a", "\ud800")]}, r"'train'\]\[1\] has a lone"),
        ({**PAIRS, "train": Table([0])}, r"\[0\] raised KeyError.* Make a list of it"),
        ({**PAIRS, "test": [("a", "b"), ("a",)]}, r"pairs\['test'\]\[1\] must be a pair"),
        ({**PAIRS, "test": Unreadable([0])}, r"'test'\] must be readable; .*\[0\].* disk is gone"),
        ({**PAIRS, "train": Versioned([0])}, r"'train'\] must be a method .* 'version 1'"),
    ],
)
def test_pairs_that_are_none_are_refused_by_name_before_training(tmp_path, pairs, error):
    with pytest.raises(ValueError, match=error):
        train(CONFIG, tmp_path / "run", pairs=pairs)
    assert not list((tmp_path / "run").glob("checkpoints/[0-9]*"))


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"workdir": None}, r"workdir must be a folder, as text or a Path; got None\.$"),
        ({"config": {}}, r"config must be a Config, .* got dict\.$"),
        ({"model": Transformer}, r"an instance of a Linen module, .* got the class Transformer\.$"),
        ({"stop": True}, r"stop must be a function or None; got True\.$"),
        ({"optimizer": 0.1}, r"must be an optax.GradientTransformation, .*; got 0\.1\.$"),
        ({"profile": -1}, r"profile must be a number of steps, at least 0; got -1\.$"),
    ],
)
def test_arguments_of_another_type_are_refused_before_there_is_a_folder(tmp_path, arguments, error):
    with pytest.raises(ValueError, match=error):
        train(**{"config": CONFIG, "workdir": tmp_path / "run", "pairs": PAIRS, **arguments})
    assert not (tmp_path / "run").exists()


def test_a_model_of_other_settings_is_refused_not_changed(tmp_path):
    other = dataclasses.replace(CONFIG.model, d_model=32, dropout=0.3)
    with pytest.raises(ValueError, match="has d_model 32 instead of 16, dropout 0.3 instead of"):
        train(CONFIG, tmp_path / "run", pairs=PAIRS, model=Transformer(other))
    larger = dataclasses.replace(CONFIG.model, vocab_size=4000)
    result = train(CONFIG, tmp_path / "run", pairs=PAIRS, model=Transformer(larger))
    assert result.step == CONFIG.training.steps


@pytest.mark.parametrize(
    "token_loss, got",
    [
        (lambda logits, label: -jax.nn.log_softmax(logits), r"float32 of shape \(\d+,\)"),
        (lambda logits, label: label, r"int32 of shape \(\)"),
    ],
)
def test_a_loss_that_is_no_number_is_refused_not_averaged(tmp_path, token_loss, got):
    with pytest.raises(ValueError, match=f"one floating-point number.*{got}"):
        train(CONFIG, tmp_path / "run", pairs=PAIRS, token_loss=token_loss)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_batch_split_into_other_parts_is_refused_not_cut(parts):
    model, rows = Transformer(CONFIG.model), one_sentence_per_row(jnp.full((12, 8), 5))
    config = trained_with(gradient_accumulation=2)
    split = shard_batch(Batch(rows, rows), jax.local_device_count(), parts)
    state = init_state(model, config)
    evaluate, step = make_eval_step(model), make_train_step(model, config)
    for call, first, wanted in ((evaluate, state.params, 1), (step, state, 2)):
        if parts != wanted:
            with pytest.raises(ValueError, match=f"got .devices {parts} .*, {wanted}\\)"):
                call(first, split)


class Counting:
    """A corpus that counts how often it is read; known by its fingerprint."""

    def __init__(self, items, fingerprint):
        self.items, self.reads = items, 0
        self._fingerprint = fingerprint

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        self.reads += 1
        return self.items[i]

    def fingerprint(self):
        return self._fingerprint


@pytest.mark.slow
def test_pairs_with_a_fingerprint_are_encoded_once(tmp_path):
    for name, expected in (("first", True), ("second", False)):
        text = Counting(PAIRS["train"], "the words of this test, reversed")
        train(CONFIG, tmp_path / name, pairs={**PAIRS, "train": text})
        assert (text.reads > 0) == expected
    assert same(tmp_path / "first", tmp_path / "second")


def test_the_text_of_a_run_on_given_pairs_is_not_looked_for_elsewhere(uncut):
    assert uncut.run.config().data.corpus == "given"
    with pytest.raises(ValueError, match="does not name its text: it was trained with train.pairs"):
        train(uncut.run.config(), uncut.run.path)


def test_splits_of_one_fingerprint_are_not_taken_for_each_other(tmp_path):
    named = {name: Counting(pairs, "my corpus v1") for name, pairs in PAIRS.items()}
    encoded = prepare(RunFolder(tmp_path / "run"), CONFIG, named).encoded
    assert [encoded[name].counts.read for name in PAIRS] == [40, 6]


@pytest.mark.parametrize("languages, expected", [(("en", "ko"), "en-ko"), (("", ""), "")])
def test_pairs_of_a_corpus_bring_their_languages(languages, expected):
    pairs = as_pairs(PAIRS["train"], "pairs")
    pairs.languages = languages
    config, _ = open_text(CONFIG, {**PAIRS, "train": pairs})
    assert config.data.languages == expected
    own = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, languages="de-fr"))
    assert open_text(own, {**PAIRS, "train": pairs})[0].data.languages == "de-fr"


def test_other_validation_text_is_reported_and_its_scores_are_not_compared(tmp_path, caplog):
    """Or the best checkpoint would for ever be that of the easier text."""
    first = train(CONFIG, tmp_path / "run", pairs=PAIRS)
    longer = trained_with(steps=8)
    checkpoints = first.run.open_checkpoints(CONFIG)
    checkpoints.describe(6, {}, Metric("validation_loss", 0.001))  # easy text
    checkpoints.close()
    other = {**PAIRS, "validation": reversed_words(5, 9)}
    warning = "the validation text has changed; former scores do not count."
    for warned in (True, False):
        caplog.clear()
        result = train(longer, tmp_path / "run", pairs=other)
        assert (warning in caplog.messages) == warned
    assert result.translator.restored[0].step == 8


def test_the_translated_sentences_of_a_validation_are_spread_over_all(uncut):
    """Three of five, and no more than there are."""
    pairs = reversed_words(5, 3)
    for size, expected in ((3, [0, 1, 3]), (9, [0, 1, 2, 3, 4])):
        translator, config = uncut.translator, trained_with(validation_sentences=size)
        validator = Validator(config, translator.models[0], [], pairs, translator)
        assert validator._sample == [pairs[number] for number in expected]


@pytest.mark.slow
def test_the_test_split_is_scored_with_what_the_run_translates_with(tmp_path, caplog):
    """And the report names the score that selected it."""
    test = reversed_words(4, 2)
    with caplog.at_level(logging.INFO, "flaxformer_min"):
        result = train(CONFIG, tmp_path / "run", pairs={**PAIRS, "test": test})
    sources, references = zip(*test, strict=True)
    translations = result.translator.translate(sources)
    right = sum(a == b for a, b in zip(translations, references, strict=True))
    assert result.test.exact_match == right / 4 and result.test.sentences == 4
    assert re.search(r"Test set, with step \d+, selected by validation", caplog.text)

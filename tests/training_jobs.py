"""Small training jobs for tests: sentences of number words, a tiny model, shared programs."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.crash import write_corpus
from flaxformer_min.config import Config, DataConfig, ModelConfig, TrainingConfig
from flaxformer_min.experiment import run, validation
from flaxformer_min.experiment.run import TrainResult, train
from flaxformer_min.training.profile import Profile

WITHOUT_EFFECT_ON_A_STEP = dict(
    init_from="",
    log_every=1,
    validate_every=1,
    validation_sentences=0,
    save_every=1,
    keep_checkpoints=1,
    average_checkpoints=1,
    best_by="loss",
    patience=None,
    max_skipped=1,
)


def small_config(folder: Path, *, data=None, model=None, **training) -> Config:
    """Return the settings of a job of 9 steps; one epoch of its text has 4 batches."""
    corpus = write_corpus(folder / "corpus", {"train": 100, "val": 40})
    lengths = {"source_row_length": 24, "target_row_length": 24, "rows_per_batch": 4}
    sizes = {"vocab_size": 286, "num_layers": 1, "d_model": 16, "d_ff": 16, "num_heads": 2}
    schedule = {"steps": 9, "warmup_steps": 5, "log_every": 4, "validate_every": 6, "save_every": 3}
    others = {"validation_sentences": 0, "keep_checkpoints": 2}
    return Config(
        data=DataConfig(corpus, languages="en-es", **{**lengths, **(data or {})}),
        model=ModelConfig(**{**sizes, **(model or {})}),
        training=TrainingConfig(**{**schedule, **others, **training}),
    )


def changed(config: Config, group: str, **settings) -> Config:
    """Return the config with other settings in one of its groups."""
    return dataclasses.replace(
        config, **{group: dataclasses.replace(getattr(config, group), **settings)}
    )


def write_config(folder: Path, **settings) -> str:
    """Write the settings of a small job as a Python file; return its path."""
    file = folder / "small.py"
    text = f"from flaxformer_min.config import *\n\nconfig = {small_config(folder, **settings)!r}\n"
    file.write_text(text)
    return str(file)


@contextlib.contextmanager
def watched_steps(before: Callable = lambda state: None, after: Callable = lambda state: None):
    """Call these with the state before and after each training step."""
    wrap = Profile.wrap

    def watched(profile, train_step):
        profiled = wrap(profile, train_step)

        def take(state, batch):
            before(state)
            result = profiled(state, batch)
            after(result[0])
            return result

        return take

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Profile, "wrap", watched)
        yield


def stopped_after(config: Config, workdir: Path, step: int, **options) -> TrainResult:
    """Train, and request a stop while this step is taken."""
    requested = threading.Event()

    def request(state):
        if int(state.step) == step:
            requested.set()

    with watched_steps(after=request):
        result = train(config, workdir, stop=requested.is_set, **options)
    assert result.stopped and result.step == step
    assert (workdir / "checkpoints" / str(step)).is_dir()
    return result


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Trace each program once for all jobs that need the same: it takes longer than their steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_train_step", _shared_train_step)
        patch.setattr(run, "init_state", _shared_initial_state)
        patch.setattr(validation, "make_eval_step", make_eval_step)
        yield


make_train_step = functools.cache(run.make_train_step)
make_initial_state = functools.cache(run.init_state)
make_eval_step = functools.cache(validation.make_eval_step)


def _shared_train_step(model, config, optimizer=None, token_loss=None):
    return make_train_step(model, _essentials(config, seed=0), optimizer, token_loss)


def _shared_initial_state(model, config, optimizer, while_compiling):
    initial = make_initial_state(model, _essentials(config), optimizer)
    while_compiling(initial)
    return jax.tree.map(jnp.copy, initial)  # the step donates it


def _essentials(config: Config, **changes) -> Config:
    """Return the settings that the programs depend on; `steps` only with a cooldown."""
    training = dataclasses.replace(config.training, **WITHOUT_EFFECT_ON_A_STEP, **changes)
    if not training.cooldown_steps:
        training = dataclasses.replace(training, steps=1)
    data = config.data
    lengths = DataConfig(
        source_row_length=data.source_row_length, target_row_length=data.target_row_length
    )
    return Config(data=lengths, model=config.model, training=training)

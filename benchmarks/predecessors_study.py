"""The trainings and measurements of benchmarks/predecessors.py, each made once and kept."""

import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from predecessors import AttentionalRNN, FixedVectorRNN
from predecessors_measure import (
    chain_of,
    cross_attention,
    gradient_norms,
    norms_by_distance,
    step_seconds,
)

from flaxformer_min import (
    Config,
    DataConfig,
    ModelConfig,
    SearchConfig,
    TrainingConfig,
    Transformer,
    Translator,
    train,
)
from flaxformer_min.data.corpora import read_pairs
from flaxformer_min.evaluation import evaluate
from flaxformer_min.system.files import write_atomically
from flaxformer_min.system.signals import Stopped
from flaxformer_min.tokens import Batch, one_sentence_per_row
from flaxformer_min.training.metrics import read_metrics

MODELS = ("fixed vector", "attention", "Transformer")
SIZES = {
    "fixed vector": {"num_layers": 1, "d_ff": 264, "positional_encoding": "none"},
    "attention": {"num_layers": 1, "d_ff": 256, "positional_encoding": "none"},
    "Transformer": {"num_layers": 2, "d_ff": 256, "norm": "pre"},
}
"""What makes the models equally large; `d_ff` is the width of a recurrent model's states."""

RATES, TRIAL_STEPS = (0.002, 0.005), 150
"""Highest learning rates; each model takes the one that is better after so many steps."""

LENGTHS, STEP_TOKENS, STEPS_TIMED = (16, 32, 64, 128, 256, 512), 4_096, 5
"""Of the timed steps: tokens of a sentence, tokens of all sentences of a side, and repetitions."""

LONG_SENTENCES, DISTANCES = 48, 4
"""Pairs whose gradients are measured, and the width of a bin of distances."""

SENTENCE = 9
"""Of the test split, counted from 0: the one whose attention is drawn."""

VALIDATIONS = 8
"""Of a training, evenly spaced: the points of its curve."""


class Task(NamedTuple):
    """Text to learn.

    rows: of a batch, then their lengths in source and target tokens.
    """

    title: str
    languages: tuple[str, str]
    rows: tuple[int, int, int]
    vocab_size: int
    steps: int
    label_smoothing: float = 0.0


TASKS = {
    "multi30k": Task("Multi30k", ("en", "de"), (16, 64, 68), 2_000, 800, 0.1),
    "phrases": Task("embedded phrases", ("en", "ko"), (24, 40, 44), 1_500, 400),
    "copy": Task("copy letters", ("", ""), (16, 64, 64), 313, 1_000),
}

LETTERS = "abcdefghijklmnopqrstuvwxyz"
COPIES = {"train": 20_000, "validation": 400, "test": 500}
SHORTEST, LONGEST = 5, 60


def copies(split: str) -> list[tuple[str, str]]:
    """Return pairs of the same 5 to 60 random letters, with spaces between them.

    Each letter is one token: the vocabulary of 313 is 4 special pieces, 256 bytes, the space, and
    the letters with and without one before them.
    """
    rng, pairs = random.Random(split), []
    for _ in range(COPIES[split]):
        text = " ".join(rng.choices(LETTERS, k=rng.randint(SHORTEST, LONGEST)))
        pairs.append((text, text))
    return pairs


@dataclasses.dataclass(frozen=True)
class Study:
    """Where text comes from and results go.

    stop: whether to save and end.
    """

    corpus: str
    languages: str
    folder: Path
    stop: Callable[[], bool]

    def pairs(self, task: str, split: str) -> Sequence[tuple[str, str]]:
        """Return the sentence pairs of a split of a task."""
        if task == "copy":
            return copies(split)
        if task == "phrases":
            return read_pairs("cldr:en-ko", split)
        return read_pairs(self.corpus, split, self.languages)

    def result(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make()` returned, now or in an earlier start. Raises Stopped."""
        file = self.folder / f"{name}.json"
        if file.exists():
            return json.loads(file.read_text())
        if self.stop():
            raise Stopped
        since = time.perf_counter()
        print(f"{name} ...", file=sys.stderr, flush=True)
        content = make()
        write_atomically(file, json.dumps(content, ensure_ascii=False) + "\n")
        print(f"{name}: {time.perf_counter() - since:.0f} s", file=sys.stderr, flush=True)
        return content


class Job(NamedTuple):
    """One training: `rate` is the highest learning rate, `steps` those of the task unless given."""

    task: str
    model: str
    seed: int
    rate: float
    steps: int
    name: str

    def config(self) -> Config:
        """Return the settings, which differ between the models in `SIZES` and the rate alone."""
        task = TASKS[self.task]
        rows, source_row_length, target_row_length = task.rows
        warmup = max(self.steps // 8, 1)
        return Config(
            data=DataConfig(
                rows_per_batch=rows,
                source_row_length=source_row_length,
                target_row_length=target_row_length,
            ),
            model=model_config(self.model, task.vocab_size),
            training=TrainingConfig(
                steps=self.steps,
                warmup_steps=warmup,
                cooldown_steps=self.steps // 2,
                learning_rate_scale=self.rate * (128 * warmup) ** 0.5,
                label_smoothing=task.label_smoothing,
                clip_norm=1.0,
                seed=self.seed,
                validate_every=-(-self.steps // VALIDATIONS),
                validation_sentences=0,
                save_every=self.steps,
                keep_checkpoints=1,
            ),
            decoding=SearchConfig(beam_size=4, max_extra_tokens=20),
        )

    def train(self, study: Study) -> Any:
        """Return the `TrainResult` of the finished training. Raises Stopped."""
        pairs = {split: study.pairs(self.task, split) for split in ("train", "validation")}
        result = train(
            self.config(),
            study.folder / self.name,
            pairs=pairs,
            model=make_model(self.model, self.config().model),
            stop=study.stop,
        )
        if result.stopped:
            raise Stopped
        return result

    def measure(self, study: Study) -> dict[str, Any]:
        """Train; return the losses on the way and the translations of the test split."""
        result = self.train(study)
        sources, references = zip(*study.pairs(self.task, "test"), strict=True)
        found = result.translator.translate(sources, stop=study.stop)
        scores = evaluate(found, references, target_language=TASKS[self.task].languages[1])
        lines = [each for each in read_metrics(result.run.metrics) if "validation_loss" in each]
        return {
            "steps": result.step,
            "rate": self.rate,
            "loss": result.validation["loss"],
            "curve": [(line["step"], line["validation_loss"]) for line in lines],
            "bleu": scores.bleu.value,
            "exact_match": scores.exact_match,
            "lengths": [len(ids) for ids in result.translator.source_tokenizer.encode_batch(
                list(sources))],
            "translations": found,
        }  # fmt: skip


def model_config(model: str, vocab_size: int) -> ModelConfig:
    """Return the sizes of a model."""
    common = {"d_model": 128, "num_heads": 4, "dropout": 0.0}
    return ModelConfig(vocab_size=vocab_size, **common, **SIZES[model])


def make_model(model: str, config: ModelConfig) -> Any:
    """Return the module, or None for the Transformer of the package."""
    recurrent = {"fixed vector": FixedVectorRNN, "attention": AttentionalRNN}
    return recurrent[model](config) if model in recurrent else None


def trial_losses(study: Study, model: str) -> dict[str, float]:
    """Return the validation loss on Multi30k after the first steps at each learning rate."""
    losses = {}
    for rate in RATES:
        name = f"rate-{model}-{rate}".replace(" ", "-")
        job = Job("multi30k", model, 0, rate, TRIAL_STEPS, name)
        loss = study.result(name, lambda job=job: job.train(study).validation["loss"])
        losses[str(rate)] = loss
    return losses


def best_rate(study: Study, model: str) -> float:
    """Return the rate of the lowest loss."""
    losses = trial_losses(study, model)
    return float(min(losses, key=losses.__getitem__))


def job_of(study: Study, task: str, model: str, seed: int, steps: int = 0, suffix="") -> Job:
    """Return the training of a model on a task."""
    name = f"{task}-{model}-{seed}{suffix}".replace(" ", "-")
    rate = best_rate(study, model)
    return Job(task, model, seed, rate, steps or TASKS[task].steps, name)


def train_all(study: Study, seeds: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the results by task and model, one for each seed; all of seed 0 are made first."""
    results: dict[str, dict[str, list]] = {task: {name: [] for name in MODELS} for task in TASKS}
    for seed in range(seeds):
        for task in TASKS:
            for model in MODELS:
                job = job_of(study, task, model, seed)
                results[task][model].append(study.result(job.name, lambda j=job: j.measure(study)))
    return results


def equal_time(study: Study, seconds: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return the results on Multi30k when all models train as long as the fastest.

    seconds: of a training step of each.
    """
    fastest, found = min(seconds.values()), {}
    for model in MODELS:
        steps = round(TASKS["multi30k"].steps * fastest / seconds[model])
        suffix = "" if seconds[model] == fastest else "-equal-time"
        job = job_of(study, "multi30k", model, 0, steps, suffix)
        found[model] = study.result(job.name, lambda job=job: job.measure(study))
    return found


def finished(folder: Path, seeds: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the results that exist, by task and model."""
    return {
        task: {
            model: [
                json.loads(file.read_text())
                for seed in range(seeds)
                if (file := folder / f"{task}-{model}-{seed}.json".replace(" ", "-")).exists()
            ]
            for model in MODELS
        }
        for task in TASKS
    }


def step_times(study: Study) -> dict[str, Any]:
    """Return seconds of a training step, {"batch": {model: ...}, "length": {model: {n: ...}}}.

    Of Multi30k's batches, and of sentences of each length with the same number of tokens together.
    """
    rows, length, _ = TASKS["multi30k"].rows
    found: dict[str, Any] = {"batch": {}, "length": {}}
    for model in MODELS:
        config = Job("multi30k", model, 0, RATES[0], 100, "").config()

        def measure(model: str = model, config: Config = config) -> dict[str, float]:
            module = built(model, config)
            seconds = {"batch": step_seconds(module, config, (rows, length), STEPS_TIMED)}
            for each in LENGTHS:
                shape = (STEP_TOKENS // each, each)
                seconds[str(each)] = step_seconds(module, config, shape, STEPS_TIMED)
            return seconds

        seconds = study.result(f"times-{model}".replace(" ", "-"), measure)
        found["batch"][model] = seconds.pop("batch")
        found["length"][model] = seconds
    return found


def chains(study: Study) -> dict[str, dict[str, int]]:
    """Return the longest chain of matrix products of each model by sentence length."""

    def count() -> dict[str, dict[str, int]]:
        found = {}
        for model in MODELS:
            module = built(model, Job("multi30k", model, 0, RATES[0], 100, "").config())
            found[model] = {str(each): chain_of(module, each) for each in LENGTHS}
        return found

    return study.result("chains", count)


def built(model: str, config: Config) -> Any:
    """Return the module of a model."""
    return make_model(model, config.model) or Transformer(config.model)


def restored(study: Study, job: Job) -> Any:
    """Return the translator of a finished training."""
    return Translator.load(study.folder / job.name, model=make_model(job.model, job.config().model))


def gradients(study: Study, seeds: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Return median gradient norms by distance, {"before": {model: [of each seed]}, "after": ...}.

    On the longest sentences of Multi30k's validation split.
    """
    found: dict[str, Any] = {when: {model: [] for model in MODELS} for when in ("before", "after")}
    for seed in range(seeds):
        for model in MODELS:
            job = job_of(study, "multi30k", model, seed)
            name = f"gradients-{model}-{seed}".replace(" ", "-")
            both = study.result(name, lambda job=job: gradients_of(study, job))
            for when, norms in both.items():
                found[when][model].append(norms)
    return found


def gradients_of(study: Study, job: Job) -> dict[str, dict[int, float]]:
    """Return the norms of one model before and after training."""
    translator = restored(study, job)
    pairs = list(study.pairs("multi30k", "validation"))
    encoded = list(zip(*(
        tokenizer.encode_batch([pair[side] for pair in pairs])
        for side, tokenizer in enumerate((translator.source_tokenizer, translator.target_tokenizer))
    ), strict=True))  # fmt: skip
    longest = sorted(encoded, key=lambda pair: -min(map(len, pair)))[:LONG_SENTENCES]
    width = max(len(side) for pair in longest for side in pair)
    ids = np.zeros((2, len(longest), width), np.int32)
    for row, pair in enumerate(longest):
        for side in (0, 1):
            ids[side, row, : len(pair[side])] = pair[side]
    batch = Batch(*(one_sentence_per_row(jnp.asarray(side)) for side in ids))
    model = translator.models[0]
    initial = model.init(jax.random.key(job.seed), batch)["params"]
    found = {}
    for when, params in (("before", initial), ("after", translator.runner.params)):
        norms = np.asarray(gradient_norms(model, params, batch, 128))
        found[when] = norms_by_distance(norms, batch, DISTANCES)
    return found


def attention(study: Study) -> dict[str, Any]:
    """Return the attention of both models that have it, for one sentence of the test split."""
    source, target = study.pairs("multi30k", "test")[SENTENCE]
    found = {}
    for model in MODELS[1:]:
        job = job_of(study, "multi30k", model, 0)
        found[model] = study.result(
            f"attention-{model}",
            lambda job=job: cross_attention(restored(study, job), source, target),
        )
    return found

"""The recurrent models that came before, beside the Transformer: all of docs/why_attention.md.

    python benchmarks/predecessors.py --corpus text:DIR --languages en-de --docs docs

DIR has Multi30k. Three models of equal size (0.9 M parameters) are trained on equal text in an
equal order: a recurrent encoder-decoder through one fixed vector, the same with attention, and the
Transformer; on Multi30k, on the embedded phrases and on copying letters, with `--seeds` seeds each.
Then their quality, translations by length, gradients, step times and attention are measured. On two
cores it takes about an hour.

Each finished training and measurement is kept in `--folder`, and the same command continues after
the last one; a training that is interrupted resumes. `--minutes` interrupts it. Other text needs
another folder.
"""

import argparse
import dataclasses
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import machine

from flaxformer_min import Config, DataConfig, DecodingConfig, ModelConfig, TrainingConfig
from flaxformer_min.runtime.files import write_atomically
from flaxformer_min.runtime.signals import Stopped

MODELS = ("fixed vector", "attention", "Transformer")
SIZES = {
    "fixed vector": {"num_layers": 1, "d_ff": 264, "positional_encoding": "none"},
    "attention": {"num_layers": 1, "d_ff": 256, "positional_encoding": "none"},
    "Transformer": {"num_layers": 2, "d_ff": 256, "norm": "pre"},
}
"""What makes the models equally large; `d_ff` is the width of a recurrent model's states."""

RATES = (0.0015, 0.003, 0.006)
"""Highest learning rates, of which each model takes its best on each task."""

VALIDATIONS = 8
"""Of a training, evenly spaced: the points of its curve."""


class Task(NamedTuple):
    """Text to learn.

    trial: steps after which a learning rate is chosen.
    """

    title: str
    languages: tuple[str, str]
    rows: tuple[int, int, int]
    vocab_size: int
    steps: int
    trial: int
    label_smoothing: float = 0.0


TASKS = {
    "multi30k": Task("Multi30k", ("en", "de"), (16, 64, 68), 2_000, 1_000, 200, 0.1),
    "phrases": Task("embedded phrases", ("en", "ko"), (24, 40, 44), 1_500, 600, 150),
    "copy": Task("copy letters", ("", ""), (16, 64, 64), 300, 1_200, 300),
}

LETTERS = "abcdefghijklmnopqrstuvwxyz"
COPIES = {"train": 20_000, "validation": 400, "test": 500}
SHORTEST, LONGEST = 5, 60


def copies(split: str) -> list[tuple[str, str]]:
    """Return pairs of the same 5 to 60 random letters, with spaces between them."""
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
        from flaxformer_min.data.corpora import read_pairs

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
            decoding=DecodingConfig(beam_size=4, max_extra_tokens=20),
        )

    def train(self, study: Study) -> Any:
        """Return the `TrainResult` of the finished training. Raises Stopped."""
        from flaxformer_min import train

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
        from flaxformer_min.evaluation import evaluate
        from flaxformer_min.training.metrics import read_metrics

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
    from predecessors import AttentionalRNN, FixedVectorRNN

    recurrent = {"fixed vector": FixedVectorRNN, "attention": AttentionalRNN}
    return recurrent[model](config) if model in recurrent else None


def trial_losses(study: Study, task: str, model: str) -> dict[str, float]:
    """Return the validation loss after the first steps at each learning rate."""
    losses, steps = {}, TASKS[task].trial
    for rate in RATES:
        job = Job(task, model, 0, rate, steps, f"{task}-{model}-rate-{rate}".replace(" ", "-"))
        loss = study.result(job.name, lambda job=job: job.train(study).validation["loss"])
        losses[str(rate)] = loss
    return losses


def best_rate(study: Study, task: str, model: str) -> float:
    """Return the rate of the lowest loss."""
    losses = trial_losses(study, task, model)
    return float(min(losses, key=losses.__getitem__))


def job_of(study: Study, task: str, model: str, seed: int, steps: int = 0, suffix="") -> Job:
    """Return the training of a model on a task."""
    name = f"{task}-{model}-{seed}{suffix}".replace(" ", "-")
    rate = best_rate(study, task, model)
    return Job(task, model, seed, rate, steps or TASKS[task].steps, name)


def train_all(study: Study, seeds: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the results by task and model, one for each seed; those of seed 0 are made first."""
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


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", required=True, help="Multi30k, as text:DIR")
    parser.add_argument("--languages", default="en-de", help="of the corpus")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each model on each task")
    parser.add_argument("--folder", type=Path, default=Path("runs/predecessors"), help="of results")
    parser.add_argument("--docs", type=Path, help="write log/why_attention.* and images/why_* here")
    parser.add_argument("--minutes", type=float, help="save and end after so long")
    parser.add_argument("--only", choices=("rates", "train", "times", "rest"),
        help="one part of the work")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Make what is missing, and return the exit status: 3 if time ran out."""
    args = read_arguments(arguments)
    from flaxformer_min.runtime.devices import configure_cpu_devices
    from flaxformer_min.runtime.memory import tune_malloc

    tune_malloc()
    configure_cpu_devices(8)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    end = time.monotonic() + 60 * (args.minutes or float("inf"))
    args.folder.mkdir(parents=True, exist_ok=True)
    study = Study(args.corpus, args.languages, args.folder, lambda: time.monotonic() > end)
    try:
        work(study, args)
    except Stopped:
        print("Time is up; the same command continues.", file=sys.stderr)
        return 3
    return 0


def work(study: Study, args: argparse.Namespace) -> None:
    """Make the parts in their order."""
    if args.only in (None, "rates"):
        for task in ("copy", "multi30k", "phrases"):
            for model in MODELS:
                print(task, model, trial_losses(study, task, model), file=sys.stderr, flush=True)
    if args.only in (None, "train"):
        train_all(study, args.seeds)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

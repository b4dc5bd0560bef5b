"""The recurrent models that came before, beside the Transformer: all of docs/why_attention.md.

    python benchmarks/predecessors.py --corpus text:DIR --languages en-de \\
        --json why_attention.json --pictures docs/images

DIR has Multi30k. Three models of equal size (0.9 M parameters) are trained on equal text in an
equal order: a recurrent encoder-decoder through one fixed vector, the same with attention, and the
Transformer; on Multi30k, on the embedded phrases and on copying letters, with `--seeds` seeds each.
Then their quality, translations by length, gradients, step times and attention are measured. On two
cores it takes about an hour.

Each finished training and measurement is kept in `--folder`, and the same command continues after
the last one; a training that is interrupted resumes. `--minutes` interrupts it. Other text or sizes
need another folder.
"""

import argparse
import dataclasses
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import predecessors_figures as figures
from common import machine, table
from predecessors_measure import by_length, edges_of
from predecessors_study import (
    MODELS,
    TASKS,
    Study,
    attention,
    chains,
    equal_time,
    finished,
    gradients,
    step_times,
    train_all,
    trial_losses,
)

from flaxformer_min.evaluation import bleu
from flaxformer_min.plots.figures import save
from flaxformer_min.system.devices import configure_cpu_devices
from flaxformer_min.system.files import write_atomically
from flaxformer_min.system.memory import tune_malloc
from flaxformer_min.system.signals import Stopped


def existing(part: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a part if all of it was made in this or an earlier start, else None."""
    try:
        return part(*arguments)
    except Stopped:
        return None


def summary(study: Study, seeds: int) -> dict[str, Any]:
    """Return all numbers that exist, without making any."""
    study = dataclasses.replace(study, stop=lambda: True)
    times = existing(step_times, study)
    return {
        "tasks": {name: summary_of_task(study, name, seeds) for name in TASKS},
        "equal_time": times and existing(equal_time, study, times["batch"]),
        "times": times,
        "chains": existing(chains, study),
        "gradients": next(filter(None, (
            existing(gradients, study, number) for number in range(seeds, 0, -1))), None),
        "attention": existing(attention, study),
        "rates": {model: existing(trial_losses, study, model) for model in MODELS},
    }  # fmt: skip


def summary_of_task(study: Study, name: str, seeds: int) -> dict[str, Any]:
    """Return scores, curves and BLEU by length of the finished trainings of a task."""
    task, results = TASKS[name], finished(study.folder, seeds)[name]
    results = {model: runs for model, runs in results.items() if runs}
    references = [target for _, target in study.pairs(name, "test")]
    edges, models = [], {}
    for model, runs in results.items():
        lengths = runs[0]["lengths"]
        edges = edges_of(lengths, 5) if name != "copy" else [6, 17, 28, 39, 50, 62]

        def score(chosen: list[int], found: list[str]) -> float:
            return bleu(*([texts[n] for n in chosen] for texts in (found, references)),
                target_language=task.languages[1]).value  # fmt: skip

        models[model] = {
            "rate": runs[0]["rate"],
            "steps": runs[0]["steps"],
            "loss": [run["loss"] for run in runs],
            "bleu": [run["bleu"] for run in runs],
            "exact_match": [100 * run["exact_match"] for run in runs],
            "curves": [run["curve"] for run in runs],
            "by_length": [
                by_length(
                    lengths, edges, lambda chosen, run=run: score(chosen, run["translations"])
                )
                for run in runs
            ],
        }
    return {"title": task.title, "edges": edges, "models": models}


def quality_rows(numbers: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the lines of the table of losses and scores."""
    rows = []
    for task in numbers["tasks"].values():
        for model, found in task["models"].items():
            rows.append({
                "task": task["title"],
                "model": model,
                "highest rate": f"{found['rate']:g}",
                "steps": f"{found['steps']:,}",
                "validation loss": with_spread(found["loss"], 3),
                "BLEU": with_spread(found["bleu"], 1),
                "exact match, %": with_spread(found["exact_match"], 1),
                "seeds": str(len(found["bleu"])),
            })  # fmt: skip
    for model, found in (numbers["equal_time"] or {}).items():
        rows.append({
            "task": "Multi30k, equal time",
            "model": model,
            "highest rate": f"{found['rate']:g}",
            "steps": f"{found['steps']:,}",
            "validation loss": f"{found['loss']:.3f}",
            "BLEU": f"{found['bleu']:.1f}",
            "exact match, %": f"{100 * found['exact_match']:.1f}",
            "seeds": "1",
        })  # fmt: skip
    return rows


def with_spread(numbers: Sequence[float], digits: int) -> str:
    """Return the mean, with the lowest and the highest if there are several.

    >>> with_spread([1.0, 2.0, 2.1], 1)
    '1.7 (1.0 to 2.1)'
    """
    mean, *ends = (
        f"{number:.{digits}f}" for number in (statistics.fmean(numbers), min(numbers), max(numbers))
    )
    return mean if len(numbers) == 1 else f"{mean} ({ends[0]} to {ends[1]})"


def write(study: Study, args: argparse.Namespace) -> None:
    """Print the scores so far; write all numbers and draw the pictures, if that was asked for."""
    numbers = summary(study, args.seeds)
    if rows := quality_rows(numbers):
        print(f"{machine('jax')}\n\n{table(rows)}")
    if args.json:
        write_atomically(args.json, json.dumps(numbers, ensure_ascii=False) + "\n")
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
        draw(numbers, args.pictures)


def draw(numbers: Mapping[str, Any], images: Path) -> None:
    """Draw the pictures of docs/why_attention.md for which all numbers are there."""
    complete = all(len(task["models"]) == len(MODELS) for task in numbers["tasks"].values())
    if complete:
        save(figures.quality_figure(numbers["tasks"]), images / "why_quality.png")
        save(figures.bottleneck_figure(numbers["tasks"]), images / "why_bottleneck.png")
    if numbers["gradients"]:
        save(figures.gradients_figure(numbers["gradients"]), images / "why_gradients.png")
    if numbers["times"] and numbers["chains"]:
        seconds = numbers["times"]["length"]
        save(figures.parallel_figure(seconds, numbers["chains"]), images / "why_parallel.png")
    if numbers["attention"]:
        save(figures.looks_figure(numbers["attention"]), images / "why_looks.png")


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", required=True, help="Multi30k, as text:DIR")
    parser.add_argument("--languages", default="en-de", help="of the corpus")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each model on each task")
    parser.add_argument("--folder", type=Path, default=Path("runs/predecessors"), help="of results")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures, why_*.png")
    parser.add_argument("--minutes", type=float, help="save and end after so long")
    parser.add_argument("--only", choices=("train", "times", "rest"),
        help="one part of the work")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Make what is missing, and return the exit status: 3 if time ran out."""
    args = read_arguments(arguments)
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
    """Make the parts that were asked for, in their order, and write what there is."""
    parts = [args.only] if args.only else ["train", "times", "rest"]
    try:
        if "train" in parts:
            train_all(study, args.seeds)
        if "times" in parts:
            step_times(study)
            chains(study)
        if "rest" in parts:
            attention(study)
            gradients(study, args.seeds)
            equal_time(study, step_times(study)["batch"])
    finally:
        write(study, args)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

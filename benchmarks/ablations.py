"""Ablations on Multi30k, after the paper's table 3: one training for each row.

    python benchmarks/ablations.py --corpus text:DIR --steps 1600 \\
        --json ablations.json --picture docs/images/ablations.png --training.warmup-steps 400 \\
        --training.cooldown-steps 1200 --training.learning-rate-scale 0.679

Each row is `train.py configs/multi30k_en_de.py` with one change, for the same number of steps, on
the same text, in the same order of rows unless that is the change, each on one core. Any other
option is passed to all of them; warm-up and cooldown are those of the config, for 20,000 steps,
unless shorter ones are given. `--rows base:3,post-norm:3,heads-1` selects rows, two of these with
three seeds.

If it is stopped, by Ctrl-C or a power cut, the same command continues: finished runs are kept,
interrupted ones resume. Other options need another --folder.

After each run, --json and --picture are written with the measurements so far. The table is printed
at the end.
"""

import argparse
import dataclasses
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import cores, machine, table

from flaxformer_min.plots.figures import save
from flaxformer_min.system.files import write_atomically
from flaxformer_min.training.metrics import read_metrics

ROOT = Path(__file__).parents[1]
CONFIG = "configs/multi30k_en_de.py"

SENTENCES = 1_014
"""Validation pairs that are translated: all of Multi30k's."""

SAVES = 20
"""Checkpoints of a run; every second one is validated."""


class Row(NamedTuple):
    """One line of the table.

    differs:  its difference from the base, in words.
    settings: the settings that differ. Rows with the same settings share their runs.
    mean:     measure the mean of the last checkpoints, not the last of them.
    """

    name: str
    differs: str
    settings: dict[str, Any]
    mean: bool = False


KEEP = {"training.average-checkpoints": 5, "training.keep-checkpoints": 5}
"""Leaves training as it is; in the base, so that the row "average" can share its runs."""

ROWS = (
    Row("base", "nothing: 4 + 4 layers, 4 heads, pre-norm, subword sampling", KEEP),
    Row("heads-1", "(A) 1 head of 128", {"model.num-heads": 1}),
    Row("heads-8", "(A) 8 heads of 16", {"model.num-heads": 8}),
    Row("layers-1", "(C) N = 1", {"model.num-layers": 1}),
    Row("layers-2", "(C) N = 2", {"model.num-layers": 2}),
    Row("no-dropout", "(D) no dropout", {"model.dropout": 0.0}),
    Row("no-smoothing", "(D) no label smoothing", {"training.label-smoothing": 0.0}),
    Row("no-positions", "(E) no positional encoding", {"model.positional-encoding": "none"}),
    Row("halves", "(E) all sines, then all cosines", {"model.positional-encoding": "halves"}),
    Row(
        "learned",
        "(E) learned positional embeddings",
        {"model.positional-encoding": "learned", "model.max-positions": 68},
    ),
    Row("post-norm", "norm after the sum, as the paper", {"model.norm": "post"}),
    Row("separate", "(3.4) embeddings and output apart", {"model.embeddings": "separate"}),
    Row("r-drop", "R-Drop, α = 5 (two readings a step)", {"training.r-drop": 5.0}),
    Row("no-subwords", "no subword sampling", {"data.subword-sampling": 0.0}),
    Row("ema", "moving average of parameters, 0.999", {"training.ema-decay": 0.999}),
    Row("average", "mean of the last 5 checkpoints", KEEP, mean=True),
)
"""The letters are those of the paper's table 3, the number that of its section."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One training: a row and a seed.

    common: options that all rows have.
    """

    row: Row
    seed: int
    folder: Path
    common: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its files in the folder; rows that share runs share it."""
        first = next(row for row in ROWS if row.settings == self.row.settings)
        return f"{first.name}-{self.seed}"

    @property
    def options(self) -> list[str]:
        """The options that identify its runs."""
        own = [text for name, value in self.row.settings.items() for text in (f"--{name}", value)]
        return [*self.common, "--training.seed", str(self.seed), *map(str, own)]

    @property
    def command(self) -> list[str]:
        """The command that trains it, or continues."""
        workdir = str(self.folder.absolute() / self.name)
        return [sys.executable, "train.py", CONFIG, "--workdir", workdir, *self.options]

    @property
    def log(self) -> Path:
        """The output of train.py."""
        return self.folder / f"{self.name}.log"

    @property
    def result(self) -> dict[str, Any] | None:
        """The measurements with exactly these options, or None if there are none yet."""
        file = self.folder / f"{self.name}.json"
        result = json.loads(file.read_text()) if file.exists() else {}
        return result if result.get("options") == self.options else None

    def start(self, core: int) -> subprocess.Popen:
        """Train on one core, in a session of its own, so that only we receive Ctrl-C."""
        environment = {"JAX_PLATFORMS": "cpu", **os.environ, "JAX_NUM_CPU_DEVICES": "1"}
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        os.sched_setaffinity(process.pid, {core})
        return process

    def measure(self) -> None:
        """Write the result of a finished run."""
        lines = read_metrics(self.folder / self.name / "metrics.jsonl")
        validations = [line for line in lines if "validation_bleu" in line]
        text = self.log.read_text()
        mean = re.findall(
            r"The mean of the checkpoints of .*:\n.*perplexity ([\d.]+), BLEU ([\d.]+)", text
        )
        perplexities = [line["validation_perplexity"] for line in validations]
        bleus = [line["validation_bleu"] for line in validations]
        result = {
            "options": self.options,
            "step": validations[-1]["step"],
            "parameters": float(re.findall(r"([\d.]+) M parameters", text)[-1]),
            "last": {"perplexity": perplexities[-1], "bleu": bleus[-1]},
            "best": {"perplexity": min(perplexities), "bleu": max(bleus)},
        }
        if mean:
            result["mean"] = dict(zip(("perplexity", "bleu"), map(float, mean[-1]), strict=True))
        text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
        write_atomically(self.folder / f"{self.name}.json", text)


def train_all(jobs: Sequence[Job], free: list[int], finished: Callable[[], None]) -> list[str]:
    """Train on the free cores; return the names of failed jobs with their logs.

    However it ends, running jobs are asked to save, and waited for.
    """
    waiting, running, failed = list(jobs), {}, []
    try:
        while waiting or running:
            while waiting and free:
                job, core = waiting.pop(0), free.pop(0)
                print(f"{job.name}: core {core}, log {job.log}", flush=True)
                running[core] = job, job.start(core)
            time.sleep(0.5)
            ended = [core for core, (_, process) in running.items() if process.poll() is not None]
            for core in ended:
                job, process = running.pop(core)
                free.append(core)
                if process.returncode:
                    failed.append(f"{job.name} ended with {process.returncode}; see {job.log}")
                    continue
                job.measure()
                finished()
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
    return failed


LABEL = {
    "xytext": (0, 6),
    "textcoords": "offset points",
    "ha": "center",
    "fontsize": 8,
    "color": "#444",
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.4},
}
"""Style of the number above a dot."""


class Line(NamedTuple):
    """A row of the table with its measurements, one number for each seed."""

    row: Row
    parameters: float
    perplexity: list[float]
    bleu: list[float]
    best_perplexity: list[float]
    best_bleu: list[float]
    to_base: list[float]


def measured(folder: Path, common: tuple[str, ...]) -> Iterator[Line]:
    """Yield a line for each row that has results, whether or not it was requested this time."""
    seeds = sorted({int(path.stem.rpartition("-")[2]) for path in folder.glob("*-*.json")})
    base = {seed: Job(ROWS[0], seed, folder, common).result for seed in seeds}
    for row in ROWS:
        found = {seed: Job(row, seed, folder, common).result for seed in seeds}
        found = {seed: result for seed, result in found.items() if result}
        if not found:
            continue
        which = "mean" if row.mean else "last"
        last = {seed: result[which] for seed, result in found.items()}
        best = [result["mean" if row.mean else "best"] for result in found.values()]
        yield Line(
            row,
            next(iter(found.values()))["parameters"],
            [each["perplexity"] for each in last.values()],
            [each["bleu"] for each in last.values()],
            [each["perplexity"] for each in best],
            [each["bleu"] for each in best],
            [last[seed]["bleu"] - base[seed]["last"]["bleu"] for seed in last if base[seed]],
        )


def with_spread(numbers: Sequence[float], sign: str = "") -> str:
    """Return the mean, with minimum and maximum if there are several numbers.

    >>> with_spread([30.0]), with_spread([30.0, 31.5, 30.6]), with_spread([0.5], "+")
    ('30.00', '30.70 (30.00 to 31.50)', '+0.50')
    """
    if not numbers:
        return ""
    mean, *ends = (
        f"{n:{sign}.2f}" for n in (statistics.fmean(numbers), min(numbers), max(numbers))
    )
    return mean if len(numbers) == 1 else f"{mean} ({ends[0]} to {ends[1]})"


def table_of(lines: Sequence[Line]) -> str:
    """Return the lines as a Markdown table."""
    return table(
        [
            {
                "row": line.row.name,
                "what differs": line.row.differs,
                "parameters, M": f"{line.parameters:.1f}",
                "perplexity": with_spread(line.perplexity),
                "BLEU": with_spread(line.bleu),
                "best perplexity": with_spread(line.best_perplexity),
                "best BLEU": with_spread(line.best_bleu),
                "seeds": str(len(line.bleu)),
                "BLEU less the base's": ""
                if line.row == ROWS[0]
                else with_spread(line.to_base, "+"),
            }
            for line in lines
        ]
    )


def draw(lines: Sequence[Line], steps: int) -> Any:
    """Return a figure: a dot for the mean of a row, a line from minimum to maximum of its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.3 + 0.36 * len(lines)), layout="constrained")
    figure.suptitle(f"Multi30k, English to German, validation after {steps:,} steps")
    kinds = (
        ("bleu", "BLEU: more is better", ".1f"),
        ("perplexity", "perplexity of a piece: less is better", ".2f"),
    )
    for (field, name, digits), axes in zip(kinds, figure.subplots(1, 2, sharey=True), strict=True):
        for height, line in enumerate(lines):
            values = getattr(line, field)
            mean, is_base = statistics.fmean(values), line.row == ROWS[0]
            color = "#b3410e" if is_base else "#1f5f99"
            axes.plot([min(values), max(values)], [height] * 2, color=color, linewidth=2)
            axes.plot(values, [height] * len(values), "|", color=color, markersize=11)
            axes.plot(mean, height, "o", color=color, markersize=5)
            axes.annotate(f"{mean:{digits}}", (mean, height), **LABEL)
            if is_base:
                axes.axvline(mean, color=color, linewidth=0.8, linestyle=":")
        axes.set(xlabel=name, ylim=(len(lines) - 0.4, -0.8), yticks=range(len(lines)))
        axes.margins(x=0.08)
        axes.grid(axis="y", color="#e3e8ee", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(left=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
    first = figure.axes[0]
    first.set_yticklabels([line.row.differs if line.row != ROWS[0] else "base" for line in lines])
    return figure


def write(settings: argparse.Namespace, common: tuple[str, ...], title: str) -> None:
    """Write the measurements so far as data and as a picture, where they were asked for."""
    lines = list(measured(settings.folder, common))
    if settings.json and lines:
        rows = [{**line._asdict(), "row": line.row.name} for line in lines]
        content = {"title": title, "rows": rows}
        write_atomically(settings.json, json.dumps(content, indent=2) + "\n")
    if settings.picture and lines:
        save(draw(lines, settings.steps), settings.picture)


def read_rows(text: str, seeds: int) -> list[tuple[Row, int]]:
    """Return the rows that `base:3,heads-1` names, with their numbers of seeds.

    >>> [(row.name, seeds) for row, seeds in read_rows("base:3,heads-1", 1)]
    [('base', 3), ('heads-1', 1)]
    """
    known = {row.name: row for row in ROWS}
    chosen = []
    for part in text.split(","):
        name, _, count = part.partition(":")
        if name not in known or not (count or "1").isdecimal():
            raise argparse.ArgumentTypeError(
                f"a row is NAME or NAME:SEEDS, the name one of {', '.join(known)}; got {part!r}."
            )
        chosen.append((known[name], int(count or seeds)))
    return chosen


def read_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our own options, and those that are passed to every training."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", required=True, help="as text:DIR")
    parser.add_argument("--steps", type=int, required=True, help="of each training")
    parser.add_argument("--rows", default=",".join(row.name for row in ROWS),
        help="NAME or NAME:SEEDS, ... (default: all)")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=1, help="where a row names no number")
    parser.add_argument("--jobs", type=int, default=cores(), help="trainings at once, a core each")
    parser.add_argument("--folder", type=Path, default=Path("runs/ablations"), help="of the runs")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--picture", type=Path, help="draw the rows here")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, train nothing")
    settings, others = parser.parse_known_args(arguments)
    try:
        settings.rows = read_rows(settings.rows, settings.seeds)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if not 1 <= settings.jobs <= cores():
        parser.error(
            f"--jobs must be from 1 to the {cores()} cores there are; got {settings.jobs}."
        )
    return settings, others


def check_options(file: Path, common: tuple[str, ...]) -> None:
    """Exit if the folder has runs with other options: they would be continued or reported."""
    if file.exists() and (found := file.read_text()) != shlex.join(common):
        sys.exit(
            "ablations.py: error: all runs of a folder have the same options; those in "
            f"{file.parent} have {found}. Choose another --folder."
        )
    write_atomically(file, shlex.join(common))


def main(arguments: Sequence[str]) -> int:
    """Train what is missing, print the measurements, and return the exit status."""
    settings, others = read_arguments(arguments)
    every = -(-settings.steps // SAVES)
    common = ("--data.corpus", settings.corpus, "--training.steps", settings.steps)
    common += ("--training.save-every", every, "--training.validate-every", 2 * every)
    common = (*map(str, common), "--training.validation-sentences", str(SENTENCES), *others)
    jobs = {}
    for row, seeds in settings.rows:
        for seed in range(seeds):
            job = Job(row, seed, settings.folder, common)
            jobs.setdefault(job.name, job)
    missing = [job for job in jobs.values() if job.result is None]
    if settings.dry_run:
        print("\n".join(shlex.join(job.command) for job in missing))
        return 0
    settings.folder.mkdir(parents=True, exist_ok=True)
    check_options(settings.folder / "options.txt", common)
    title = f"{settings.steps:,} steps of {CONFIG} {shlex.join(others)}; {machine('jax')}"

    def tell() -> None:
        write(settings, common, title)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed = train_all(missing, sorted(os.sched_getaffinity(0))[: settings.jobs], tell)
    tell()
    if lines := list(measured(settings.folder, common)):
        print(f"\n{title}\n\n{table_of(lines)}")
    print("".join(f"\n{text}" for text in failed), end="\n" if failed else "")
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

"""The loop: read a batch, take a step, say how it goes, validate, save; again."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import jax

from flaxformer_min.config import TrainingConfig
from flaxformer_min.runs.checkpoint import Checkpoints
from flaxformer_min.tokens import Batch
from flaxformer_min.training.metrics import MetricsLog
from flaxformer_min.training.step import Metrics, TrainState


class Rows(Protocol):
    """Batches without end, that can go on where they stood."""

    def __next__(self) -> Batch:
        """The next batch."""

    def get_state(self) -> dict[str, Any]:
        """Where it stands."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class Window:
    """Sums since the last line of metrics. Saved with a checkpoint, so that a cut leaves no trace.

    All but the clock is the same for a run that was cut and one that was not.
    """

    def __init__(self, sums: Mapping[str, float] | None = None):
        """Start empty, or from what a checkpoint holds."""
        self.sums = dict(sums or {})
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave out of the rates what happens from here to the next call (a validation, say)."""
        self._since, self._tokens, self._steps = time.perf_counter(), 0.0, 0

    def add(self, metrics: Mapping[str, float]) -> None:
        """Count one step."""
        counts = {"steps": 1} | {name: metrics[name] for name in ("places", "real", "tokens")}
        if not metrics["skipped"]:
            counts |= {name: metrics[name] for name in ("loss", "accuracy", "gradient_norm")}
        counts |= {"learned": 1 - metrics["skipped"], "skipped": metrics["skipped"]}
        for name, value in counts.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.sums["learning_rate"] = metrics["learning_rate"]
        self._tokens += metrics["tokens"]
        self._steps += 1

    def close(self) -> dict[str, float]:
        """The line of metrics, and an empty window."""
        sums, seconds = self.sums, max(time.perf_counter() - self._since, 1e-9)
        learned = max(sums["learned"], 1)
        line = {
            name: sums.get(name, 0.0) / learned for name in ("loss", "accuracy", "gradient_norm")
        }
        line |= {
            "learning_rate": sums["learning_rate"],
            "skipped": sums["skipped"],
            "padding": 1 - sums["real"] / sums["places"],
            "tokens_per_second": self._tokens / seconds,
            "steps_per_second": self._steps / seconds,
        }
        self.sums = {}
        self.restart_clock()
        return line


def train(
    state: TrainState,
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    rows: Rows,
    split: Callable[[Batch], Batch],
    config: TrainingConfig,
    checkpoints: Checkpoints,
    log: MetricsLog,
    validate: Callable[[Any, int], dict[str, float] | None],
    *,
    stop: Callable[[], bool] = bool,
    before: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> TrainState:
    """Train until `config.steps`, or until `stop()`; then save and return the state.

    `rows` give the host's batches and `split` lays them out for the devices. `validate(params,
    step)` returns metrics, "validation_loss" and "validation_bleu" among them if the best
    checkpoint is to be known; or None where it was told to stop, and it is then called again when
    training goes on. `before` is the description of the checkpoint that training goes on from. A
    step's metrics are read while the next one runs.

    Raises RuntimeError after `config.max_skipped` steps in a row that were not finite.
    """
    before = before or {}
    step, summary = int(state.step), Window(before.get("window"))
    saved = step
    pending: Metrics | None = None
    in_a_row, ranks, owed = 0, list(before.get("ranks", ())), before.get("owed", False)

    def take_in(waiting: Metrics | None, step: int) -> None:
        nonlocal in_a_row
        if waiting is None:
            return
        metrics = {name: float(value) for name, value in jax.device_get(waiting).items()}
        summary.add(metrics)
        in_a_row = in_a_row + 1 if metrics["skipped"] else 0
        if in_a_row >= config.max_skipped:
            raise RuntimeError(_not_finite(step, in_a_row))

    def save(rank: float | None = None) -> None:
        nonlocal saved
        meta = {"rows": rows.get_state(), "window": summary.sums, "ranks": ranks, "owed": owed}
        checkpoints.save(step, state.to_dict(), meta, rank)
        saved = step

    def check() -> float | None:
        nonlocal owed
        scores = validate(state.best_params, step)
        summary.restart_clock()
        owed = scores is None
        if owed:
            return None
        log.write(step, scores)
        rank = rank_of(scores, config.best_by)
        ranks.append(math.inf if rank is None else rank)
        return rank

    def next_batch() -> Batch | None:
        if step >= config.steps or stop() or out_of_patience(ranks, config.patience):
            return None
        try:
            return next(rows)
        except RuntimeError:
            # A signal to all processes of a job ends those that assemble batches, too. Several that
            # train together must end after the same step, and only some would here.
            if jax.process_count() > 1 or not stop():
                raise
            return None

    if owed:
        rank = check()
        if not owed:
            checkpoints.describe(step, {"ranks": ranks, "owed": False}, rank)
    if step < config.steps and out_of_patience(ranks, config.patience):
        say(_impatience(config))
    with _progress(step, config.steps) as bar:
        while (batch := next_batch()) is not None:
            state, metrics = train_step(state, split(batch))
            take_in(pending, step)
            pending, step = metrics, step + 1
            bar.update()
            due = [step % every == 0 for every in (config.log_every, config.validate_every)]
            due.append(step % config.save_every == 0)
            if any(due) or step == config.steps:
                take_in(pending, step)
                pending = None
            if due[0]:
                line = summary.close()
                log.write(step, line)
                say(_readable(step, config.steps, line))
            rank = None
            if due[1] or step == config.steps:
                rank = check()
            impatient = out_of_patience(ranks, config.patience)
            if impatient:
                say(_impatience(config))
            best = rank is not None and rank <= min(ranks)
            if due[2] or step == config.steps or impatient or best:
                save(rank)
    take_in(pending, step)
    if saved != step:
        save()
    checkpoints.wait()
    return state


def _impatience(config: TrainingConfig) -> str:
    return (
        f"Stopping: {config.patience} validations in a row found nothing better. A larger "
        "--training.patience goes on."
    )


def out_of_patience(ranks: Sequence[float], patience: int | None) -> bool:
    """Whether none of the last `patience` validations ranks below all before them.

    >>> out_of_patience([3.0, 2.0, 2.5], 2), out_of_patience([3.0, 2.0, 2.5, 2.0], 2)
    (False, True)
    """
    if patience is None or len(ranks) <= patience:
        return False
    return min(ranks[-patience:]) >= min(ranks[:-patience])


def rank_of(scores: Mapping[str, float], best_by: str) -> float | None:
    """Lower is better; None where nothing comparable was measured, a loss of NaN included.

    >>> rank_of({"validation_loss": 2.0, "validation_bleu": 30.0}, "bleu")
    -30.0
    >>> rank_of({"validation_loss": float("nan")}, "loss")
    """
    if best_by == "bleu" and "validation_bleu" in scores:
        return -scores["validation_bleu"]
    loss = scores.get("validation_loss", math.nan)
    return loss if math.isfinite(loss) else None


def _readable(step: int, steps: int, line: Mapping[str, float]) -> str:
    left = (steps - step) / line["steps_per_second"] if line["steps_per_second"] else 0
    skipped = f"  skipped {line['skipped']:.0f}" if line["skipped"] else ""
    return (
        f"step {step:,}/{steps:,}  loss {line['loss']:.3f} nats  accuracy {line['accuracy']:.1%}  "
        f"rate {line['learning_rate']:.2e}  gradient {line['gradient_norm']:.2f}  "
        f"{line['tokens_per_second']:,.0f} tokens/s  {line['steps_per_second']:.2f} steps/s  "
        f"padding {line['padding']:.1%}  {timedelta(seconds=int(left))} left" + skipped
    )


def _not_finite(step: int, count: int) -> str:
    return (
        f"training stopped at step {step}: loss or gradient was not finite in {count} steps in a "
        "row. Likely causes: too high a learning rate (training.learning_rate_scale, "
        "training.warmup_steps), no clipping (training.clip_norm), bfloat16 where float32 is "
        "needed (model.dtype), or broken text. The last checkpoint is intact; another rate or "
        "clipping needs another --workdir."
    )


@contextlib.contextmanager
def _progress(step: int, steps: int):
    """A bar where stderr is a terminal; nothing elsewhere."""
    from tqdm import tqdm

    with tqdm(
        total=steps, initial=step, unit="step", disable=not sys.stderr.isatty(), leave=False
    ) as bar:
        yield bar

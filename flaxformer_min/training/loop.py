"""The training loop: take steps, log, validate, save, until a given step or a stop request."""

import contextlib
import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import jax

from flaxformer_min.config import TrainingConfig
from flaxformer_min.storage.checkpoint import Checkpoints
from flaxformer_min.storage.metadata import Metric
from flaxformer_min.system.signals import StopCheck
from flaxformer_min.tokens import Batch
from flaxformer_min.training.metrics import MetricsLog, Window
from flaxformer_min.training.step import Metrics, TrainState

LOGGER = logging.getLogger("flaxformer_min")

Validate = Callable[[Any, int], Mapping[str, float] | None]
"""Return scores such as "validation_loss", given parameters and step; None if stopped."""


OnStep = Callable[[int, Mapping[str, float]], Any]
"""Called with a step's number and its metrics, or with the scores of the validation after it."""


class BatchIterator(Protocol):
    """An endless iterator of batches whose position can be saved, with grain's method names."""

    def __next__(self) -> Batch:
        """Return the next batch."""

    def get_state(self) -> dict[str, Any]:
        """Return the position, as JSON can hold it."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position."""


@dataclasses.dataclass
class Progress:
    """State of the loop besides arrays, saved so that a resumed run equals an uninterrupted one.

    window:             sums of the metrics since the last line of them.
    costs:              of all validations, lower is better (see `Metric.cost`); None without one.
    validation_pending: a validation was due, and a stop request came before its end.
    skipped_in_a_row:   steps up to the last one whose loss or gradient was not finite.
    validation_text:    what these validations are of (see `what_is_compared`).
    """

    window: dict[str, float] = dataclasses.field(default_factory=dict)
    costs: list[float | None] = dataclasses.field(default_factory=list)
    validation_pending: bool = False
    skipped_in_a_row: int = 0
    validation_text: str = ""


@dataclasses.dataclass
class Trainer:
    """Trains until `config.steps`, a stop request, or until patience is exhausted.

    state:       where to begin. It is donated step by step; `run` returns the last one.
    train_step:  see `make_train_step`.
    batches:     the batches of this process.
    shard:       lays a batch out for its devices (see `shard_batch`).
    checkpoints: where to save, or None to save nothing.
    validate:    scores parameters, or None for no validation. If it returns None, because it was
                 stopped, it is called again when training continues.
    on_step, on_validation: called with the metrics of each step, and the scores of each validation.
    progress:    from the checkpoint that training continues from.
    identity:    part of each checkpoint's description (see `RunFolder.identity`).

    The metrics of a step are read while the next one runs. `scores` are those of the newest
    validation.
    """

    state: TrainState
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    batches: BatchIterator
    shard: Callable[[Batch], Batch]
    config: TrainingConfig
    checkpoints: Checkpoints | None = None
    log: MetricsLog | None = None
    validate: Validate | None = None
    stop: StopCheck = None
    progress: Progress = dataclasses.field(default_factory=Progress)
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    on_step: OnStep | None = None
    on_validation: OnStep | None = None

    def __post_init__(self):
        """Restore the window of metrics."""
        self._step = int(self.state.step)  # follows state.step, which takes a sync to read
        self._saved = self._step
        self._window = Window(self.progress.window)
        self._unread: Metrics | None = None

    def run(self) -> TrainState:
        """Train, save, and return the state.

        Raises RuntimeError after `config.max_skipped` steps in a row that were not finite.
        """
        if self.progress.validation_pending:
            self._validate_pending()
        if self._step < self.config.steps and self._out_of_patience():
            LOGGER.info(_impatience(self.config))
        with _progress_bar(self._step, self.config.steps) as bar:
            while (batch := self._next_batch()) is not None:
                self._take_step(batch)
                bar.update()
        self._read_metrics()
        if self._saved != self._step:
            self._save()
        if self.checkpoints is not None:
            self.checkpoints.wait()
        return self.state

    def _next_batch(self) -> Batch | None:
        if self._step >= self.config.steps or self._stopping() or self._out_of_patience():
            return None
        try:
            return next(self.batches)
        except StopIteration as end:
            raise ValueError(
                f"batches must not end before training.steps={self.config.steps}; they ended after "
                f"step {self._step}. Repeat them, or lower training.steps."
            ) from end
        except RuntimeError:
            # A signal to all processes of a job also ends the workers that assemble batches. Of
            # several training processes, all must end after the same step, so this is an error.
            if jax.process_count() > 1 or not self._stopping():
                raise
            return None

    def _take_step(self, batch: Batch) -> None:
        config = self.config
        self.state, metrics = self.train_step(self.state, self.shard(batch))
        self._read_metrics()
        self._unread, self._step = metrics, self._step + 1
        last = self._step == config.steps
        log, validate, save = (
            self._step % every == 0
            for every in (config.log_every, config.validate_every, config.save_every)
        )
        if log or validate or save or last:
            self._read_metrics()
        if log:
            self._write_metrics()
        metric = self._validate() if validate or last else None
        impatient = self._out_of_patience()
        if impatient:
            LOGGER.info(_impatience(config))
        best = metric is not None and metric.cost <= min(_known(self.progress.costs))
        if save or last or impatient or best:
            self._save(metric)

    def _read_metrics(self) -> None:
        """Count the metrics of the last step, once."""
        if self._unread is None:
            return
        metrics = {name: float(value) for name, value in jax.device_get(self._unread).items()}
        self._unread = None
        self._window.add(metrics)
        if self.on_step is not None:
            self.on_step(self._step, metrics)
        skipped = self.progress.skipped_in_a_row + 1 if metrics["skipped"] else 0
        self.progress.skipped_in_a_row = skipped
        if skipped >= self.config.max_skipped:
            saved = self._saved if self.checkpoints is not None else 0
            raise RuntimeError(_not_finite(self._step, skipped, saved))

    def _write_metrics(self) -> None:
        line = self._window.close()
        if self.log is not None:
            self.log.write(self._step, line)
        LOGGER.info(_format_metrics(self._step, self.config.steps, line))

    def _validate(self) -> Metric | None:
        """Validate, and return the metric that selects checkpoints."""
        if self.validate is None:
            return None
        scores = self.validate(self.state.eval_params, self._step)
        self._window.restart_clock()
        self.progress.validation_pending = scores is None
        if scores is None:
            return None
        self.scores = scores
        if self.on_validation is not None:
            self.on_validation(self._step, scores)
        if self.log is not None:
            self.log.write(self._step, scores)
        metric = selection_metric(scores, self.config.best_by)
        self.progress.costs.append(None if metric is None else metric.cost)
        return metric

    def _validate_pending(self) -> None:
        """Make up for a validation that a stop request prevented; describe it in the checkpoint."""
        metric = self._validate()
        if not self.progress.validation_pending and self.checkpoints is not None:
            self.checkpoints.describe(self._step, self._description(), metric)

    def _save(self, metric: Metric | None = None) -> None:
        self._saved = self._step
        if self.checkpoints is not None:
            step = int(self.state.step)
            self.checkpoints.save(step, self.state.to_dict(), self._description(), metric)

    def _description(self) -> dict[str, Any]:
        self.progress.window = self._window.sums
        progress = dataclasses.asdict(self.progress)
        description = {"batches": self.batches.get_state(), "progress": progress}
        description["iterator"] = type(self.batches).__name__
        return description | ({"identity": dict(self.identity)} if self.identity else {})

    def _stopping(self) -> bool:
        return self.stop is not None and self.stop()

    def _out_of_patience(self) -> bool:
        return out_of_patience(self.progress.costs, self.config.patience)


def out_of_patience(costs: Sequence[float | None], patience: int | None) -> bool:
    """Return whether none of the last `patience` validations costs less than all before them.

    >>> out_of_patience([3.0, 2.0, 2.5], 2), out_of_patience([3.0, 2.0, 2.5, 2.0], 2)
    (False, True)
    """
    if patience is None or len(costs) <= patience:
        return False
    return min(_known(costs[-patience:])) >= min(_known(costs[:-patience]))


def _known(costs: Sequence[float | None]) -> list[float]:
    return [math.inf if cost is None else cost for cost in costs]


def selection_metric(scores: Mapping[str, float], best_by: str) -> Metric | None:
    """Return the score that selects the best checkpoint; None if it was not measured or is NaN.

    >>> selection_metric({"validation_loss": 2.0, "validation_bleu": 30.0}, "bleu")
    Metric(name='validation_bleu', value=30.0)
    >>> selection_metric({"validation_loss": float("nan")}, "loss")
    """
    name = f"validation_{best_by}"
    value = scores.get(name, math.nan)
    return Metric(name, value) if math.isfinite(value) else None


def _format_metrics(step: int, steps: int, line: Mapping[str, float | None]) -> str:
    left = (steps - step) / line["steps_per_second"] if line["steps_per_second"] else 0
    skipped = f"  skipped {line['skipped']:.0f}" if line["skipped"] else ""
    learned = (
        "nothing learned  "
        if line["loss"] is None
        else f"loss {line['loss']:.3f} nats  accuracy {line['accuracy']:.1%}  "
    )
    known = line["learning_rate"] is not None
    rate = f"learning rate {line['learning_rate']:.2e}  " if known else ""
    norm = "" if line["gradient_norm"] is None else f"gradient norm {line['gradient_norm']:.2f}  "
    return (
        f"step {step:,}/{steps:,}  {learned}{rate}{norm}"
        f"{line['tokens_per_second']:,.0f} tokens/s  {line['steps_per_second']:.2f} steps/s  "
        f"padding {line['padding']:.1%}  {timedelta(seconds=int(left))} left" + skipped
    )


def _impatience(config: TrainingConfig) -> str:
    return (
        f"Stopping: {config.patience} validations in a row without improvement. A larger "
        "--training.patience continues."
    )


def _not_finite(step: int, count: int, saved: int) -> str:
    intact = f"The checkpoint of step {saved:,} is intact" if saved else "Nothing was saved"
    return (
        f"training stopped at step {step}: loss or gradient was not finite in {count} steps in a "
        "row. Likely causes: too high a learning rate (training.learning_rate_scale, "
        "training.warmup_steps), no clipping (training.clip_norm), bfloat16 where float32 is "
        f"needed (model.dtype), or broken text. {intact}; another rate or clipping needs another "
        "run folder."
    )


@contextlib.contextmanager
def _progress_bar(step: int, steps: int) -> Iterator[Any]:
    """Show a progress bar, but only in a terminal or a notebook."""
    from tqdm.auto import tqdm

    shown = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(total=steps, initial=step, unit="step", disable=not shown, leave=False) as bar:
        yield bar

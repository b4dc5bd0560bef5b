"""Training metrics, averaged over a window of steps; logs in JSON lines and TensorBoard events."""

import contextlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

from flaxformer_min.system.files import read_file, write_atomically


class Window:
    """Sums of metrics since the last line.

    The sums are part of a checkpoint, so that interrupted and uninterrupted runs log the same
    values, except for rates.
    """

    def __init__(self, sums: Mapping[str, float] | None = None):
        """Start empty, or from the sums that a checkpoint holds."""
        self.sums = dict(sums or {})
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time until now, for example of a validation, from the rates."""
        self._since, self._tokens, self._steps = time.perf_counter(), 0.0, 0

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        counts = {"steps": 1} | {name: metrics[name] for name in ("positions", "real", "tokens")}
        if not metrics["skipped"]:
            counts |= {name: metrics[name] for name in ("loss", "accuracy", "gradient_norm")}
        counts |= {"learned": 1 - metrics["skipped"], "skipped": metrics["skipped"]}
        for name, value in counts.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.sums["learning_rate"] = metrics.get("learning_rate")  # a given optimizer has its own
        self._tokens += metrics["tokens"]
        self._steps += 1

    def close(self) -> dict[str, float | None]:
        """Return the metrics of the window, None if all steps were skipped; start a new one."""
        sums, seconds = self.sums, max(time.perf_counter() - self._since, 1e-9)
        learned = sums["learned"]
        line = {
            name: sums[name] / learned if learned else None
            for name in ("loss", "accuracy", "gradient_norm")
        }
        line |= {
            "learning_rate": sums["learning_rate"],
            "skipped": sums["skipped"],
            "padding": 1 - sums["real"] / sums["positions"],
            "tokens_per_second": self._tokens / seconds,
            "steps_per_second": self._steps / seconds,
        }
        self.sums = {}
        self.restart_clock()
        return line


class MetricsLog:
    """Writes the metrics of a run. Opening it drops records after the checkpoint."""

    def __init__(self, jsonl: Path, tensorboard: Path, resumed_from: int, active: bool = True):
        """Open both logs. Without `active`, as in all processes but the main one, write nothing."""
        self._file = self._events = None
        if not active:
            return
        _drop_after(jsonl, resumed_from)
        # Not SummaryWriter: its queue blocks forever once its thread fails at a full disk.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        tensorboard.mkdir(exist_ok=True)
        self._file = open(jsonl, "a", encoding="utf-8")
        self._events = EventsWriter(str(tensorboard / "events"), f".{resumed_from}")
        start = SessionLog(status=SessionLog.START)  # hides later events of older files
        event = Event(wall_time=time.time(), step=resumed_from + 1, session_log=start)
        self._events.write_event(event)

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write a record, and flush it, so that it survives if the process is killed.

        What is None or not finite is null in JSON, and missing in TensorBoard.

        Raises OSError if the disk is full.
        """
        if self._file is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        try:
            numbers = {name: finite_or_none(value) for name, value in metrics.items()}
            self._file.write(json.dumps({"step": step, **numbers}, allow_nan=False) + "\n")
            self._file.flush()
            for name, value in numbers.items():
                if value is None:
                    continue
                event = Event(wall_time=time.time(), step=step, summary=scalar(name, value))
                self._events.write_event(event)
            self._events.flush()
        except OSError as error:
            raise OSError(
                f"metrics must be written during training; {self._file.name}: {error.strerror}. "
                "Free some space, and start again to continue from the newest checkpoint."
            ) from error

    def close(self) -> None:
        """Close both logs."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # `write` has reported it
                self._file.close()
            with contextlib.suppress(OSError):
                self._events.close()


def finite_or_none(value: float | None) -> float | None:
    """Return the number, or None if it is NaN or infinite, for which JSON has no number.

    >>> finite_or_none(2.5), finite_or_none(float("nan"))
    (2.5, None)
    """
    return value if value is not None and math.isfinite(value) else None


def read_metrics(jsonl: Path) -> list[dict]:
    """Return the records of a run, oldest first. Invalid lines are skipped."""
    text = read_file(jsonl).decode(errors="replace") if jsonl.exists() else ""
    records = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            # NaN is not JSON, but Python reads it.
            records.append(json.loads(line, parse_constant=lambda name: None))
    return [
        record
        for record in records
        if isinstance(record, dict) and isinstance(record.get("step"), int)
    ]


def _drop_after(jsonl: Path, step: int) -> None:
    if not jsonl.exists():
        return
    kept = [record for record in read_metrics(jsonl) if record["step"] <= step]
    write_atomically(jsonl, "".join(json.dumps(record) + "\n" for record in kept))

"""What training tells: a line on the terminal, a line of JSON, a TensorBoard event."""

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

from flaxformer_min.runtime.files import write_atomically


class MetricsLog:
    """Writes the metrics of a run; a run that goes on forgets what came after its checkpoint."""

    def __init__(self, jsonl: Path, tensorboard: Path, resumed_from: int, active: bool = True):
        """Open both logs; `active` False (processes other than the first) writes nothing."""
        self._file = self._events = None
        if not active:
            return
        _forget_after(jsonl, resumed_from)
        # Not SummaryWriter: its queue waits for ever once its thread has met a full disk.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        tensorboard.mkdir(exist_ok=True)
        self._file = open(jsonl, "a", encoding="utf-8")
        self._events = EventsWriter(str(tensorboard / "events"), f".{resumed_from}")
        start = SessionLog(status=SessionLog.START)  # hides what came later in older files
        event = Event(wall_time=time.time(), step=resumed_from + 1, session_log=start)
        self._events.write_event(event)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record, flushed: a killed run has lost nothing of it.

        Raises OSError where the disk is full.
        """
        if self._file is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        try:
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()
            for name, value in metrics.items():
                event = Event(wall_time=time.time(), step=step, summary=scalar(name, value))
                self._events.write_event(event)
            self._events.flush()
        except OSError as error:
            raise OSError(
                f"metrics must be written as training goes; {self._file.name}: {error.strerror}. "
                "Make room, and start again to go on from the newest checkpoint."
            ) from error

    def close(self) -> None:
        """Close both logs."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # `write` has told what could not be written
                self._file.close()
            with contextlib.suppress(OSError):
                self._events.close()


def read_metrics(jsonl: Path) -> list[dict]:
    """The records of a run, oldest first; a line that is none, as one cut off, is left out."""
    text = jsonl.read_text(encoding="utf-8", errors="replace") if jsonl.exists() else ""
    records = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            records.append(json.loads(line))
    return [
        record
        for record in records
        if isinstance(record, dict) and isinstance(record.get("step"), int)
    ]


def _forget_after(jsonl: Path, step: int) -> None:
    if not jsonl.exists():
        return
    kept = [record for record in read_metrics(jsonl) if record["step"] <= step]
    write_atomically(jsonl, "".join(json.dumps(record) + "\n" for record in kept))

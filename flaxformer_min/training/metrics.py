"""What training tells: a line on the terminal, a line of JSON, a TensorBoard event."""

import json
from collections.abc import Mapping
from pathlib import Path

from flaxformer_min.files import write_atomically


class MetricsLog:
    """Writes the metrics of a run; a run that goes on forgets what came after its checkpoint."""

    def __init__(self, jsonl: Path, tensorboard: Path, resumed_from: int, active: bool = True):
        """Open both logs; `active` False (processes other than the first) writes nothing."""
        self._file = self._events = None
        if not active:
            return
        _forget_after(jsonl, resumed_from)
        from tensorboardX import SummaryWriter

        self._file = open(jsonl, "a", encoding="utf-8")
        self._events = SummaryWriter(str(tensorboard), purge_step=resumed_from + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record, flushed: a killed run has lost nothing of it."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """Close both logs."""
        if self._file is not None:
            self._file.close()
            self._events.close()


def read_metrics(jsonl: Path) -> list[dict]:
    """The records of a run, oldest first; a last line that was cut off is left out."""
    records = []
    for line in jsonl.read_text(encoding="utf-8").splitlines() if jsonl.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _forget_after(jsonl: Path, step: int) -> None:
    if not jsonl.exists():
        return
    kept = [record for record in read_metrics(jsonl) if record["step"] <= step]
    write_atomically(jsonl, "".join(json.dumps(record) + "\n" for record in kept))

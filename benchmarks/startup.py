"""Time until the default job has taken its first step: python benchmarks/startup.py

Starts `train.py` with the embedded corpus: with nothing prepared, with data and tokenizer prepared
but nothing compiled, and with everything cached. Measures the seconds from the command to the first
step, Python and its imports included, and the time that the whole run spends on compiling. Any
other option is passed to `train.py`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import machine, report

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of the two prepared starts")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args, others = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows.append({"start": "nothing prepared", **start(folder, others)})
        for _ in range(args.rounds):
            shutil.rmtree(folder / "flaxformer_min" / "compiled", ignore_errors=True)
            for state in ("nothing compiled", "programs compiled"):
                rows.append({"start": f"data prepared, {state}", **start(folder, others)})
    report(f"Start of train.py; {machine('jax')}", rows, args.json)


def start(cache: Path, others: Sequence[str]) -> dict[str, Any]:
    """Start once in a new run folder, for two steps without translation."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "train.py", "--workdir", str(Path(scratch) / "run")]
        command += ["--training.steps", "2", "--training.validation-sentences", "0"]
        command += ["--training.cooldown-steps", "0", "--decoding.beam-size", "1"]
        command += ["--decoding.max-extra-tokens", "1", *others]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}
        began, first, said = time.perf_counter(), None, ""
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        ) as training:
            for line in training.stdout:
                said += line
                if line.startswith("The first step is done"):
                    first = time.perf_counter() - began
    if training.returncode or first is None:
        raise RuntimeError(f"train.py ended with status {training.returncode}; it said:\n{said}")
    compiled = re.search(r"compiling (\d+) programs took (\d+) s", said)
    return {
        "first step after, s": first,
        "compiling, s": int(compiled[2]),
        "programs": int(compiled[1]),
    }


if __name__ == "__main__":
    main()

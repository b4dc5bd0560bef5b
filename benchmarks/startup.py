"""Time until the default job has taken its first step: python benchmarks/startup.py

Starts `train.py` with the embedded corpus: with nothing prepared, with data and tokenizer prepared
but nothing compiled, and with everything cached. Measures the seconds from the command to the first
step, Python and its imports included, and the time that the whole run spends on compiling.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import machine, report

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of the two prepared starts")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows.append({"start": "nothing prepared", **start(folder)})
        for _ in range(args.rounds):
            shutil.rmtree(folder / "flaxformer_min" / "compiled")
            rows.append({"start": "data prepared, nothing compiled", **start(folder)})
            rows.append({"start": "data prepared, programs compiled", **start(folder)})
    report(f"Start of train.py; {machine('jax')}", rows, args.json)


def start(cache: Path) -> dict[str, Any]:
    """Start once in a new run folder, for two steps without translation."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "train.py", "--workdir", str(Path(scratch) / "run")]
        command += ["--training.steps", "2", "--training.validation-sentences", "0"]
        command += ["--training.cooldown-steps", "0", "--decoding.beam-size", "1"]
        command += ["--decoding.max-extra-tokens", "1"]
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

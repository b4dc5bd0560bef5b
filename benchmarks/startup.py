"""How soon the main job learns: python benchmarks/startup.py

Starts `train.py` with the embedded corpus three times: with nothing prepared, with data and
tokenizer prepared and nothing compiled, and with everything warm. Seconds until the first step is
done, as `train.py` itself says, and what of them went into compiling.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
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
    """One start in a new run folder: two steps, without translation."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "train.py", "--workdir", str(Path(scratch) / "run")]
        command += ["--training.steps", "2", "--training.validation-sentences", "0"]
        command += ["--training.cooldown-steps", "0", "--decoding.beam-size", "1"]
        command += ["--decoding.max-extra-tokens", "1"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
    first = re.search(r"first step is done ([\d.]+) s after the start", done.stdout)
    compiled = re.search(r"(\d+) s compiling (\d+) programs", done.stdout)
    return {
        "first step after, s": float(first[1]),
        "compiling, s": int(compiled[1]),
        "programs": int(compiled[2]),
    }


if __name__ == "__main__":
    main()

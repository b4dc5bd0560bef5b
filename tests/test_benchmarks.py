"""Every benchmark runs, at its smallest sizes; the figures are those of nothing.

Those of accelerators, ablations, crashes and predecessors have tests of their own.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import make_tiny_run

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def run(line):
    """Run a benchmark, which chooses its own caches and compiler options."""
    chosen = ("JAX_", "XLA_", "XDG_")
    environment = {name: value for name, value in os.environ.items() if name[:4] not in chosen}
    done = subprocess.run(
        [sys.executable, *line.split()],
        cwd=ROOT / "benchmarks",
        env={**environment, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def measured(tmp_path, line):
    """Run a benchmark; return what it wrote."""
    run(f"{line} --json {tmp_path}/out.json")
    return json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize(
    "line",
    [
        "decoding.py --sentences 12 --no-peers --rounds 1 --beam-sizes 1 2",
        "training.py --tokens 128 --steps 1 --rounds 1 --no-peers",
        "data.py --pairs 200 --seconds 0.2 --workers 0 --consumes 100",
        "correctness.py --device cpu --steps 1",
        "scaling.py --quick --axes layers",
    ],
)
def test_a_benchmark_measures_something(tmp_path, line):
    assert measured(tmp_path, line)


def test_a_run_is_measured_beside_ctranslate2(tmp_path):
    """Whatever the two of them find: a model of random weights is no measure of either."""
    pytest.importorskip("ctranslate2")
    folder = make_tiny_run(tmp_path / "run")
    line = f"decoding.py --run {folder} --languages en-ko --sentences 12 --rounds 1 --beam-sizes 2"
    assert "CTranslate2" in json.dumps(measured(tmp_path, line))


def test_the_kinds_of_phrases_are_counted(tmp_path):
    assert measured(tmp_path, f"phrases.py {ROOT / 'tests' / 'data' / 'golden_run'}")


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_an_opus_model_is_measured(tmp_path):
    assert measured(tmp_path, "opus.py --sentences 4 --rounds 1")


@pytest.mark.parametrize("line", ["fuzz.py --cases 2", "startup.py --rounds 1"])
def test_a_program_of_checks_runs(line):
    run(line)

"""Kill training again and again, and check that nothing is lost: python benchmarks/crash.py

Each round starts train.py on one run folder, as a process of its own, and ends it with SIGKILL:
during its start, during training, or while a checkpoint is being written. After each kill the
newest checkpoint must be intact. Then the run is trained to its end and compared, bit for bit, with
an uninterrupted one. The last line has the totals; the exit status is 1 if anything is wrong.
"""

import argparse
import contextlib
import functools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxformer_min.config import Config
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.storage.checkpoint import Checkpoints
from flaxformer_min.storage.metadata import steps_of
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.training.metrics import read_metrics
from flaxformer_min.training.step import init_state

ROOT = Path(__file__).parents[1]

CLOCKED = ("tokens_per_second", "steps_per_second")
"""Metrics that differ between any two runs."""

START_UP = 6.0
"""Seconds that a process needs to import and compile, about."""

WORDS = {"one": "uno", "two": "dos", "three": "tres", "four": "cuatro", "five": "cinco"}
CONFIG = """
from flaxformer_min.config import *

config = Config(
    data=DataConfig(corpus="{corpus}", languages="en-es", source_row_length=24,
                    target_row_length=24, rows_per_batch=4),
    model=ModelConfig(vocab_size=286, num_layers=1, d_model=16, d_ff=16, num_heads=2),
    training=TrainingConfig(steps={steps}, warmup_steps=5, log_every=5, validate_every=30,
                            save_every={save_every}, validation_sentences=0, keep_checkpoints=2),
)
"""


class Round(NamedTuple):
    """The result of one kill.

    seconds: from the start of the process to its end.
    saving:  whether a checkpoint was being written.
    step:    of the newest checkpoint; None if there is none yet.
    problem: why that cannot be restored; empty if it can.
    """

    seconds: float
    saving: bool
    step: int | None
    problem: str

    def __str__(self) -> str:
        """One line."""
        when = "while a checkpoint was written" if self.saving else "between checkpoints"
        state = "no checkpoint yet" if self.step is None else f"step {self.step} is intact"
        return f"killed {self.seconds:5.2f} s after its start, {when}; {self.problem or state}"


def write_corpus(folder: Path, lines: Mapping[str, int]) -> str:
    """Write `lines[split]` lines of each split, translated by word; return the corpus's name."""
    folder.mkdir(exist_ok=True)
    rng = random.Random(0)
    for split, count in lines.items():
        english = [rng.choices(list(WORDS), k=rng.randint(1, 4)) for _ in range(count)]
        spanish = [[WORDS[word] for word in line] for line in english]
        for language, sentences in (("en", english), ("es", spanish)):
            text = "".join(" ".join(line) + "\n" for line in sentences)
            (folder / f"{split}.{language}").write_text(text)
    return f"text:{folder}"


def write_job(folder: Path, rounds: int, save_every: int = 20) -> Path:
    """Write a config file and its text, for training that is killed `rounds` times."""
    corpus = write_corpus(folder / "corpus", {"train": 400, "val": 40})
    steps = save_every * (4 * rounds + 2)  # a round is killed before its fifth save
    config = folder / "crash.py"
    config.write_text(CONFIG.format(corpus=corpus, steps=steps, save_every=save_every))
    return config


def start(config: Path, workdir: Path) -> subprocess.Popen:
    """Start train.py as a user does; its output goes into a file beside the config."""
    command = [sys.executable, "train.py", str(config), "--workdir", str(workdir)]
    with config.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def finish(config: Path, workdir: Path) -> None:
    """Train to the end."""
    if status := start(config, workdir).wait():
        raise RuntimeError(f"training ended with status {status}; see {config.with_suffix('.log')}")


def crash(config: Path, workdir: Path, rounds: int, seed: int) -> Iterator[Round]:
    """Start and kill training `rounds` times."""
    rng = random.Random(seed)
    for _ in range(rounds):
        began = time.monotonic()
        process = start(config, workdir)
        moment, whole = rng.choice(["starting", "training", "saving", "saving"]), rng.randint(0, 2)
        if moment == "starting":
            time.sleep(rng.uniform(0, START_UP))
        else:
            _wait_for_saves(process, workdir, whole + (moment == "training"))
            if moment == "saving":
                _wait(process, lambda: _being_written(workdir))
            time.sleep(rng.uniform(0, 0.3))
        process.kill()
        if process.wait() >= 0:
            raise RuntimeError(f"training ended of itself; see {config.with_suffix('.log')}")
        seconds = time.monotonic() - began
        saving = moment != "starting" and bool(_being_written(workdir))
        step, problem = None, ""
        try:
            step = (newest(workdir) or (None,))[0]
        except ValueError as error:
            problem = str(error)
        yield Round(seconds, saving, step, problem)


def _wait_for_saves(process: subprocess.Popen, workdir: Path, count: int) -> None:
    before = _being_written(workdir)  # by the process that was killed last
    _wait(process, lambda: not _being_written(workdir) & before)
    for _ in range(count):
        _wait(process, lambda: _being_written(workdir))
        _wait(process, lambda: not _being_written(workdir))


def _wait(process: subprocess.Popen, condition: Callable[[], Any]) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.001)


def _being_written(workdir: Path) -> set[tuple[str, int]]:
    """The folders of checkpoints that are not whole yet, by name and inode."""
    found = set()
    for folder in (workdir / "checkpoints").glob("*tmp*"):
        with contextlib.suppress(FileNotFoundError):  # whole by now
            found.add((folder.name, folder.stat().st_ino))
    return found


def newest(workdir: Path, optimizer: Any = None) -> tuple[int, dict[str, Any], dict] | None:
    """Return step, state and description of the newest checkpoint, or None if there is none.

    It is read from a copy. Raises ValueError if it is damaged, whether or not an older one is.
    """
    run = RunFolder(workdir)
    if not run.checkpoints.exists():
        return None
    like = _like(Config(model=run.model_config(), training=run.config().training), optimizer)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(run.checkpoints, Path(scratch, "checkpoints")))
        steps = steps_of(copy)
        with contextlib.closing(Checkpoints(copy, keep=100)) as checkpoints:
            found = checkpoints.restore(like)
    if steps and found[0] != steps[0]:
        raise ValueError(f"checkpoint {steps[0]} is damaged")
    return found


@functools.cache
def _like(config: Config, optimizer: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
    content = jax.eval_shape(
        lambda: init_state(Transformer(config.model), config, optimizer).to_dict()
    )
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), content
    )


def differences(one: Path, other: Path, optimizer: Any = None) -> list[str]:
    """Return how two runs differ, bit for bit, apart from metrics of the clock."""
    (step, state, meta), (other_step, other_state, other_meta) = (
        newest(run, optimizer) for run in (one, other)
    )
    found = [] if step == other_step else [f"the newest step: {step} and {other_step}"]
    leaves, other_leaves = (_arrays(tree) for tree in (state, other_state))
    for name in sorted(leaves | other_leaves):
        if not np.array_equal(leaves.get(name), other_leaves.get(name)):
            found.append(f"the array {name}")
    if meta != other_meta:
        found.append(f"the description of step {step}: {meta} and {other_meta}")
    lines, other_lines = (_without_clock(run) for run in (one, other))
    found += [f"metrics: {a} and {b}" for a, b in zip(lines, other_lines, strict=False) if a != b]
    if len(lines) != len(other_lines):
        found.append(f"the number of metrics: {len(lines)} and {len(other_lines)}")
    return found


def _arrays(state: dict[str, Any]) -> dict[str, np.ndarray]:
    state = {**state, "key": jax.random.key_data(state["key"])}
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _without_clock(workdir: Path) -> list[dict]:
    lines = read_metrics(workdir / "metrics.jsonl")
    return [{name: line[name] for name in line if name not in CLOCKED} for line in lines]


def leftovers(workdir: Path) -> list[str]:
    """Return files that no finished run leaves. The lock stays, but no process holds it."""
    with RunFolder(workdir).locked():
        paths = [path.relative_to(workdir) for path in workdir.rglob("*")]
    known = "config.json tokenizer.model checkpoints metrics.jsonl tensorboard lock".split()
    found = [str(path) for path in paths if "tmp" in str(path) or path.parts[0] not in known]
    steps = [path.name for path in (workdir / "checkpoints").iterdir()]
    return found + (steps if len(steps) > 3 else [])


def main(arguments: list[str]) -> int:
    """Crash, finish, compare; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="kills (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    parser.add_argument("--workdir", type=Path, help="kept afterwards (default: temporary)")
    settings = parser.parse_args(arguments)
    folder = settings.workdir or Path(tempfile.mkdtemp(prefix="crash-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    config = write_job(folder.absolute(), settings.rounds)
    uncut, crashed = folder / "uncut", folder / "crashed"
    finish(config, uncut)
    print(f"the uncut run: step {newest(uncut)[0]}", flush=True)
    rounds = []
    for number, each in enumerate(crash(config, crashed, settings.rounds, settings.seed), 1):
        print(f"round {number:2}: {each}", flush=True)
        rounds.append(each)
    finish(config, crashed)
    differing, left = differences(uncut, crashed), leftovers(crashed)
    for text in [*differing, *left]:
        print(text)
    unreadable = sum(bool(each.problem) for each in rounds)
    print(
        f"{len(rounds)} kills ({sum(each.saving for each in rounds)} while a checkpoint was "
        f"written), {unreadable} unreadable folders, {len(differing)} differences, "
        f"{len(left)} leftovers"
    )
    if settings.workdir is None:
        shutil.rmtree(folder)
    return int(bool(unreadable or differing or left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Whether an accelerator computes what the CPU beside it does: training steps and greedy decoding.

    python benchmarks/correctness.py
    JAX_PLATFORMS=cpu python benchmarks/correctness.py --device cpu

Each device computes in a process of its own, from the same random numbers: the losses of a few
training steps in float32 and in bfloat16, and greedy translations. Dropout is off, because its
masks differ between platforms. Products on the accelerator have full float32 precision. The exit
status is 1 if a loss in float32 differs by more than a relative 1e-4, one in bfloat16 by more than
2e-2, or if fewer than 98 of 100 translations are equal.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from common import SIZES, machine, report

LIMITS = {"loss, float32": 1e-4, "loss, bfloat16": 2e-2, "translations": 0.02}
VOCABULARY = 1000


def main() -> int:
    """Compute on both, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"), default="gpu")
    parser.add_argument("--size", choices=SIZES, default="wide")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        np.savez(args.write, **computed(args.size, args.steps))
        return 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as threads:
        files = [Path(scratch) / f"{number}.npz" for number in range(2)]
        cpu, device = threads.map(partial(in_process, args), files, ("cpu", None))
    rows = [row_of(name, cpu[name], device[name]) for name in LIMITS]
    report(f"{device['device']} beside a CPU, size {args.size}; {machine('jax')}", rows, args.json)
    return 1 if any(row["within"] == "no" for row in rows) else 0


def in_process(args: argparse.Namespace, file: Path, platform: str | None) -> dict[str, np.ndarray]:
    """Return what a process on this platform, or on jax's own choice, computes."""
    options = ["--write", str(file), "--size", args.size, "--steps", str(args.steps)]
    environment = {**os.environ, **({"JAX_PLATFORMS": platform} if platform else {})}
    subprocess.run([sys.executable, __file__, *options], env=environment, check=True)
    with np.load(file) as found:
        return dict(found)


def row_of(name: str, ours: np.ndarray, theirs: np.ndarray) -> dict[str, object]:
    """Compare numbers by their largest relative difference, texts by the share that differs."""
    if name == "translations":
        difference = float((ours != theirs).any(axis=1).mean())
    else:
        difference = float(np.abs(theirs / ours - 1).max())
    limit = LIMITS[name]
    return {
        "what": name,
        "difference": f"{difference:.1e}",
        "limit": f"{limit:.0e}",
        "within": "yes" if difference <= limit else "no",
    }


def computed(size: str, steps: int) -> dict[str, np.ndarray]:
    """Return the losses of the steps in both types, and the ids of 100 translations."""
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    found = {f"loss, {dtype}": losses(size, steps, dtype) for dtype in ("float32", "bfloat16")}
    kind = jax.local_devices()[0].device_kind
    return found | {"translations": translations(size), "device": np.array(kind)}


def losses(size: str, steps: int, dtype: str) -> np.ndarray:
    """Return the loss at each step on one batch of random tokens."""
    import jax

    from flaxformer_min.config import Config, ModelConfig
    from flaxformer_min.data.batches import shard_batch
    from flaxformer_min.model.transformer import Transformer
    from flaxformer_min.tokens import Batch, one_sentence_per_row
    from flaxformer_min.training.step import init_state, make_train_step

    model = Transformer(ModelConfig(vocab_size=VOCABULARY, dropout=0.0, dtype=dtype, **SIZES[size]))
    config = Config(model=model.config)
    state, step = init_state(model, config), make_train_step(model, config)
    ids = np.random.default_rng(0).integers(4, VOCABULARY, (2, 8 * jax.local_device_count(), 32))
    sides = [jax.tree.map(np.asarray, one_sentence_per_row(each.astype(np.int32))) for each in ids]
    batch, found = shard_batch(Batch(*sides), jax.local_device_count()), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return np.array(found)


def translations(size: str) -> np.ndarray:
    """Return the greedy translations of random sources by a model with random parameters."""
    import jax

    from flaxformer_min.config import ModelConfig, SearchConfig
    from flaxformer_min.decoding.batches import BatchRunner
    from flaxformer_min.model.transformer import Transformer
    from flaxformer_min.tokens import Batch, one_sentence_per_row

    model = Transformer(ModelConfig(vocab_size=VOCABULARY, dtype="float32", **SIZES[size]))
    one = one_sentence_per_row(jax.numpy.array([[4, 3]]))
    params = jax.jit(model.init)(jax.random.key(0), Batch(one, one))["params"]
    numbers = np.random.default_rng(1)
    sources = {
        line: [*map(int, numbers.integers(4, VOCABULARY, numbers.integers(3, 20))), 3]
        for line in range(100)
    }
    config = SearchConfig(beam_size=1, max_extra_tokens=10)
    found = np.zeros((len(sources), 64), np.int32)
    runner = BatchRunner(model, params)
    for lines, hypotheses in runner.search(sources, {line: [] for line in sources}, config):
        ids = np.asarray(hypotheses.ids)[: len(lines), 0]
        found[lines, : ids.shape[1]] = ids
    return found


if __name__ == "__main__":
    sys.exit(main())

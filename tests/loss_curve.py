"""Train a tiny model on a given number of virtual devices and print what it went through.

Run as a script in a process of its own: python tests/loss_curve.py DEVICES ACCUMULATION STEPS
"""

import json
import os
import sys

if __name__ == "__main__":  # before jax is imported
    DEVICES, ACCUMULATION, STEPS = map(int, sys.argv[1:])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax
import numpy as np

from flaxformer_min.config import ModelConfig, TrainingConfig
from flaxformer_min.data.batches import shard_batch
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.tokens import Batch, Tokens
from flaxformer_min.training.step import init_state, make_train_step


def uneven_batch(rng):
    """Eight rows, one sentence each, of 1 to 9 tokens: devices get very different numbers."""
    sides = []
    for _ in range(2):
        lengths = np.sort(rng.integers(1, 10, 8))
        real = (np.arange(10)[None] < lengths[:, None]).astype(np.int32)
        ids = rng.integers(4, 20, (8, 10)).astype(np.int32) * real
        sides.append(Tokens(ids, np.arange(10, dtype=np.int32)[None] * real, real))
    return Batch(*sides)


def main():
    model = Transformer(
        ModelConfig(vocab_size=20, num_layers=1, d_model=16, d_ff=32, num_heads=2, dropout=0.0)
    )
    # A calm rate: chaos would blow the rounding of sums up, and hide a real difference.
    config = TrainingConfig(
        warmup_steps=20, learning_rate_scale=0.1, gradient_accumulation=ACCUMULATION
    )
    state, step = init_state(model, config), make_train_step(model, config)
    rng = np.random.default_rng(0)
    batches = [uneven_batch(rng) for _ in range(4)]
    curve = []
    for number in range(STEPS):
        batch = shard_batch(batches[number % 4], DEVICES, ACCUMULATION)
        state, metrics = step(state, batch)
        curve.append(float(metrics["loss"]))
    # A key's bias shifts all scores of a query alike: its true gradient is zero, so Adam enlarges
    # what is only rounding.
    totals = [
        float(np.abs(leaf).sum())
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
        if "key/bias" not in jax.tree_util.keystr(path, simple=True, separator="/")
    ]
    print(json.dumps({"devices": jax.device_count(), "loss": curve, "params": totals}))


if __name__ == "__main__":
    main()

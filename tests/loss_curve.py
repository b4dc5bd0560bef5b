"""Train a tiny model on a given number of devices, and return its losses.

As a script it creates as many virtual CPU devices:
python tests/loss_curve.py DEVICES ACCUMULATION STEPS
"""

import json
import os
import sys

if __name__ == "__main__":  # before jax is imported
    DEVICES, ACCUMULATION, STEPS = map(int, sys.argv[1:])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import functools

import jax
import numpy as np

from flaxformer_min.config import Config, ModelConfig, TrainingConfig
from flaxformer_min.data.batches import shard_batch
from flaxformer_min.model.transformer import Transformer
from flaxformer_min.system.devices import replicate
from flaxformer_min.tokens import Batch, Tokens
from flaxformer_min.training.step import TrainState, init_state, make_train_step

MODEL = ModelConfig(vocab_size=20, num_layers=1, d_model=16, d_ff=32, num_heads=2)


def uneven_batch(rng):
    """Eight rows, one sentence each, of 1 to 9 tokens: devices get very different numbers."""
    sides = []
    for _ in range(2):
        lengths = np.sort(rng.integers(1, 10, 8))
        real = (np.arange(10)[None] < lengths[:, None]).astype(np.int32)
        ids = rng.integers(4, 20, (8, 10)).astype(np.int32) * real
        sides.append(Tokens(ids, np.arange(10, dtype=np.int32)[None] * real, real))
    return Batch(*sides)


@functools.cache
def initial_state() -> TrainState:
    """In host memory, because a step donates its buffers; the key as its numbers."""
    state = init_state(Transformer(MODEL), Config(model=MODEL))
    return jax.device_get(state._replace(key=jax.random.key_data(state.key)))


def loss_curve(devices: int, accumulation: int, steps: int) -> dict:
    """Train on the first `devices` of this process; return all losses and the last parameters."""
    # A calm rate: chaos would blow the rounding of sums up, and hide a real difference.
    training = TrainingConfig(
        warmup_steps=20, learning_rate_scale=0.1, gradient_accumulation=accumulation
    )
    config = Config(model=MODEL, training=training)
    state = replicate(initial_state(), jax.local_devices()[:devices])
    state = state._replace(key=jax.random.wrap_key_data(state.key))
    step = make_train_step(Transformer(MODEL), config)
    rng = np.random.default_rng(0)
    batches = [shard_batch(uneven_batch(rng), devices, accumulation) for _ in range(4)]
    curve = []
    for number in range(steps):
        state, metrics = step(state, batches[number % 4])
        curve.append(float(metrics["loss"]))
    # A key's bias shifts all scores of a query alike: its true gradient is zero, so Adam enlarges
    # what is only rounding.
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    totals = [
        float(np.abs(leaf).sum())
        for path, leaf in leaves
        if "key/bias" not in jax.tree_util.keystr(path, simple=True, separator="/")
    ]
    used = leaves[0][1].sharding.device_set
    return {"devices": len(used), "loss": curve, "params": totals}


if __name__ == "__main__":
    print(json.dumps(loss_curve(DEVICES, ACCUMULATION, STEPS)))

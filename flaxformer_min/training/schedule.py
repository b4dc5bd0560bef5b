"""The learning-rate schedule (section 5.3)."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flaxformer_min.config import TrainingConfig

LearningRate = Callable[[Int[Array, ""] | int], Float[Array, ""]]


def learning_rate(d_model: int, config: TrainingConfig) -> LearningRate:
    """Return the learning rate as a function of the number of steps taken so far (equation 3).

    lrate = scale · d_model^-0.5 · min(step^-0.5, step · warmup_steps^-1.5)

    The paper counts steps from 1. With `cooldown_steps`, a factor decreases linearly from one to
    zero over the last steps (Zhai et al. 2022, "Scaling vision transformers"), or over all steps if
    there are fewer. For the optimizer "schedule_free" the rate stays at its peak after the warm-up.

    >>> rate = learning_rate(512, TrainingConfig(warmup_steps=4000))
    >>> [f"{float(rate(step - 1)):.2e}" for step in (1, 4000, 16000)]
    ['1.75e-07', '6.99e-04', '3.49e-04']
    """
    scale = config.learning_rate_scale * d_model**-0.5
    warmup, last = config.warmup_steps, config.steps
    cooldown = min(config.cooldown_steps, last)

    def rate(count: Int[Array, ""] | int) -> Float[Array, ""]:
        step = jnp.asarray(count, jnp.float32) + 1
        falling = warmup**-0.5 if config.optimizer == "schedule_free" else step**-0.5
        noam = scale * jnp.minimum(falling, step * warmup**-1.5)
        return noam * jnp.clip((last + 1.0 - step) / (cooldown + 1.0), 0, 1) if cooldown else noam

    return rate

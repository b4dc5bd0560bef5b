"""Adam with the paper's settings (section 5.3)."""

from typing import Any

import jax
import optax

from flaxformer_min.config import TrainingConfig


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """Return Adam's update directions, after clipping if the config asks for it.

    The training step multiplies them by the learning rate, a function of `TrainState.step`, so
    that nothing but the state counts steps. Adam's own count, for its bias correction, is that of
    the updates applied: a skipped step leaves it as it was.
    """
    adam = optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_epsilon)
    if config.clip_norm is not None:
        adam = optax.chain(optax.clip_by_global_norm(config.clip_norm), adam)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes types
            return adam.update(gradients, state, params)

    return optax.GradientTransformation(adam.init, update)

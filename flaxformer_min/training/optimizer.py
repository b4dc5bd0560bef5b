"""Adam with the paper's settings (section 5.3)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from flaxformer_min.config import TrainingConfig


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformationExtraArgs:
    """Return Adam's update directions, after clipping if the config asks for it.

    The training step multiplies them by the learning rate, a function of `TrainState.step`, so
    that nothing but the state counts steps. Adam's own count, for its bias correction, is that of
    the updates applied: a skipped step leaves it as it was. `update` takes `norm`, that of the
    whole gradient, because a device updates only its share.
    """
    adam = optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_epsilon)
    adam = optax.with_extra_args_support(adam)
    if config.clip_norm is not None:
        adam = optax.chain(_clip(config.clip_norm), adam)

    def update(
        gradients: Any, state: Any, params: Any = None, *, norm: Float[Array, ""]
    ) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes types
            return adam.update(gradients, state, params, norm=norm)

    return optax.GradientTransformationExtraArgs(adam.init, update)


def _clip(most: float) -> optax.GradientTransformationExtraArgs:
    """Return the clipping of a gradient to the norm `most` (Pascanu et al. 2013)."""

    def update(
        gradients: Any, state: Any, params: Any = None, *, norm: Float[Array, ""]
    ) -> tuple[Any, Any]:
        factor = jnp.where(norm < most, 1.0, most / norm)
        return jax.tree.map(lambda gradient: factor * gradient, gradients), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)

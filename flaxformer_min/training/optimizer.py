"""Optimizers: Adam with the paper's settings (section 5.3), Muon and schedule-free Adam."""

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, ScheduleFreeState

from flaxformer_min.config import Config, TrainingConfig
from flaxformer_min.training.schedule import LearningRate, learning_rate


def make_optimizer(d_model: int, config: TrainingConfig) -> optax.GradientTransformation:
    """Return the optimizer that `config.optimizer` names, learning rate included.

    "adam" is the paper's (section 5.3). "muon" uses it for all parameters but the kernels of
    layers, and with its learning rate. "schedule_free" averages the parameters instead of lowering
    the rate (Defazio et al. 2024).
    """
    b1, b2, epsilon = config.adam_b1, config.adam_b2, config.adam_epsilon
    rate = learning_rate(d_model, config)
    if config.optimizer == "schedule_free":
        # Adam without its first moment, which the interpolation with weight b1 replaces.
        rms = optax.scale_by_rms(b2, epsilon, eps_in_sqrt=False, bias_correction=True)
        base = optax.chain(rms, scale_by_step(rate))
        return optax.contrib.schedule_free(base, lambda updates: rate(updates - 1), b1)
    adam = optax.scale_by_adam(b1, b2, epsilon)
    if config.optimizer == "muon":
        adam = optax.partition({"muon": scale_by_muon(), "adam": adam}, _muon_or_adam)
    return optax.chain(adam, scale_by_step(rate))


def complete_optimizer(
    given: optax.GradientTransformation | None, config: Config
) -> optax.GradientTransformationExtraArgs:
    """Return the `given` optimizer, or the one of the settings, after clipping if they ask for it.

    A given one includes its learning rate: other settings of the optimizer do not affect it.
    Clipping is by the norm of the whole gradient (Pascanu et al. 2013).
    """
    training = config.training
    optimizer = make_optimizer(config.model.d_model, training) if given is None else given
    check_optimizer(optimizer)
    if training.clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(training.clip_norm), optimizer)
    return optax.with_extra_args_support(optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Raise ValueError for what is not an optimizer of optax."""
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            "optimizer must be an optax.GradientTransformation, such as optax.adam(1e-3); got "
            f"{optimizer!r}."
        )


def scale_by_step(rate: LearningRate) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that multiplies by minus the learning rate of a training step.

    `optax.scale_by_learning_rate` counts updates instead, which skipped steps would delay.
    """

    def update(updates: Any, state: Any, params: Any = None, *, step: Any, **_: Any) -> Any:
        return jax.tree.map(lambda update: -rate(step) * update, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def scale_by_muon() -> optax.GradientTransformation:
    """Return Muon (Jordan et al. 2024) with updates as large as Adam's (Liu et al. 2025).

    Unlike `optax.contrib.muon`, it leaves the other parameters to Adam without Nesterov momentum.
    """

    def as_matrices(params: Any) -> Any:
        return jax.tree.map(lambda _: MuonDimensionNumbers(), params)

    def as_large_as_adam(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda update: 0.2 * max(update.shape) ** 0.5 * update, updates)

    orthogonal = optax.contrib.scale_by_muon(weight_dimension_numbers=as_matrices)
    return optax.chain(orthogonal, optax.stateless(as_large_as_adam))


def _muon_or_adam(params: Any) -> Any:
    """Return "muon" for the kernels of layers, "adam" for embeddings, vectors and the output."""

    def label(path: tuple, leaf: Any) -> str:
        names = [key.key for key in path]
        is_kernel = names[-1] == "kernel" and leaf.ndim == 2
        return "muon" if is_kernel and "output_projection" not in names else "adam"

    return jax.tree.map_with_path(label, params)


def averaged_params(opt_state: optax.OptState, params: Any) -> Any:
    """Return the average that a schedule-free optimizer keeps, or None for other optimizers."""

    def is_schedule_free(node: Any) -> bool:
        return isinstance(node, ScheduleFreeState)

    for node in jax.tree.leaves(opt_state, is_leaf=is_schedule_free):
        if is_schedule_free(node):
            return optax.contrib.schedule_free_eval_params(node, params)
    return None

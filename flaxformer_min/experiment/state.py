"""The state that training begins with: initial, restored, or taken from another run."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from flaxformer_min.config import Config
from flaxformer_min.config_fields import fixed_settings
from flaxformer_min.data.batches import TrainingBatches
from flaxformer_min.runs.checkpoint import Checkpoints
from flaxformer_min.runs.description import first_difference, types_by_path, types_of
from flaxformer_min.runs.folder import RunFolder
from flaxformer_min.runtime.devices import replicate
from flaxformer_min.training.debug import stopping_at_not_finite
from flaxformer_min.training.loop import Progress
from flaxformer_min.training.loss import TokenLoss
from flaxformer_min.training.step import TrainState, init_state, make_train_step

LOGGER = logging.getLogger("flaxformer_min")

MAY_MOVE = ("data.corpus", "training.init_from")
"""Settings that may be changed in the config.json of a run, because they are paths."""


def initialise(
    config: Config,
    model: nn.Module,
    token_loss: TokenLoss | None,
    report: Callable[[TrainState], None],
    first_batch: Callable[[], Any] | None,
) -> tuple[TrainState, Callable]:
    """Return the initial state and the train step.

    `report` is called with the shapes of the state. The step is compiled for `first_batch()` while
    the state is computed; None compiles it at the first step.
    """
    train_step = make_train_step(model, config, token_loss)

    def while_compiling(state: TrainState) -> None:
        report(state)
        if first_batch is not None and jax.process_count() == 1:  # several need real arrays
            train_step.lower(state, first_batch()).compile()

    state = init_state(model, config, while_compiling)
    if config.training.debug_nans:
        train_step = stopping_at_not_finite(train_step, model, config.training, token_loss)
    return state, train_step


def training_identity(run: RunFolder, config: Config) -> dict[str, Any]:
    """Return what a checkpoint must be continued with: `RunFolder.identity` and other settings."""
    settings = fixed_settings("data", config.data) | fixed_settings("training", config.training)
    for name in MAY_MOVE:
        del settings[name]
    return settings | run.identity()


def restore(
    checkpoints: Checkpoints,
    state: TrainState,
    batches: TrainingBatches,
    config: Config,
    compared: str,
) -> tuple[TrainState, Progress]:
    """Continue from the newest checkpoint; without one, from another run or from `state`.

    The batch iterator is set to its saved position, too. `compared` is what scores are of (see
    `what_is_compared`): others do not select checkpoints any more.
    """
    found = checkpoints.restore(state.to_dict())
    if found is None:
        if config.training.init_from:
            state = init_from(RunFolder(config.training.init_from), state)
        return state, Progress(validation_text=compared)
    step, restored, description = found
    position = description["batches"]
    if batches.is_of_other_text(position):
        LOGGER.warning("the training text has changed; continuing at the same position of it.")
    batches.set_state(position)
    LOGGER.info("Continuing from step %s.", f"{step:,}")
    progress = Progress(**description["progress"])
    averages = config.training.average_checkpoints > 1
    if step < config.training.steps or progress.validation_pending or averages:
        _drop_other_scores(checkpoints, progress, compared)
    return TrainState.from_dict(restored), progress


def _drop_other_scores(checkpoints: Checkpoints, progress: Progress, compared: str) -> None:
    """Forget the scores of other text, or with other settings of BLEU, than those to come."""
    former, text = progress.validation_text, compared.partition(" ")[0]
    if former not in ("", text, compared):  # earlier versions recorded the text alone
        same_text = former.partition(" ")[0] == text
        changed = "settings of BLEU in validation have" if same_text else "validation text has"
        LOGGER.warning("the %s changed; former scores do not count.", changed)
        checkpoints.drop_metrics()
        progress.costs = []
    progress.validation_text = compared


def init_from(former: RunFolder, state: TrainState) -> TrainState:
    """Return an initial state with the parameters that another run translates with.

    Raises ValueError if they are of a model with other parameters, as may be one of the caller's
    own, whose fields are no settings.
    """
    found = former.params()
    both = (types_by_path(types_of(tree)) for tree in (found.params, state.params))
    if difference := first_difference(*both):
        raise ValueError(
            f"training.init_from needs a run of the same model; in {former.path} {difference}. "
            "Pass the model that it was trained with, or leave out training.init_from."
        )
    LOGGER.info("Beginning with the parameters of step %s of %s.", f"{found.step:,}", former.path)
    params = replicate(found.params, jax.local_devices())
    # A copy, because a buffer cannot be donated twice.
    average = None if state.average is None else jax.tree.map(jnp.copy, params)
    return state._replace(params=params, average=average)

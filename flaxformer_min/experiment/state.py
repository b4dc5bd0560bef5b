"""The state that training begins with: restored, or taken from another run."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flaxformer_min.config import Config
from flaxformer_min.config_fields import fixed_settings
from flaxformer_min.data.batches import TrainingBatches
from flaxformer_min.storage.checkpoint import Checkpoints
from flaxformer_min.storage.metadata import first_difference, types_by_path, types_of
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.system.devices import replicate, replicated
from flaxformer_min.training.loop import BatchIterator, Progress
from flaxformer_min.training.step import TrainState

LOGGER = logging.getLogger("flaxformer_min")

MAY_MOVE = ("data.corpus", "training.init_from")
"""Settings that may be changed in the config.json of a run, because they are paths."""


def training_identity(run: RunFolder, config: Config) -> dict[str, Any]:
    """Return what a checkpoint must be continued with: `RunFolder.identity` and other settings."""
    settings = fixed_settings("data", config.data) | fixed_settings("training", config.training)
    for name in MAY_MOVE:
        del settings[name]
    return settings | run.identity()


def restore(
    checkpoints: Checkpoints,
    state: TrainState,
    batches: BatchIterator,
    config: Config,
    compared: str,
) -> tuple[TrainState, Progress]:
    """Continue from the newest checkpoint; without one, from `state`.

    The batch iterator is set to its saved position, too. `compared` is what scores are of (see
    `what_is_compared`): others do not select checkpoints any more.
    """
    found = checkpoints.restore(state.to_dict())
    if found is None:
        return state, Progress(validation_text=compared)
    step, restored, description = found
    position, iterator = description["batches"], type(batches).__name__
    if description["iterator"] != iterator:
        raise ValueError(
            "a run must be continued with batches of the same kind; checkpoint "
            f"{step} is of {description['iterator']}, got {iterator}. Pass the same `batches` to "
            "train, or choose another folder."
        )
    if isinstance(batches, TrainingBatches) and batches.is_of_other_text(position):
        LOGGER.warning("the training text has changed; continuing at the same position of it.")
    batches.set_state(position)
    LOGGER.info("Continuing from step %s.", f"{step:,}")
    progress = Progress(**description["progress"])
    averages = config.training.average_checkpoints > 1
    if step < config.training.steps or progress.validation_pending or averages:
        _drop_other_scores(checkpoints, progress, compared)
    return state.restored(restored), progress


def _drop_other_scores(checkpoints: Checkpoints, progress: Progress, compared: str) -> None:
    """Forget the scores of other text, or with other settings of BLEU, than those to come."""
    former = progress.validation_text
    if former != compared:
        same_text = former.partition(" ")[0] == compared.partition(" ")[0]
        changed = "settings of BLEU in validation have" if same_text else "validation text has"
        LOGGER.warning("the %s changed; former scores do not count.", changed)
        checkpoints.drop_metrics()
        progress.costs = []
    progress.validation_text = compared


def init_from(
    former: RunFolder, state: TrainState, optimizer: optax.GradientTransformation
) -> TrainState:
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
    devices = jax.local_devices()
    params = replicate(found.params, devices)
    opt_state = jax.jit(optimizer.init, out_shardings=replicated(devices))(params)
    # A copy, because a buffer cannot be donated twice.
    average = None if state.average is None else jax.tree.map(jnp.copy, params)
    return state._replace(params=params, opt_state=opt_state, average=average)

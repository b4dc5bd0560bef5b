"""The mean of the last checkpoints, kept if it is better than the best of them (section 6.1)."""

import logging

import jax

from flaxformer_min.config import TrainingConfig
from flaxformer_min.storage.restore import average_checkpoints, best_cost, restore_params
from flaxformer_min.storage.run_folder import RunFolder
from flaxformer_min.system.distributed import is_main_process, main_process_first
from flaxformer_min.training.loop import Validate, selection_metric

LOGGER = logging.getLogger("flaxformer_min")


def validate_average(run: RunFolder, config: TrainingConfig, validate: Validate, step: int) -> None:
    """Compare the mean of the newest checkpoints with the best of them; keep it if it is better."""
    steps, mean = average_checkpoints(
        run.checkpoints, config.average_checkpoints, config.save_every
    )
    named = ", ".join(map(str, reversed(steps)))
    LOGGER.info("The mean of the checkpoints of steps %s:", named)
    scores = validate(mean, step)
    if scores is None:
        return
    metric, best = selection_metric(scores, config.best_by), best_cost(run.checkpoints)
    if best is None:  # no score counts, as of former validation text: this run has the newest
        LOGGER.info("The newest checkpoint:")
        scores = validate(jax.device_get(restore_params(run.checkpoints)[1]), step)
        if scores is None:
            return
        newest = selection_metric(scores, config.best_by)
        best = None if newest is None else newest.cost
    drop_average(run, "of this end")
    if metric is not None and (best is None or metric.cost < best):
        run.keep_average(mean, steps[0])
        LOGGER.info("It is better than the best checkpoint: this run translates with it.")
    else:
        LOGGER.info("The best checkpoint is better: this run translates with that.")


def drop_average(run: RunFolder, which: str) -> None:
    """Remove a mean whose checkpoints are no longer the newest, or that is no longer requested."""
    with main_process_first(f"mean {which}"):
        if is_main_process():
            run.drop_average()

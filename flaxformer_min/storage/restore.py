"""Restoring parameters to translate with: the best checkpoint, or the mean of the last ones."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_min.storage.checkpoint import (
    first_line,
    raise_unless_damage,
    restore_verified,
    steps_due,
)
from flaxformer_min.storage.metadata import MODELS, cost_of, read_metadata, steps_of
from flaxformer_min.storage.orbax_reads import wait_for_reads
from flaxformer_min.system.distributed import index

PyTree = Any

LOGGER = logging.getLogger("flaxformer_min")


def restore_params(folder: Path, step: int | None = None) -> tuple[int, PyTree]:
    """Return (step, parameters to translate with), on this machine's first device.

    These are the parameters, or their moving average if the checkpoint has one. `step` None: the
    best by validation if one was validated, else the newest. A damaged checkpoint is logged as a
    warning and the next best is tried. Raises ValueError if there is none, none is intact, or the
    requested one does not exist; OSError if this process may not read one.
    """
    import orbax.checkpoint as ocp

    steps = steps_of(folder)
    if not steps:
        raise ValueError(f"{folder.parent} holds no checkpoint yet. Train it until it has saved.")
    if step is not None and step not in steps:
        raise ValueError(
            f"{folder.parent} has no checkpoint of step {step}; it has "
            f"{', '.join(map(str, steps))}."
        )
    wait_for_reads()
    handlers = {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    alone = ocp.options.MultiprocessingOptions(primary_host=index(), active_processes={index()})
    options = ocp.CheckpointManagerOptions(read_only=True, multiprocessing_options=alone)
    with ocp.CheckpointManager(
        folder.absolute(), options=options, item_handlers=handlers
    ) as manager:
        for candidate in [step] if step is not None else _best_first(folder, steps):
            try:
                arrays = _arrays(folder, candidate, manager)
                name = next(name for name in MODELS if name in arrays)
                like = _on_first_device(arrays[name])
                state, _ = restore_verified(manager, candidate, {name: like}, partial=True)
                return candidate, state[name]
            except Exception as error:  # Orbax raises whatever its readers raise
                raise_unless_damage(error, folder, candidate)
                LOGGER.warning(
                    "checkpoint %d in %s is damaged (%s).", candidate, folder, first_line(error)
                )
    if step is not None:
        others = ", ".join(str(other) for other in steps if other != step)
        raise ValueError(
            f"the checkpoint of step {step} in {folder} is damaged. "
            + (f"There are others of steps {others}." if others else "There is no other.")
        )
    raise ValueError(f"no checkpoint in {folder} is intact. Restore one from a backup.")


def average_checkpoints(folder: Path, count: int, every: int = 1) -> tuple[list[int], PyTree]:
    """Return the steps of the newest `count` intact checkpoints, and the mean of their parameters.

    Section 6.1 averages the last 5 (base) or 20 (big). Apart from the newest, only those due are
    used: steps that are multiples of `every`. Raises ValueError if none is intact.
    """
    used: list[int] = []
    total: PyTree = None
    steps = steps_of(folder)
    for step in sorted({*steps[:1], *steps_due(steps, every)}, reverse=True):
        try:
            params = jax.device_get(restore_params(folder, step)[1])
        except ValueError:
            continue
        wide = jax.tree.map(np.float64, params)
        total = wide if total is None else jax.tree.map(np.add, total, wide)
        used.append(step)
        if len(used) == count:
            break
    if not used:
        raise ValueError(f"no checkpoint in {folder} is intact. Restore one from a backup.")
    mean = jax.tree.map(lambda sum_, like: (sum_ / len(used)).astype(like.dtype), total, params)
    return used, mean


def best_cost(folder: Path) -> float | None:
    """Return the lowest cost of the checkpoints in a folder, or None if none was validated."""
    described = [read_metadata(folder, step) for step in steps_of(folder)]
    costs = [cost_of(meta) for meta in described if meta is not None]
    return min((cost for cost in costs if cost is not None), default=None)


def _best_first(folder: Path, steps: list[int]) -> list[int]:
    """Sort validated steps by cost, then the others; the newest first among equals.

    One whose description is damaged might be the best: it comes first, so that it is reported.
    """

    def order(step: int) -> tuple[int, float]:
        meta = read_metadata(folder, step)
        if meta is None:
            return 0, 0.0
        cost = cost_of(meta)
        return (2, 0.0) if cost is None else (1, cost)

    return sorted(steps, key=order)


def _arrays(folder: Path, step: int, manager: Any) -> PyTree:
    """Return shapes and types of the arrays of a checkpoint, at least of `MODELS`."""
    if described := (read_metadata(folder, step) or {}).get("arrays"):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf[1:], leaf[0]),
            described,
            is_leaf=lambda node: isinstance(node, list),
        )
    # Orbax opens each array, also of the optimizer: that takes longer than reading the parameters.
    return manager.item_metadata(step)["state"].tree


def _on_first_device(metadata: PyTree) -> PyTree:
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first),
        metadata,
        is_leaf=lambda leaf: hasattr(leaf, "shape"),
    )

"""Checkpoints: written by Orbax in the background, believed only if their checksum holds.

A checkpoint is a folder named by its step. Beside the arrays stands a JSON item with what is not an
array (where the rows stand, say) and the checksums of everything; Orbax itself would restore a
flipped bit without a word.
"""

import contextlib
import hashlib
import json
import logging
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_min.runtime.devices import on_all_processes
from flaxformer_min.runtime.distributed import count, first_ahead, gather, index, is_first
from flaxformer_min.runtime.files import write_atomically

PyTree = Any


EXPECTED = ("read_only", "read only", "tracked_metric")


def _is_news(record: logging.LogRecord) -> bool:
    """Orbax warns of the options it was given, and logs errors that it raises as well."""
    frames = traceback.extract_tb(record.exc_info[2]) if record.exc_info else []
    raised = any("orbax" in frame.filename for frame in frames)
    return not (raised or any(word in record.getMessage() for word in EXPECTED))


for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_news)


def checksum(tree: PyTree) -> str:
    """A digest of names, shapes, types and values of all leaves.

    >>> checksum({"a": np.zeros(2)}) == checksum({"a": np.zeros(2)})
    True
    >>> checksum({"a": np.zeros(2)}) == checksum({"a": np.array([0.0, 1e-30])})
    False
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


class KeepTheNewest:
    """Orbax's preservation policy for the newest checkpoint, and the newest so many that were due.

    One that a signal asked for is not due, so a run that was cut keeps what an uncut one keeps.
    """

    def __init__(self, keep: int, every: int):
        """Those of steps divided by `every` were due."""
        self.keep, self.every = keep, every

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One answer for each checkpoint."""
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        kept = {*_due(steps, self.every)[-self.keep :], *steps[-1:]}
        return [checkpoint.step in kept for checkpoint in checkpoints]


class KeepTheBest:
    """Orbax's preservation policy for the checkpoint of the lowest rank, the newest among equals.

    Not its own BestN: that reads a file of each checkpoint that no checksum covers, and opens none
    where one is damaged.
    """

    def __init__(self, ranks: Mapping[int, float | None]):
        """`ranks` may change; steps that have none are not kept for it."""
        self.ranks = ranks

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One answer for each checkpoint."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        ranked = [step for step in reversed(steps) if self.ranks.get(step) is not None]
        best = min(ranked, key=self.ranks.__getitem__, default=None)
        return [step == best for step in steps]


class Checkpoints:
    """The checkpoints of one run, for the process that trains it.

    Where several processes train together, all do the same with it at the same time: each writes
    its part of the arrays, and the first does what is done once.

    `state` is a mapping whose entry "params", or "average" where there is one, can later be
    restored alone.
    """

    def __init__(self, folder: Path, keep: int, every: int = 1):
        """Open `folder`, made if need be. Leftovers of a save that was killed are removed.

        The `keep` newest checkpoints that were due, `every` so many steps, are kept, and the newest
        of all, and the one of the lowest rank.
        """
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as managers

        self.folder = folder
        described = {step: _description(folder, step) for step in steps_of(folder)}
        self._ranks = {step: meta["rank"] for step, meta in described.items() if meta}
        policies = [KeepTheNewest(keep, every), KeepTheBest(self._ranks)]
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,
            ),
        )

    def save(
        self, step: int, state: dict[str, PyTree], meta: dict, rank: float | None = None
    ) -> None:
        """Save in the background; the arrays may be donated as soon as this returns.

        `rank` orders validated checkpoints, the lowest being the best. Raises OSError when this or
        the last checkpoint cannot be written.
        """
        import orbax.checkpoint as ocp

        checksums = {name: checksum(tree) for name, tree in state.items()}
        # A copy: Orbax writes it later, when its owner may have gone on counting in it.
        meta = json.loads(json.dumps({**meta, "step": step, "rank": rank, "checksums": checksums}))
        meta["checksum"] = _meta_checksum(meta)
        if count() > 1:
            state = on_all_processes(state)
        self._ranks[step] = rank
        with self._telling():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(meta)
                ),
                force=True,
            )

    def describe(self, step: int, meta: dict, rank: float | None) -> None:
        """Put these entries into the description of a saved checkpoint, and rank it."""
        file = _description_file(self.folder, step)
        with self._telling(), first_ahead(f"description of {step}"):
            if is_first():
                new = {**json.loads(file.read_text()), **meta, "rank": rank}
                write_atomically(file, json.dumps({**new, "checksum": _meta_checksum(new)}))
        self._ranks[step] = rank

    def restore(
        self, like: dict[str, PyTree], warn: Callable[[str], None]
    ) -> tuple[int, dict[str, PyTree], dict] | None:
        """The newest whole checkpoint as (step, state, meta), or None where there is none at all.

        `like` gives shapes, types and placement. A damaged checkpoint is named to `warn`, moved to
        the folder "damaged" beside the others, and the one before it is tried. Raises ValueError
        when all are damaged.
        """
        import orbax.checkpoint as ocp

        steps = gather("checkpoints", steps_of(self.folder))[0]
        found, damaged = None, []
        for step in steps:
            wrong = None
            try:
                found = _restore(self._manager, step, like, ocp)
            except Exception as error:  # Orbax raises whatever its readers raise
                wrong = _first_line(error)
            # What one process cannot read, none may go on from.
            wrong = next(filter(None, gather(f"restored {step}", wrong)), None)
            if wrong is None:
                break
            found = None
            damaged.append(step)
            warn(f"checkpoint {step} in {self.folder} is damaged ({wrong}).")
        if steps and found is None:
            raise ValueError(
                f"no checkpoint in {self.folder} is whole; tried {', '.join(map(str, steps))}. "
                "Copy one back from elsewhere, or start in another folder."
            )
        if damaged:
            with first_ahead("damaged checkpoints"):
                if is_first():
                    self._move_aside(damaged)
            self._manager.reload()
        return None if found is None else (step, *found)

    def _move_aside(self, damaged: list[int]) -> None:
        for name in map(str, damaged):
            shelter = self.folder.parent / "damaged"
            shelter.mkdir(exist_ok=True)
            shutil.rmtree(shelter / name, ignore_errors=True)
            shutil.move(self.folder / name, shelter / name)

    def wait(self) -> None:
        """Return when what was saved is on disk; raise OSError if it cannot be written."""
        with self._telling():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and let go."""
        self._manager.close()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Say in a sentence what Orbax and its readers and writers raise, each in its own way."""
        try:
            yield
        except Exception as error:
            raise OSError(
                f"a checkpoint must be written whole; in {self.folder}: {_reason(error)}. Those "
                "before it are whole. Make room, and start again to go on from the newest."
            ) from error


def restore_params(
    folder: Path, step: int | None, warn: Callable[[str], None]
) -> tuple[int, PyTree]:
    """What to translate with, on this machine's first device: (step, params).

    These are the parameters, or their moving average where the checkpoint has one. `step` None: the
    best by validation if one was validated, else the newest. A damaged checkpoint is named to
    `warn` and the next best is tried. Raises ValueError when there is none, none is whole, or the
    one asked for is not there.
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
    handlers = {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    alone = ocp.options.MultiprocessingOptions(primary_host=index(), active_processes={index()})
    options = ocp.CheckpointManagerOptions(read_only=True, multiprocessing_options=alone)
    with ocp.CheckpointManager(
        folder.absolute(), options=options, item_handlers=handlers
    ) as manager:
        for candidate in [step] if step is not None else _best_first(folder, steps):
            try:
                tree = manager.item_metadata(candidate)["state"].tree
                name = "average" if "average" in tree else "params"
                like = _on_first_device(tree[name])
                state, _ = _restore(manager, candidate, {name: like}, ocp, partial=True)
                return candidate, state[name]
            except Exception as error:  # Orbax raises whatever its readers raise
                warn(f"checkpoint {candidate} in {folder} is damaged ({_first_line(error)}).")
    if step is not None:
        others = ", ".join(str(other) for other in steps if other != step)
        raise ValueError(
            f"the checkpoint of step {step} in {folder} is damaged. "
            + (f"Those of steps {others} are there, too." if others else "There is no other.")
        )
    raise ValueError(f"no checkpoint in {folder} is whole. Copy one back from elsewhere.")


def mean_of_newest(
    folder: Path, count: int, warn: Callable[[str], None], every: int = 1
) -> tuple[list[int], PyTree]:
    """The mean of what the newest `count` whole checkpoints translate with, and their steps.

    Section 6.1 takes the last 5 (base) or 20 (big). Those that were not due, `every` so many steps,
    are left out, but for the newest. Raises ValueError when none is whole.
    """
    used: list[int] = []
    total: PyTree = None
    steps = steps_of(folder)
    for step in sorted({*steps[:1], *_due(steps, every)}, reverse=True):
        try:
            params = jax.device_get(restore_params(folder, step, warn)[1])
        except ValueError:
            continue
        wide = jax.tree.map(np.float64, params)
        total = wide if total is None else jax.tree.map(np.add, total, wide)
        used.append(step)
        if len(used) == count:
            break
    if not used:
        raise ValueError(f"no checkpoint in {folder} is whole. Copy one back from elsewhere.")
    return used, jax.tree.map(lambda sum_: (sum_ / len(used)).astype(np.float32), total)


def rank_of_best(folder: Path) -> float | None:
    """The lowest rank that a checkpoint here was saved with; None where none was validated."""
    described = [_description(folder, step) for step in steps_of(folder)]
    ranks = [meta["rank"] for meta in described if meta is not None]
    return min((rank for rank in ranks if rank is not None), default=None)


def _on_first_device(metadata: PyTree) -> PyTree:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        metadata,
        is_leaf=lambda leaf: hasattr(leaf, "shape"),
    )


def _restore(manager, step: int, like: dict[str, PyTree], ocp, partial: bool = False):
    """State and meta of one checkpoint, if everything in it is as it was saved."""
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    item = ocp.args.PyTreeRestore(
        abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=partial,
    )
    restored = manager.restore(
        step, args=ocp.args.Composite(state=item, meta=ocp.args.JsonRestore())
    )
    state, meta = restored["state"], restored["meta"]
    expected = meta.pop("checksum", None)
    if expected != _meta_checksum(meta):
        raise ValueError("the checksum of its description does not hold")
    if meta["step"] != step:
        raise ValueError(f"it is that of step {meta['step']}, under another name")
    wrong = [name for name in like if checksum(state[name]) != meta["checksums"].get(name)]
    if wrong:
        raise ValueError(f"the checksum of {', '.join(wrong)} does not hold")
    return state, meta


def _meta_checksum(meta: dict) -> str:
    content = json.dumps({k: v for k, v in meta.items() if k != "checksum"}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def steps_of(folder: Path) -> list[int]:
    """Of the checkpoints in a folder, newest first. An unfinished save has a longer name."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def _due(steps: Sequence[int], every: int) -> list[int]:
    """Those that a run which nobody stopped would have saved, whether they rank or not."""
    return [step for step in steps if step % every == 0]


def _best_first(folder: Path, steps: list[int]) -> list[int]:
    """Validated steps, the best of them first, then the others; the newest first among equals.

    One whose description is damaged might be the best: it comes first, to be named.
    """

    def order(step: int) -> tuple[int, float]:
        meta = _description(folder, step)
        if meta is None:
            return 0, 0.0
        return (2, 0.0) if meta["rank"] is None else (1, meta["rank"])

    return sorted(steps, key=order)


def _description(folder: Path, step: int) -> dict | None:
    """What stands beside the arrays of a checkpoint; None if it is not as it was written."""
    try:
        meta = json.loads(_description_file(folder, step).read_text())
        return meta if meta.pop("checksum") == _meta_checksum(meta) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None


def _description_file(folder: Path, step: int) -> Path:
    return folder / str(step) / "meta" / "metadata"


def _reason(error: Exception) -> str:
    """What the system said, which TensorStore puts last.

    >>> _reason(ValueError("Failed writing: /a/b: No space left on device [os_error_code='28']"))
    'No space left on device'
    """
    said = getattr(error, "strerror", None) or _first_line(error, None)
    return said.rpartition(": ")[2].partition(" [os_error_code")[0]


def _first_line(error: Exception, most: int | None = 200) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0][:most]

"""Checkpoints: written by Orbax in the background, restored only if their checksums match.

A checkpoint is a folder named by its step. Besides the arrays it has a JSON item with everything
else, such as the position in the training data, and checksums of both, because Orbax restores
flipped bits without an error.
"""

import contextlib
import errno
import glob
import hashlib
import json
import logging
import re
import shutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_min.storage.metadata import (
    MODELS,
    Metric,
    check_optimizer_state,
    check_parameters,
    cost_of,
    meta_checksum,
    metadata_file,
    optimizer_of,
    read_metadata,
    steps_of,
    types_of,
)
from flaxformer_min.storage.orbax_reads import wait_for_reads
from flaxformer_min.system.devices import on_all_processes
from flaxformer_min.system.distributed import (
    count,
    gather,
    is_main_process,
    main_process_first,
)
from flaxformer_min.system.files import FULL, read_file, write_atomically
from flaxformer_min.system.memory import is_out_of_memory

PyTree = Any

LOGGER = logging.getLogger("flaxformer_min")

NOT_DAMAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
"""Errors of reading that say nothing about the file."""

EXPECTED_WARNINGS = ("read_only", "read only", "tracked_metric", "overriding jax.Array")
"""Words of Orbax's warnings about options that are set on purpose."""


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return whether to log a record: not expected warnings, nor errors that Orbax also raises."""
    message = record.getMessage()
    if "orbax" in record.pathname and any(word in message for word in EXPECTED_WARNINGS):
        return False
    if not record.exc_info:
        return True
    _, error, trace = record.exc_info
    if message.startswith("Future exception was never retrieved"):
        # Of several arrays that cannot be written, Orbax raises the error of the first.
        if "os_error_code=" in str(error) or getattr(error, "errno", None) in FULL:
            return False
    return not any("orbax" in frame.filename for frame in traceback.extract_tb(trace))


for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_relevant)


def checksum(tree: PyTree) -> str:
    """Return a digest of the names, shapes, types and values of all leaves.

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
        digest.update(array.reshape(-1).view(np.uint8))  # bfloat16 has no buffer of its own type
    return digest.hexdigest()


class KeepNewest:
    """Orbax's preservation policy for the newest checkpoint, and the newest `keep` of those due.

    A checkpoint that a signal asked for is not due, so an interrupted run keeps the same ones.
    """

    def __init__(self, keep: int, every: int):
        """Checkpoints whose step is a multiple of `every` are due."""
        self.keep, self.every = keep, every

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return whether to keep each checkpoint."""
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        kept = {*steps_due(steps, self.every)[-self.keep :], *steps[-1:]}
        return [checkpoint.step in kept for checkpoint in checkpoints]


class KeepBest:
    """Orbax's preservation policy for the checkpoint of the lowest cost, the newest among equals.

    Not Orbax's BestN, which reads a file that no checksum covers and fails if one is damaged.
    """

    def __init__(self, costs: Mapping[int, float | None]):
        """Take the cost of each step, None if it was not validated; the mapping may change."""
        self.costs = costs

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return whether to keep each checkpoint."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        validated = [step for step in reversed(steps) if self.costs.get(step) is not None]
        best = min(validated, key=self.costs.__getitem__, default=None)
        return [step == best for step in steps]


class Checkpoints:
    """The checkpoints of one run, for the process that trains it.

    Of several processes, all call the same methods at the same time: each writes its part of the
    arrays, and the main process does what is done once.

    `state` is a mapping whose entry "params" (or "average" if there is one) can be restored alone.
    """

    def __init__(self, folder: Path, keep: int, every: int = 1):
        """Open `folder`, or create it, and remove what a killed save left.

        Kept are the newest checkpoint, the `keep` newest of those due (steps that are multiples of
        `every`), and the best by its metric. Raises ValueError as `check_path`.
        """
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as managers

        check_path(folder)
        wait_for_reads()
        self.folder = folder
        described = {step: read_metadata(folder, step) for step in steps_of(folder)}
        self._costs = {step: cost_of(meta) for step, meta in described.items() if meta}
        policies = [KeepNewest(keep, every), KeepBest(self._costs)]
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,
            ),
        )

    def save(
        self, step: int, state: dict[str, PyTree], meta: dict, metric: Metric | None = None
    ) -> None:
        """Save in the background; the arrays may be donated as soon as this returns.

        `metric` is the score of a validated checkpoint. Raises OSError if this or the last
        checkpoint cannot be written.
        """
        import orbax.checkpoint as ocp

        checksums = {name: checksum(tree) for name, tree in state.items()}
        meta = {**meta, "step": step, "metric": metric, "checksums": checksums}
        meta["arrays"] = types_of({name: state[name] for name in MODELS if name in state})
        if "opt_state" in state:
            meta["optimizer"] = optimizer_of(state["opt_state"])
        # A copy: Orbax writes it later, when its owner may have changed it.
        meta = json.loads(json.dumps(meta))
        meta["checksum"] = meta_checksum(meta)
        if count() > 1:
            state = on_all_processes(state)
        self._costs[step] = None if metric is None else metric.cost
        with self._clear_errors():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(meta)
                ),
                force=True,
            )

    def describe(self, step: int, meta: dict, metric: Metric | None) -> None:
        """Add these entries and the metric to the description of a saved checkpoint."""
        file = metadata_file(self.folder, step)
        with self._clear_errors(), main_process_first(f"description of {step}"):
            if is_main_process():
                new = {**json.loads(file.read_text()), **meta, "metric": metric}
                new = json.loads(json.dumps(new))
                write_atomically(file, json.dumps({**new, "checksum": meta_checksum(new)}))
        self._costs[step] = None if metric is None else metric.cost

    def drop_metrics(self) -> None:
        """Describe all checkpoints as not validated."""
        for step in gather("steps without metrics", steps_of(self.folder))[0]:
            if self._costs.get(step) is not None:
                self.describe(step, {}, None)

    def restore(self, like: dict[str, PyTree]) -> tuple[int, dict[str, PyTree], dict] | None:
        """Return the newest intact checkpoint as (step, state, meta), or None if there is none.

        `like` gives shapes, types and placement. A damaged checkpoint is logged as a warning and
        moved to the folder "damaged" beside the others, and the one before it is tried. Raises
        ValueError if all are damaged, or one is of another model or optimizer; OSError if this
        process may not read one, or has too many files open.
        """
        steps = gather("checkpoints", steps_of(self.folder))[0]
        found, damaged = None, []
        for step in steps:
            wrong = None
            check_parameters(self.folder, step, like)
            check_optimizer_state(self.folder, step, like)
            try:
                found = restore_verified(self._manager, step, like)
            except Exception as error:  # Orbax raises whatever its readers raise
                raise_unless_damage(error, self.folder, step)
                wrong = first_line(error)
            # If one process cannot read it, none may continue from it.
            wrong = next(filter(None, gather(f"restored {step}", wrong)), None)
            if wrong is None:
                break
            found = None
            damaged.append(step)
            LOGGER.warning("checkpoint %d in %s is damaged (%s).", step, self.folder, wrong)
        if steps and found is None:
            raise ValueError(
                f"no checkpoint in {self.folder} is intact; tried {', '.join(map(str, steps))}. "
                "Restore one from a backup, or start in another folder."
            )
        if damaged:
            with main_process_first("damaged checkpoints"):
                if is_main_process():
                    self._move_aside(damaged)
            self._manager.reload()
        return None if found is None else (step, *found)

    def _move_aside(self, damaged: list[int]) -> None:
        aside = self.folder.parent / "damaged"
        for name in map(str, damaged):
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / name, ignore_errors=True)
            shutil.move(self.folder / name, aside / name)

    def wait(self) -> None:
        """Return once everything is on disk; raise OSError if it cannot be written."""
        with self._clear_errors():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait as `wait`, and release the folder."""
        with self._clear_errors():
            try:
                self._manager.wait_until_finished()
            finally:
                self._manager.close()

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turn whatever Orbax and its storage drivers raise into one sentence."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, MemoryError):
                raise
            raise OSError(
                f"a checkpoint must be written completely; in {self.folder}: {_reason(error)}. "
                "Earlier ones are intact. Free some space, and start again to continue from the "
                "newest."
            ) from error


def raise_unless_damage(error: Exception, folder: Path, step: int) -> None:
    """Raise for what says nothing about the files of a checkpoint that could not be read.

    An OSError if this process may not read one, or has too many files open; the error itself if
    there is too little memory.
    """
    if is_out_of_memory(error):
        raise error
    if _system_error(error) in NOT_DAMAGE:
        raise OSError(
            f"checkpoint {step} in {folder} cannot be read: {_reason(error)}. It may be intact: "
            "start again once it can be read."
        ) from error


def check_path(folder: Path, writes: bool = True) -> None:
    """Raise ValueError for a folder whose checkpoints would be looked for elsewhere.

    TensorStore reads backslashes as slashes, and Orbax `gs:/` as a bucket, wherever it is. When
    Orbax `writes`, it also takes the path for a pattern, which does not match itself.

    >>> check_path(Path("runs/lr[0.1]"))
    Traceback (most recent call last):
    ValueError: the path of a run must not have *, ? or [ in it, ...
    """
    path = str(folder.absolute())
    rule = None
    if re.search(r"\\|(gs|s3):/", path + "/"):
        rule = r"not have \, gs:/ or s3:/ in it"
    elif path.encode(errors="replace").decode() != path:
        rule, path = "be UTF-8", ascii(path)
    elif writes and glob.escape(path) != path:
        rule = "not have *, ? or [ in it"
    if rule:
        raise ValueError(
            f"the path of a run must {rule}, because no checkpoint could be written or read there; "
            f"got {path}. Choose another folder, or rename it."
        )


def restore_verified(
    manager: Any, step: int, like: dict[str, PyTree], partial: bool = False
) -> tuple[dict[str, PyTree], dict]:
    """Return state and meta of one checkpoint, or raise if a checksum does not match."""
    import orbax.checkpoint as ocp

    for path in (Path(manager.directory) / str(step)).rglob("*"):
        if not (path.is_file() or path.is_dir()):  # which would be read forever
            raise ValueError(f"{path} is a pipe or a device")
    read_file(metadata_file(Path(manager.directory), step))  # raises if it is too large
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
    if expected != meta_checksum(meta):
        raise ValueError("the checksum of its description does not match")
    if meta["step"] != step:
        raise ValueError(f"it is a renamed checkpoint of step {meta['step']}")
    wrong = [name for name in like if checksum(state[name]) != meta["checksums"].get(name)]
    if wrong:
        raise ValueError(f"the checksum of {', '.join(wrong)} does not match")
    return state, meta


def steps_due(steps: Sequence[int], every: int) -> list[int]:
    """Return the steps that an uninterrupted run would have saved."""
    return [step for step in steps if step % every == 0]


def _reason(error: Exception) -> str:
    """Return the system's own message, which TensorStore puts last.

    >>> _reason(ValueError("Failed writing: /a/b: No space left on device [os_error_code='28']"))
    'No space left on device'
    """
    message = getattr(error, "strerror", None) or first_line(error, None)
    return re.sub(r" \[[a-z_]+='.*", "", message).rpartition(": ")[2]


def _system_error(error: Exception) -> int | None:
    """Return the number of the system's error, which TensorStore writes into its message."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else getattr(error, "errno", None)


def first_line(error: Exception, most: int | None = 200) -> str:
    """Return the first line of an error's message, cut to `most` characters."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0][:most]

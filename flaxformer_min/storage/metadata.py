"""What a checkpoint says of itself: its JSON item, and whether it belongs to a run and a model."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from flaxformer_min.system.files import read_file

PyTree = Any

MODELS = ("average", "params")
"""Entries of a state that can be restored alone: the first that there is."""


class Metric(NamedTuple):
    """The validation score that selects checkpoints, such as ("validation_loss", 2.1)."""

    name: str
    value: float

    @property
    def cost(self) -> float:
        """Lower is better: the value itself, or its negative for BLEU.

        >>> Metric("validation_loss", 2.0).cost, Metric("validation_bleu", 30.0).cost
        (2.0, -30.0)
        """
        return -self.value if self.name == "validation_bleu" else self.value


def types_of(tree: PyTree) -> PyTree:
    """Return [type, *shape] of each array, for JSON; nothing unless all is in dictionaries.

    >>> import numpy as np
    >>> types_of({"a": {"b": np.zeros((2, 3), np.float32)}})
    {'a': {'b': ['float32', 2, 3]}}
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    keys = [getattr(key, "key", None) for path in paths for key in path]
    return _types(tree) if all(isinstance(key, str) for key in keys) else {}


def _types(tree: PyTree) -> PyTree:
    if isinstance(tree, Mapping):
        return {name: _types(each) for name, each in tree.items()}
    return [str(tree.dtype), *tree.shape]


def meta_checksum(meta: dict) -> str:
    """Return a digest of a description, without the entry that holds it."""
    content = json.dumps({k: v for k, v in meta.items() if k != "checksum"}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, newest first, without unfinished saves."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def read_metadata(folder: Path, step: int) -> dict | None:
    """Return the JSON item of a checkpoint, or None if its checksum does not match."""
    try:
        meta = json.loads(read_file(metadata_file(folder, step)))
        return meta if meta.pop("checksum") == meta_checksum(meta) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None


def check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint was saved for other tokenizers or another model.

    Both may have the right shapes and still be wrong.
    """
    identity = json.loads(json.dumps(dict(identity)))  # as a checkpoint has it: no tuples
    for step in steps_of(folder):
        saved = (read_metadata(folder, step) or {}).get("identity")
        if not isinstance(saved, dict):
            continue
        names = [name for name in saved if name in identity]  # versions have other settings, too
        differing = [name for name in names if saved[name] != identity[name]]
        if differing:
            raise ValueError(
                f"checkpoint {step} in {folder} belongs to other settings or tokenizers:\n  "
                + "\n  ".join(
                    f"{name}: {saved[name]!r} in the checkpoint, {identity[name]!r} in the run"
                    for name in differing
                )
                + "\nRestore config.json and the tokenizers that it was trained with."
            )


def check_parameters(folder: Path, step: int, like: Mapping[str, PyTree]) -> None:
    """Raise ValueError if a checkpoint describes parameters of other names, shapes or types.

    Two custom models that differ only in these look alike to `check_identity`.
    """
    described = (read_metadata(folder, step) or {}).get("arrays") or {}
    own = types_of({name: like[name] for name in MODELS if name in like})
    for name in (name for name in MODELS if described.get(name) and own.get(name)):
        saved, needed = (types_by_path(tree[name]) for tree in (described, own))
        if difference := first_difference(saved, needed):
            raise ValueError(
                f"checkpoint {step} in {folder} is of a model with other parameters: "
                f"{difference}. Pass the model that it was trained with, or choose another "
                "--workdir."
            )


def optimizer_of(opt_state: PyTree) -> dict[str, str]:
    """Return the kinds of the states of an optimizer, and a digest of names, types and shapes."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    arrays = [f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}" for path, leaf in leaves]
    kinds = re.findall(r"namedtuple\[(\w+)\]", str(jax.tree.structure(opt_state)))
    digest = hashlib.sha256("\n".join(arrays).encode()).hexdigest()
    return {"states": ", ".join(dict.fromkeys(kinds)), "arrays": digest}


def check_optimizer_state(folder: Path, step: int, like: Mapping[str, PyTree]) -> None:
    """Raise ValueError if a checkpoint was saved with another kind of optimizer."""
    saved = (read_metadata(folder, step) or {}).get("optimizer")
    if not saved or "opt_state" not in like:
        return
    needed = optimizer_of(like["opt_state"])
    if saved["arrays"] != needed["arrays"]:
        raise ValueError(
            f"a run must be continued with its own optimizer; checkpoint {step} in {folder} has "
            f"the states {saved['states']}, the given optimizer has {needed['states']}, or they "
            "have other shapes. Pass the optimizer that it was trained with, or begin another run "
            f"with --training.init-from {folder.parent}."
        )


def first_difference(saved: dict[str, str], needed: dict[str, str]) -> str:
    """Return the first of `types_by_path` in which a checkpoint and a model differ, or nothing."""
    differing = sorted({*saved.items()} ^ {*needed.items()})
    if not differing:
        return ""
    path = differing[0][0]
    found, expected = (types.get(path, "missing") for types in (saved, needed))
    return f"{path} is {found} in the checkpoint, {expected} in the model"


def types_by_path(types: PyTree) -> dict[str, str]:
    """Return `types_of` as "float32[2, 3]" by the names of all levels."""
    leaves = jax.tree_util.tree_leaves_with_path(types, is_leaf=lambda x: isinstance(x, list))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{type_}{shape}"
        for path, (type_, *shape) in leaves
    }


def cost_of(description: dict) -> float | None:
    """Return the cost of a checkpoint's metric, or None if it was not validated."""
    return Metric(*description["metric"]).cost if description.get("metric") else None


def metadata_file(folder: Path, step: int) -> Path:
    """Return the file of the JSON item of a checkpoint."""
    return folder / str(step) / "meta" / "metadata"

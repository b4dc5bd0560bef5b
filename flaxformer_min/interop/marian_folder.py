"""The files of Marian's own models: which belong together, and how decoder.yml searches.

A folder is one as published, with decoder.yml, or one in which Marian has trained: model.npz, its
decoder.yml, its optimizer's state, and the best and the earlier models beside it.
"""

import logging
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_min.interop.files import read_file
from flaxformer_min.interop.run_model import nearest_alpha
from flaxformer_min.interop.yaml import read_mapping

LOGGER = logging.getLogger("flaxformer_min")

WITHOUT = {"force-decode": "false", "output-sampling": "", "word-penalty": "0"}
"""Settings of a search that this package does not have, with the value that stands for none."""


class MarianFiles(NamedTuple):
    """The files of one model.

    vocabularies: of source and target; one if both are the same.
    description:  decoder.yml or the like, None without one.
    """

    model: Path
    vocabularies: list[Path]
    description: Path | None


def find_files(model: Path) -> MarianFiles:
    """Return the files of a model, given by its folder or its .npz.

    Raises ValueError where several could be meant.
    """
    folder = model if model.is_dir() else model.parent
    description = folder / "decoder.yml"
    if model.is_dir() and description.exists():
        names = _names(description, "models")
        if len(names) > 1:
            raise ValueError(
                f"{description} names an ensemble; import its models one by one, each by the path "
                "of its .npz."
            )
        chosen = _find(folder, names, description)[0]
    else:
        chosen = _choose(folder) if model.is_dir() else model
        description = _description(folder, chosen.name)
    if description is not None:
        vocabularies = _find(folder, _names(description, "vocabs"), description)
    else:
        vocabularies = sorted(folder.glob("*vocab*.yml")) or sorted(folder.glob("*vocab*.spm"))
        if len(vocabularies) != 1:
            raise ValueError(
                f"{folder} must have a decoder.yml, or one .npz and one vocabulary; it has "
                f"{len(vocabularies)} vocabularies."
            )
    if len(vocabularies) > 2:
        raise ValueError(f"{description} must list the vocabularies of source and target; got more")
    return MarianFiles(chosen, vocabularies, description)


def _choose(folder: Path) -> Path:
    """Return the model of a folder: the newest of the models that Marian saves while it trains."""
    models = sorted(each for each in folder.glob("*.npz") if ".optimizer." not in each.name)
    names = {each.name for each in models}

    def is_derived(name: str) -> bool:  # such as model.npz.best-bleu.npz and model.iter1000.npz
        return any(name.startswith(f"{other}.") for other in names) or (
            re.sub(r"\.iter\d+(?=\.npz$)", "", name) in names - {name}
        )

    newest = [each for each in models if not is_derived(each.name)]
    listed = ", ".join(sorted(names)) or "none"
    if len(newest) != 1:
        raise ValueError(
            f"{folder} must have one model, an .npz; it has {listed}."
            + (f" Give the path of one, such as {models[0]}." if models else "")
        )
    if len(models) > 1:
        LOGGER.warning(
            "%s has the models %s; %s is imported. Give the path of another to import that.",
            folder,
            listed,
            newest[0].name,
        )
    return newest[0]


def _description(folder: Path, model: str) -> Path | None:
    """Return the decoder.yml of a model, of the folder, or of another model in it."""
    found = [folder / f"{model}.decoder.yml", folder / "decoder.yml"]
    found += sorted(folder.glob("*.decoder.yml"), key=lambda path: (len(path.name), path))
    return next((path for path in found if path.exists()), None)


def _names(description: Path, key: str) -> list[str]:
    value = read_mapping(read_file(description), description).get(key)
    if not isinstance(value, list) or not value or not all(isinstance(n, str) for n in value):
        raise ValueError(f"{description} must list {key}; got {value!r}.")
    for name in value:
        if not name or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in name):
            raise ValueError(f"{description}: a name must be text without NUL; got {name!r}.")
    return value


def _find(folder: Path, names: list[str], description: Path) -> list[Path]:
    """Return the files of these names; of a path that leaves the folder, the last part counts."""
    found, moved = [], []
    for name in names:
        path, last = folder / name, re.split(r"[/\\]", name)[-1]
        if ".." in path.parts or Path(name).is_absolute() or not path.is_file():
            path = folder / last
            moved += [name] if name != last else []
        if last in ("", ".", "..") or not path.is_file():
            raise ValueError(
                f"{folder} must have a file {last}, which {description.name} names as {name!r}."
            )
        found.append(path)
    if moved:
        LOGGER.warning(
            "%s names %s; the file of the same name in %s is taken.",
            description,
            ", ".join(dict.fromkeys(moved)),
            folder,
        )
    return found


def search_settings(description: Path | None, ignore: Collection[str]) -> dict[str, Any]:
    """Return how decoder.yml searches: the fields of `Settings` that it names.

    Raises ValueError for a search that this package does not have, unless it is to be ignored.
    Sizes of batches and the like have no effect.
    """
    if description is None:
        return {}
    content = read_mapping(read_file(description), description)
    found: dict[str, Any] = {"ignored": {}}
    for name, none in WITHOUT.items():
        value = content.get(name, none)
        is_none = value in (none, []) or (none == "0" and re.fullmatch(r"-?0*\.?0*", str(value)))
        if is_none:
            continue
        if name not in ignore:
            raise ValueError(
                f"{description}: {name} must be {none or 'empty'}, because this package's search "
                f"has no such setting; got {value!r}. To leave it out: --ignore {name}."
            )
        found["ignored"][name] = value
    if "beam-size" in content:
        found["beam_size"] = number(content, "beam-size", description)
    if "normalize" in content:
        found["length_penalty"] = nearest_alpha(_float(content, "normalize", description))
    return found


def number(content: dict[str, Any], name: str, path: Path) -> int:
    """Return a setting that is a whole number. Raises ValueError if it is missing or another."""
    value = content.get(name)
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,9}", value):
        raise ValueError(f"{path}: {name} must be a whole number; got {value!r}.")
    return int(value)


def _float(content: dict[str, Any], name: str, path: Path) -> float:
    try:
        value = float(content[name])
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < 1000:
        raise ValueError(f"{path}: {name} must be a number of at least 0; got {content[name]!r}.")
    return value

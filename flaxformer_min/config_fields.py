"""Validation of dataclass fields: their types and ranges."""

import ast
import dataclasses
import functools
import inspect
import json
import math
import numbers
import textwrap
import types
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    more_than: float | None = None,
    less_than: float | None = None,
    may_change: bool = False,
) -> Any:
    """Return a dataclass field with a range; a continued run may change it if `may_change`."""
    metadata = {"at_least": at_least, "at_most": at_most, "more_than": more_than}
    metadata |= {"less_than": less_than, "may_change": may_change}
    return dataclasses.field(default=default, metadata=metadata)


def read_groups(cls: type, text: str, where: str | Path, newest: int) -> Any:
    """Return the config of groups of settings that JSON holds; missing ones get their defaults.

    Raises ValueError, naming the file `where`, for broken JSON, a format that is newer than
    `newest`, an unknown setting or an invalid value.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON; {error}. Restore it from a backup.") from error
    if not isinstance(content, dict) or type(content.get("format_version")) is not int:
        raise ValueError(f"{where} must have a format_version; it is not a flaxformer_min config.")
    version = content.pop("format_version")
    if version > newest:
        raise ValueError(
            f"{where} has format {version}; this flaxformer_min reads formats up to {newest}. "
            "Install a newer flaxformer_min."
        )
    groups = {field.name: field.type for field in dataclasses.fields(cls)}
    _check_known(where, content, groups)
    for name, value in content.items():
        if not isinstance(value, dict):
            raise ValueError(f"{where}: {name} must be a group of settings; got {value!r}.")
        _check_known(f"{where}, {name}", value, groups[name].__dataclass_fields__)
    try:
        return cls(**{name: groups[name](**value) for name, value in content.items()})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_known(where: str | Path, given: dict, known: dict) -> None:
    """Raise ValueError if a name in `given` is not in `known`; `where` names the file."""
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{where}: there is no setting {unknown[0]!r}, only {', '.join(known)}.")


def check_groups(config: Any) -> None:
    """Raise ValueError unless every field is a group of settings of its own class."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, field.type):
            raise ValueError(
                f"{field.name} must be a {field.type.__name__}, as {field.name}="
                f"{field.type.__name__}(...); got {value!r}."
            )


def check_fields(config: Any, group: str) -> None:
    """Raise ValueError unless every field has its type and is in its range."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = plain(getattr(config, field.name))
        object.__setattr__(config, field.name, value)  # frozen, but nobody else has it yet
        name, rule = f"{group}.{field.name}", _type_rule(hints[field.name])
        if not has_type(value, hints[field.name]):
            raise ValueError(f"{name} must be {rule}; got {value!r}.")
        if value is None or value == () or isinstance(value, (str, bool)):
            continue
        values = value if isinstance(value, tuple) else (value,)
        if isinstance(values[0], str):
            continue
        low, high = min(values), max(values)
        at_least, at_most, more_than, less_than = (
            field.metadata[limit] for limit in ("at_least", "at_most", "more_than", "less_than")
        )
        rules = [
            (all(isinstance(each, int) or not math.isinf(each) for each in values), "finite"),
            (at_least is None or low >= at_least, f"at least {at_least}"),
            (at_most is None or high <= at_most, f"at most {at_most}"),
            (more_than is None or low > more_than, f"more than {more_than}"),
            (less_than is None or high < less_than, f"less than {less_than}"),
        ]
        broken = [text for holds, text in rules if not holds]
        if broken:
            raise ValueError(f"{name} must be {' and '.join(broken)}; got {value!r}.")


@functools.cache
def field_descriptions(config: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, on one line and without its full stop."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0].body
    return {
        field.target.id: " ".join(text.value.value.split()).removesuffix(".")
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def plain(value: Any) -> Any:
    """Return a number of numpy as one of Python, which JSON can hold; a list as a tuple.

    >>> import numpy as np
    >>> plain([np.int64(1), np.float32(0.5)])
    (1, 0.5)
    """
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*map(plain, value))
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def has_type(value: Any, hint: Any) -> bool:
    """Return whether a setting has a type; a whole number is a float too, a bool is no number.

    >>> has_type(1, float), has_type(True, int), has_type(None, int | None)
    (True, False, True)
    """
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) in (types.UnionType, Union):
        return any(has_type(value, choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(has_type(each, get_args(hint)[0]) for each in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _type_rule(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join(_type_rule(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list, each {_type_rule(get_args(hint)[0])}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(hint, "none")


def fixed_settings(group: str, config: Any) -> dict[str, Any]:
    """Return the settings of a group that a continued run must not change, as "model.d_ff"."""
    return {
        f"{group}.{field.name}": getattr(config, field.name)
        for field in dataclasses.fields(config)
        if not field.metadata["may_change"]
    }


def differences(old: Any, new: Any) -> list[str]:
    """Return one line for each changed setting that a continued run must not change.

    >>> from flaxformer_min.config import Config, ModelConfig, TrainingConfig
    >>> longer = Config(training=TrainingConfig(steps=7))
    >>> differences(Config(), longer)
    []
    >>> differences(Config(), Config(model=ModelConfig(d_ff=64)))
    ['model.d_ff: 2048 in the run, 64 now']
    """
    return [
        line
        for group in dataclasses.fields(old)
        for line in differences_of_group(
            group.name, getattr(old, group.name), getattr(new, group.name)
        )
    ]


def differences_of_group(name: str, old: Any, new: Any) -> list[str]:
    """Return the `differences` of one group, such as "model"."""
    before, now = fixed_settings(name, old), fixed_settings(name, new)
    return [
        f"{setting}: {before[setting]!r} in the run, {now[setting]!r} now"
        for setting in before
        if before[setting] != now[setting]
    ]

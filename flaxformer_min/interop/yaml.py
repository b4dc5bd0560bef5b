"""YAML as Marian writes it, read from the events of PyYAML's parser: mappings, lists and texts.

Every scalar is a text, whatever it looks like: vocabularies have pieces such as `yes`, `null`, `~`
and `1`. Nothing is constructed from tags, and no alias is expanded.
"""

import re
from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MOST_ENTRIES = 500_000
"""Of a file, on all levels together."""

DEEPEST = 10
"""Levels of a file. Some versions of the parser take long for many."""

AS_TEXT = "\x7f\x85\u2028\u2029\ufeff\ufffe\uffff"
"""Characters that Marian writes like letters, but that YAML 1.1 forbids or takes for line ends."""

INDENTED = re.compile(r"^\? '.*", re.MULTILINE)
"""A key as PyYAML writes it that contains line ends of YAML 1.1: each with two spaces behind it."""


def read_yaml(content: bytes, path: Path) -> Any:
    """Return dictionaries, lists and texts. Raises ValueError for anything else in the file."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text; {error}.") from error
    if text.count("\n") > 2 * MOST_ENTRIES:  # before the parser spends long on them
        raise ValueError(f"{path} must have at most {MOST_ENTRIES:,} entries.")
    text = INDENTED.sub(lambda key: re.sub("([\x85\u2028\u2029])  ", r"\1", key[0]), text)
    stand_ins = _stand_ins(text)
    try:
        tree = _Tree(path, {other: own for own, other in stand_ins.items()})
        for event in yaml.parse(text.translate(stand_ins), Loader=LOADER):
            tree.add(event)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split()).replace('in "<unicode string>", ', "")
        raise ValueError(f"{path} must be YAML; {reason[:200]}.") from error
    return tree.root


def read_mapping(content: bytes, path: Path) -> dict[str, Any]:
    """Return the dictionary that is all of a file, empty for an empty file."""
    tree = read_yaml(content, path)
    if tree not in (None, "") and not isinstance(tree, dict):
        raise ValueError(f"{path} must hold names with values; line 1 begins otherwise.")
    return tree or {}


def _stand_ins(text: str) -> dict[int, int]:
    """Return a private character that the text does not have for each one of `AS_TEXT`."""
    unused = (code for code in range(0x10F000, 0x10FFFD) if chr(code) not in text)
    return {ord(character): next(unused) for character in AS_TEXT if character in text}


class _Tree:
    """Nested containers that grow by one event at a time."""

    def __init__(self, path: Path, restored: dict[int, int]):
        """Begin empty; `restored`: what to replace in scalars."""
        self.path, self._restored = path, restored
        self.root: Any = None
        self._open: list[Any] = []
        self._keys: list[str | None] = []
        self._entries = 0

    def add(self, event: yaml.Event) -> None:
        """Add a scalar, or begin or end a container."""
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise self._error(event, "an anchor or alias")
        if getattr(event, "tag", None) is not None:
            raise self._error(event, f"the tag {event.tag!r}")
        if isinstance(event, yaml.ScalarEvent):
            self._put(event.value.translate(self._restored), event)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if len(self._open) == DEEPEST:
                raise self._error(event, f"a list or mapping in {DEEPEST} others")
            container: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
            self._put(container, event)
            self._open.append(container)
            self._keys.append(None)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._open.pop()
            self._keys.pop()
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise self._error(event, "a second document")

    def _put(self, value: Any, event: yaml.Event) -> None:
        self._entries += 1
        if self._entries > 2 * MOST_ENTRIES:
            raise ValueError(f"{self.path} must have at most {MOST_ENTRIES:,} entries.")
        if not self._open:
            self.root = value
        elif isinstance(self._open[-1], list):
            self._open[-1].append(value)
        elif self._keys[-1] is not None:
            self._open[-1][self._keys[-1]], self._keys[-1] = value, None
        elif not isinstance(value, str):
            raise self._error(event, "a name that is no text")
        elif value in self._open[-1]:
            raise ValueError(f"{self.path}: {value!r} comes twice.")
        else:
            self._keys[-1] = value

    def _error(self, event: yaml.Event, what: str) -> ValueError:
        line = event.start_mark.line + 1
        return ValueError(f"{self.path}, line {line}: {what} is not understood.")

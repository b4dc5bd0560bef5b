"""Docstrings as Markdown: doctests become code blocks, aligned lists of parameters lists."""

import re
from typing import Any

import griffe

PARAMETER = re.compile(r"(\w+(?:, \w+)*): +(\S.*)")

MACHINERY = {"setup", "__post_init__", "__reduce__"}
"""Methods that Flax, dataclasses and pickle call."""


def to_markdown(docstring: str) -> str:
    """Return the docstring with its doctests and lists of parameters in Markdown's notation.

    >>> print(to_markdown("source: a text,\\n        in UTF-8\\ntarget: its translation"))
    - **`source`**: a text,
        in UTF-8
    - **`target`**: its translation
    """
    return "\n\n".join(_paragraph(each) for each in re.split(r"\n{2,}", docstring.strip()))


def _paragraph(text: str) -> str:
    if text.startswith(">>> "):
        return f"```pycon\n{text}\n```"
    lines = text.split("\n")
    if all(PARAMETER.fullmatch(line) or line.startswith("  ") for line in lines):
        if not lines[0].startswith(" "):
            return "\n".join(map(_item, lines))
    return text


def _item(line: str) -> str:
    """Return an item of a list, or the continuation of one."""
    if line.startswith(" "):
        return f"    {line.lstrip()}"
    return PARAMETER.sub(r"- **`\1`**: \2", line)


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of the package while it is loaded, and hides what has none."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite or hide one object."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
        is_field = obj.is_attribute and obj.annotation is not None
        if obj.name in MACHINERY or not (obj.docstring or is_field or obj.is_module):
            obj.public = False

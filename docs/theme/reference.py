"""Write the options of all commands into docs/command_line.md: python docs/theme/reference.py

Only the lines between `<!-- options of COMMAND -->` and `<!-- end -->` are replaced. Descriptions,
choices and defaults are the program's own.
"""

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from flaxformer_min.cli.arguments import OWN, make_parser
from flaxformer_min.cli.train import Arguments
from flaxformer_min.config_fields import field_descriptions

PAGE = Path(__file__).parents[1] / "command_line.md"
WIDTH = 120

WORDS = {True: "on", False: "off", None: "none", "": "empty", (): "none"}
"""How the page writes these defaults."""


def written(page: str) -> str:
    """Return the page with the options as they are now."""

    def options(found: re.Match) -> str:
        lines = _settings() if found[2] == "train" else _options_of(found[2])
        return "\n".join([found[1], *lines, found[3]])

    return re.sub(r"(<!-- options of (\w+) -->)\n.*?(<!-- end -->)", options, page, flags=re.DOTALL)


def _settings() -> Iterator[str]:
    """Yield the lines of all settings of training, group by group."""
    yield from _group(Arguments, "--", defaults={"workdir": "`runs/` and the name of the config"})
    for field in dataclasses.fields(Arguments):
        if dataclasses.is_dataclass(field.type):
            yield from ("", f"### `{field.name}`", "")
            yield from textwrap.wrap(field.type.__doc__.split("\n\n")[0], WIDTH)
            yield ""
            yield from _group(field.type, f"--{field.name}.")


def _group(kind: type, prefix: str, defaults: Mapping[str, str] | None = None) -> Iterator[str]:
    descriptions, hints = field_descriptions(kind), get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            continue
        hint, option = hints[field.name], prefix + field.name.replace("_", "-")
        if get_origin(hint) is Literal:
            option += " " + "|".join(get_args(hint))
        # `in` and `==` take 0 for False, and 1 for True.
        plain = not isinstance(field.default, (int, float)) or isinstance(field.default, bool)
        default = WORDS.get(field.default) if plain else None
        default = (defaults or {}).get(field.name, default or f"`{field.default}`")
        change = ", may change" if field.metadata.get("may_change") else ""
        yield from _item(f"`{option}` ({default}{change})", descriptions[field.name])


def _options_of(command: str) -> Iterator[str]:
    """Yield the lines of the options of a command, or of the commands below it."""
    commands = _below(make_parser())
    before = {
        (_typed(option), option.help): name
        for name in reversed(list(commands)[: list(commands).index(command)])
        for option in _options(commands[name])
    }
    if not _below(commands[command]):
        yield from _list(commands[command], before)
    for name, parser in _below(commands[command]).items():
        yield from (f"- `{command} {name}`:", *(f"  {line}" for line in _list(parser, {})))


def _list(parser: argparse.ArgumentParser, before: Mapping[tuple, str]) -> Iterator[str]:
    """Yield one item for each new option, and one for all that are explained elsewhere."""
    elsewhere = {}
    for option in _options(parser):
        if option.help.endswith(f"({OWN})"):
            where = "As the settings `decoding` of `train`, with the run's own as the default"
        elif name := before.get((_typed(option), option.help)):
            where = f"As in `{name}`"
        else:
            yield from _item(f"`{_typed(option)}`", option.help)
            continue
        elsewhere.setdefault(where, []).append(f"`{_typed(option)}`")
    for where, options in elsewhere.items():
        yield from _item(where, ", ".join(options))


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if action.option_strings and not {"--help", "--version"} & {*action.option_strings}:
            yield action


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    choices = (each.choices for each in parser._actions if isinstance(each.choices, dict))
    return next(choices, {})


def _typed(option: argparse.Action) -> str:
    value = "|".join(option.choices) if option.choices else option.metavar
    return " ".join([option.option_strings[0], *filter(None, [value])])


def _item(head: str, text: str) -> list[str]:
    """Return the lines of an item. Symbols and names keep their case: `h`, `α`, `sacreBLEU`."""
    if re.match(r"[a-z]{2,}\b", text):
        text = text[0].upper() + text[1:]
    lines = textwrap.TextWrapper(WIDTH - 2, subsequent_indent="  ", break_on_hyphens=False)
    return lines.wrap(f"- {head}: {text}.")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""The part of YAML that Marian writes: one level of settings, lists, and vocabularies.

Marian's vocabularies have keys that YAML libraries read as other things (`yes`, `null`, `~`, `1`),
so each key is text here, whatever it looks like.
"""

import re
from pathlib import Path
from typing import Any

KEY = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^']|'')*'|\S.*?"
ENTRY = re.compile(rf"({KEY})\s*:(?:\s+(.*))?")

ESCAPES = {
    **{"0": "\0", "a": "\a", "b": "\b", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"},
    **{"e": "\x1b", " ": " ", '"': '"', "/": "/", "\\": "\\", "N": "\x85", "_": "\xa0"},
    **{"L": "\u2028", "P": "\u2029"},
}


def read_settings_text(content: bytes, path: Path) -> dict[str, Any]:
    """Return settings as texts and lists of texts. Raises ValueError for deeper levels."""
    settings: dict[str, Any] = {}
    name = None
    for number, line in enumerate(_lines(content, path), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#") or stripped == "---":
            continue
        in_list = name is not None and settings[name] in ("", [])
        if stripped == "[]" and in_list:
            settings[name] = []
        elif stripped.startswith("- ") and (in_list or isinstance(settings.get(name), list)):
            settings[name] = [*settings[name], _unquote(stripped[2:].strip(), path)]
        else:
            entry = ENTRY.fullmatch(line.rstrip())
            if entry is None or line[0] == " ":
                raise ValueError(f"{path}, line {number}: {stripped[:80]!r} is not understood.")
            name = _unquote(entry[1], path)
            if name in settings:
                raise ValueError(f"{path}: {name!r} comes twice.")
            settings[name] = _value((entry[2] or "").strip(), path)
    return settings


def _value(text: str, path: Path) -> str | list[str]:
    if text.startswith("[") and text.endswith("]"):
        return [_unquote(each.strip(), path) for each in text[1:-1].split(",") if each.strip()]
    return _unquote(text, path)


def read_mapping(content: bytes, path: Path) -> dict[str, int]:
    """Return the ids of a vocabulary's pieces. Raises ValueError for one that comes twice."""
    pieces: dict[str, int] = {}
    long_key = None
    for number, line in enumerate(_lines(content, path), start=1):
        if not line.strip():
            continue
        if line.startswith("? "):  # a long key, whose value is on the next line
            long_key = line[2:].strip()
            continue
        if long_key is not None:
            line, long_key = long_key + line, None
        entry = ENTRY.fullmatch(line.rstrip())
        value = (entry[2] or "").strip() if entry else ""
        if entry is None or not re.fullmatch(r"[0-9]{1,9}", value):
            raise ValueError(f"{path}, line {number}: {line.strip()[:80]!r} is not understood.")
        piece = _unquote(entry[1], path)
        if piece in pieces:
            raise ValueError(f"{path}: {piece!r} comes twice.")
        pieces[piece] = int(value)
    return pieces


def _lines(content: bytes, path: Path) -> list[str]:
    try:
        return content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text; {error}.") from error


def _unquote(text: str, path: Path) -> str:
    r"""Return the text of a scalar.

    >>> _unquote(r'"\"\x41\t"', Path("vocab.yml")), _unquote("'it''s'", Path("vocab.yml"))
    ('"A\t', "it's")
    """
    if len(text) >= 2 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) < 2 or not text[0] == text[-1] == '"':
        return text

    def unescape(match: re.Match) -> str:
        if match[1]:
            return chr(int(match[1][1:], 16))
        if match[2] not in ESCAPES:
            raise ValueError(f"{path}: the escape {match[0]!r} is not understood.")
        return ESCAPES[match[2]]

    hexadecimal = "x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|U0010[0-9a-fA-F]{4}"
    return re.sub(rf"\\(?:({hexadecimal})|(.))", unescape, text[1:-1])

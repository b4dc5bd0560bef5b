"""Language pairs such as `en-de` or `en-zh-CN`, the source language first."""

import re
from collections.abc import Collection

BCP_47 = re.compile("[a-z]{2,3}([-_][A-Z][a-z]{3})?([-_]([A-Z]{2}|[0-9]{3}))?")
"""The usual form of a language code: language, script, region."""


UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3001-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
"""A character of a script without spaces between words: Chinese, Japanese, Thai and the like."""


def is_unspaced(words: int, characters: int) -> bool:
    """Return whether text has too many `UNSPACED` characters for words between spaces."""
    return characters > 2 * words


def parse_languages(text: str, known: Collection[str] = ()) -> tuple[str, str]:
    """Return the source and target language of a pair such as `en-de`.

    A code may contain hyphens. Of all possible pairs, those with codes in `known` are preferred,
    then those with codes in the form of BCP 47. A colon always separates the two. A code that
    differs from a known one only in case, or in _ instead of -, matches it.

    Raises ValueError unless it names two different languages in exactly one way.

    >>> parse_languages("en-de"), parse_languages("zh-CN-en"), parse_languages("pt-br:en")
    (('en', 'de'), ('zh-CN', 'en'), ('pt-br', 'en'))
    >>> parse_languages("en-pt-BR", known=["en", "pt_BR"])
    ('en', 'pt_BR')
    """
    pairs = _possible_pairs(text)
    spelled = {_plain(code): code for code in known} | {code: code for code in known}
    found = [pair for pair in pairs if all(_plain(code) in spelled for code in pair)]
    for left in (found, _usual(found), _usual(pairs), pairs):
        if len(left) == 1:
            source, target = (spelled.get(c, spelled.get(_plain(c), c)) for c in left[0])
            return source, target
    if not pairs:
        raise ValueError(
            "languages must be two different languages joined by a hyphen, the source first, as "
            f"in en-de; got {text!r}."
        )
    raise ValueError(
        f"languages must name two languages unambiguously; {text!r} may be "
        f"{' or '.join(':'.join(pair) for pair in pairs)}. Separate them by a colon like this."
    )


def check_languages(text: str) -> None:
    """Raise ValueError unless the text can name two different languages."""
    if not _possible_pairs(text):
        parse_languages(text)


def join_languages(source: str, target: str) -> str:
    """Return the text that `parse_languages` parses as these two languages.

    >>> join_languages("en", "zh-CN"), join_languages("en", "pt-br")
    ('en-zh-CN', 'en:pt-br')
    """
    text = f"{source}-{target}"
    try:
        return text if parse_languages(text) == (source, target) else f"{source}:{target}"
    except ValueError:
        return f"{source}:{target}"


def _possible_pairs(text: str) -> list[tuple[str, str]]:
    separator = ":" if ":" in text else "-"
    parts = text.split(separator)
    if separator == ":" and len(parts) != 2:
        return []
    pairs = [
        (separator.join(parts[:number]), separator.join(parts[number:]))
        for number in range(1, len(parts))
    ]
    return [
        (source, target)
        for source, target in pairs
        if all(source.split("-")) and all(target.split("-")) and _plain(source) != _plain(target)
    ]


def _usual(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [pair for pair in pairs if all(map(BCP_47.fullmatch, pair))]


def _plain(code: str) -> str:
    return code.lower().replace("_", "-")

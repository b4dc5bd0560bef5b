"""Language pairs, written as in `en-de`: the source first."""


def parse_languages(text: str) -> tuple[str, str]:
    """Return the source and target language of a text like `en-de`.

    Raises ValueError unless it names two different languages.

    >>> parse_languages("en-de")
    ('en', 'de')
    """
    parts = text.split("-")
    if len(parts) != 2 or not all(parts) or parts[0] == parts[1]:
        raise ValueError(
            "languages must be two different ones, the source first, joined by one hyphen, as in "
            f"en-de; got {text!r}."
        )
    return parts[0], parts[1]

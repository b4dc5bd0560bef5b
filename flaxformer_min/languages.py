"""Language pairs such as `en-de`, the source language first."""


def parse_languages(text: str) -> tuple[str, str]:
    """Return the source and target language of a pair such as `en-de`.

    Raises ValueError unless it names two different languages.

    >>> parse_languages("en-de")
    ('en', 'de')
    """
    parts = text.split("-")
    if len(parts) != 2 or not all(parts) or parts[0] == parts[1]:
        raise ValueError(
            "languages must be two different languages joined by one hyphen, the source first, as "
            f"in en-de; got {text!r}."
        )
    return parts[0], parts[1]

"""Selection of installed fonts that have the characters of a text."""

import functools
import unicodedata
import warnings

BASE_FONT = "DejaVu Sans"  # comes with matplotlib


def with_fonts(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts with □ for missing characters, and the font families that have the others.

    The families are in order of preference. Warns about missing characters.
    """
    families, missing = [BASE_FONT], {c for text in texts for c in text if c.isprintable()}
    missing -= _characters_of(*_regular_fonts()[BASE_FONT])
    for with_new_fonts in (False, True):
        if missing and with_new_fonts:
            _add_new_fonts()
        fonts = _regular_fonts() if missing else {}
        while fonts and (found := _best_font(fonts, missing, texts)):
            families.append(found)
            missing -= _characters_of(*fonts[found])
    if missing:
        warnings.warn(
            f"No installed font has {len(missing)} of the characters ({_some(missing)}); they are "
            "drawn as □. Install one that has them, for example with `apt install fonts-noto-cjk` "
            "for Korean, Chinese and Japanese or `apt install fonts-noto-core` for other scripts.",
            stacklevel=3,
        )
    return [text.translate(dict.fromkeys(map(ord, missing), "□")) for text in texts], families


def _some(characters: set[str]) -> str:
    return " ".join(sorted(characters)[:8]) + (" …" if len(characters) > 8 else "")


def _regular_fonts() -> dict[str, tuple[str, int]]:
    """Return file and face of each family that has an upright face of normal weight."""
    from matplotlib.font_manager import fontManager

    return {
        font.name: (font.fname, getattr(font, "index", 0))
        for font in fontManager.ttflist
        # Last Resort has a box for every character.
        if font.style == "normal" and font.weight == 400 and "Last Resort" not in font.name
    }


@functools.cache
def _characters_of(file: str, face: int) -> frozenset[str]:
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(file, face_index=face) if face else FT2Font(file)
    except (RuntimeError, OSError):  # bitmap fonts, such as emoji, or uninstalled in the meantime
        return frozenset()
    return frozenset(map(chr, font.get_charmap()))


def _best_font(
    fonts: dict[str, tuple[str, int]], missing: set[str], texts: list[str]
) -> str | None:
    """Return the family with most of the missing characters; of equals, a plain sans-serif one."""
    names = {unicodedata.name(c, "").split(" ")[0] for text in texts for c in text}
    region = "JP" if names & {"HIRAGANA", "KATAKANA"} else "KR" if "HANGUL" in names else "SC"

    def preference(name: str) -> tuple:
        plain = "Sans" in name or "Gothic" in name
        special = any(word in name for word in ("Mono", "Serif", "Coding", "Condensed"))
        covered = len(missing & _characters_of(*fonts[name]))
        return covered, plain and not special, name.endswith(region), "CJK" not in name, name

    best = max(fonts, key=preference)
    return best if preference(best)[0] else None


def _add_new_fonts() -> None:
    """Add fonts to matplotlib's list that were installed after it was cached."""
    from matplotlib import font_manager

    known = {font.fname for font in font_manager.fontManager.ttflist}
    for file in font_manager.findSystemFonts():
        if file not in known:
            try:
                font_manager.fontManager.addfont(file)
            except (RuntimeError, OSError, ValueError):
                continue  # a broken or bitmap font, which matplotlib itself skips, too

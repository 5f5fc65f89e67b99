"""Text that the figures' font can draw.

DejaVu Sans comes with matplotlib, so a figure looks the same everywhere, but it has no Hangul, no
kana and no ideographs: names in them would become rows of boxes. Hangul syllables are spelt by
their Unicode names, which are their romanization (`모델` reads `model`); any other character that
the font lacks is written as its code point, so that two names never become one.
"""

import functools
import unicodedata

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from llmbench.reports.format import shorten

_HANGUL = "HANGUL SYLLABLE "


def drawable(text: str) -> str:
    """Return `text` in characters of DejaVu Sans, on one line."""
    composed = unicodedata.normalize("NFC", text)  # file names on macOS are decomposed
    return " ".join("".join(_spell(character) for character in composed).split())


def short_label(text: str) -> str:
    """Return a name as a legend or an axis has room for it."""
    return shorten(drawable(text), 32)


def _spell(character: str) -> str:
    if character.isspace():
        return " "
    if character.isprintable() and _font().get_char_index(ord(character)):
        return character
    name = unicodedata.name(character, "")
    if name.startswith(_HANGUL):
        return name.removeprefix(_HANGUL).lower()
    return f"<U+{ord(character):04X}>"


@functools.cache
def _font() -> FT2Font:
    return font_manager.get_font(font_manager.findfont("DejaVu Sans"))

"""Lists of settings in one argument: `dtype=float32,max_model_len=512`.

Paths, stop strings and names of runs hold every character that such a list could be cut at, so the
rules are few and none of them guesses:

- items are separated by commas, and an item is cut at its first `=`: more of them belong to the
  value;
- a value that is a number, `true`, `false` or `null` as JSON writes them becomes that. All others
  are text as they stand: apostrophes, spaces and bars mean nothing, and `007` stays `007`, since
  JSON has no numbers that begin with zero;
- a comma inside a value is written `\\,`, or the whole value as JSON: `until=["a,b","c"]`;
- an item without `=` or without a name, and a name given twice, are errors that quote the item.
"""

import json
from typing import Any

import typer

_JSON = json.JSONDecoder()
_PLAIN = {"true": True, "false": False, "null": None}


def parse_key_values(text: str) -> dict[str, Any]:
    """Return the settings of a list, in its order; typer.BadParameter names a wrong item."""
    values: dict[str, Any] = {}
    position = 0
    while position < len(text):
        start = position
        name, value, position = _item(text, start)
        if name in values:
            raise typer.BadParameter(f"`{name}` is given twice: `{_shown(text, start)}`")
        values[name] = value
        position += 1  # the comma
    if text.endswith(",") and not text.endswith("\\,"):
        raise typer.BadParameter(f"expected `name=value` behind the last comma of `{text}`")
    return values


def _item(text: str, start: int) -> tuple[str, Any, int]:
    """Return name and value of the item at `start`, and where it ends."""
    end = _end(text, start)
    name, sign, _ = text[start:end].partition("=")
    if not sign or not name.strip():
        error = typer.BadParameter(f"expected `name=value`, found `{text[start:end]}`")
        if start:
            error.add_note("a comma inside a value is written `\\,`")
        raise error
    place = start + len(name) + 1
    if text[place : place + 1] in ('"', "[", "{"):
        try:
            value, after = _JSON.raw_decode(text, place)
        except ValueError:
            pass  # text that happens to begin so
        else:
            if after == len(text) or text[after] == ",":
                return name.strip(), value, after
    return name.strip(), _value(text[place:end].replace("\\,", ",")), end


def _end(text: str, start: int) -> int:
    """Return the place of the next comma that separates, or the end of the text."""
    place = text.find(",", start)
    while place > 0 and text[place - 1] == "\\":
        place = text.find(",", place + 1)
    return len(text) if place < 0 else place


def _value(text: str) -> Any:
    word = text.strip()
    if word in _PLAIN:
        return _PLAIN[word]
    try:
        number = _JSON.decode(word) if word and word[0] in "-0123456789" else None
    except ValueError:
        return text
    return text if number is None else number


def _shown(text: str, start: int) -> str:
    return text[start : _end(text, start)]

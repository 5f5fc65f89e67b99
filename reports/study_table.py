"""The table of a study, whichever it is: its columns say their units themselves.

A study's table is rows of plain values under names that end in their unit (bench/studies/study.py).
All times of a table share a unit, and so do all sizes, so that columns can be compared at a glance.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from llmbench.reports.format import (
    COUNT,
    PERCENT,
    RATIO,
    REQUESTS_PER_SECOND,
    TOKENS_PER_SECOND,
    Unit,
    byte_unit,
    time_unit,
)
from llmbench.reports.tables import Column, Table, number_column, text_column

Row = Mapping[str, Any]

# Longest first: `_tok_s` ends in `_s` too.
UNITS = {
    "_tok_s": TOKENS_PER_SECOND,
    "_req_s": REQUESTS_PER_SECOND,
    "_bytes": None,
    "_share": PERCENT,
    "_ratio": RATIO,
    "_s": None,
}
WORDS = {"kv": "KV", "ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "median": "p50"}


def study_table(rows: Sequence[Row], notes: Sequence[str] = (), *, title: str = "") -> Table:
    """Return the table of a study's conclusion; a value that is missing is a dash."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    times = [row.get(name) for name in names if _suffix(name) == "_s" for row in rows]
    sizes = [row.get(name) for name in names if _suffix(name) == "_bytes" for row in rows]
    units = {**UNITS, "_s": time_unit(times), "_bytes": byte_unit(sizes)}
    columns = [_column(name, rows, units) for name in names]
    return Table(columns=tuple(columns), title=title, notes=tuple(notes))


def _column(name: str, rows: Sequence[Row], units: Mapping[str, Unit | None]) -> Column:
    values = [row.get(name) for row in rows]
    if any(isinstance(value, str) for value in values):
        return text_column(heading(name), ["" if value is None else str(value) for value in values])
    unit = units.get(_suffix(name)) or (RATIO if name == "ratio" else COUNT)
    return number_column(heading(name), values, unit)


def heading(name: str) -> str:
    """Return a column's name in words: `num_output_tokens` is `output tokens`."""
    stem = name.removeprefix("num_").removesuffix(_suffix(name)) or name
    return " ".join(WORDS.get(word, word) for word in stem.split("_"))


def _suffix(name: str) -> str:
    return next((suffix for suffix in UNITS if name.endswith(suffix)), "")

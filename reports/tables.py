"""Tables for a terminal, a file and a web page: at most eight columns, the best of each marked.

A table is text already: its builder has formatted every cell, chosen one unit a column and marked
the best value. Off a terminal it is Markdown, padded so that it can be read raw (Rich's own tables
are 80 columns wide there and cut what does not fit). The mark of the best is never colour alone: a
star on a terminal, bold in Markdown.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from llmbench.reports.format import COUNT, Unit, number

MAX_COLUMNS = 8
BEST_MARK = "*"
_BEST_NOTE = "best of its column"
_UNLIMITED = 10_000  # cells: wider than any table, as Rich measures within its console

Better = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column, formatted."""

    name: str
    unit: str
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()
    """Rows that hold the best value."""
    is_text: bool = False

    @property
    def header(self) -> str:
        """Name and unit on one line."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns of equal length, and the notes below them."""

    columns: tuple[Column, ...]
    title: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.columns) <= MAX_COLUMNS, "a reader loses the thread beyond eight columns"
        assert len({len(column.cells) for column in self.columns}) <= 1, "columns differ in length"

    @property
    def num_rows(self) -> int:
        """Rows below the header."""
        return len(self.columns[0].cells) if self.columns else 0

    @property
    def has_marks(self) -> bool:
        """Whether any value is marked as the best."""
        return any(column.best for column in self.columns)


def text_column(name: str, cells: Sequence[str], unit: str = "") -> Column:
    """Make a column of words."""
    return Column(name=name, unit=unit, cells=tuple(cells), is_text=True)


def number_column(
    name: str,
    values: Sequence[float | None],
    unit: Unit = COUNT,
    *,
    better: Better | None = None,
    eligible: Sequence[bool] | None = None,
) -> Column:
    """Make a column of stored values in one unit.

    Its best value is marked if `better` says which that is, among `eligible` rows (all, if None)
    and only where at least two of them differ.
    """
    shown = [None if value is None else unit.of(value) for value in values]
    cells = tuple(number(value) for value in shown)
    best: frozenset[int] = frozenset()
    candidates = {
        row: value
        for row, value in enumerate(shown)
        if value is not None and math.isfinite(value) and (eligible is None or eligible[row])
    }
    if better is not None and len({cells[row] for row in candidates}) > 1:
        choose = max if better == "higher" else min
        winner = cells[choose(candidates, key=lambda row: candidates[row])]
        best = frozenset(row for row in candidates if cells[row] == winner)
    return Column(name=name, unit=unit.symbol, cells=cells, best=best)


def render(table: Table, stream: TextIO, width: int | None = None) -> str:
    """Return the table as `stream` shows it best: a Rich table on a terminal, else Markdown.

    A terminal too narrow for the table gets Markdown too, which wraps and loses nothing.
    """
    if not stream.isatty():
        return markdown(table)
    width = shutil.get_terminal_size().columns if width is None else width
    rich_table = to_rich(table)
    if Console(width=_UNLIMITED).measure(rich_table).maximum > width:
        return markdown(table)
    console = Console(file=stream, width=width)
    with console.capture() as capture:
        console.print(rich_table)
        legend = [f"{BEST_MARK} {_BEST_NOTE}"] if table.has_marks else []
        for note in (*legend, *table.notes):
            console.print(Text(note, style="dim"))
    return capture.get().rstrip("\n")


def markdown(table: Table) -> str:
    """Return the table as Markdown, padded for reading as plain text, with its notes as a list."""
    rows = [[column.header for column in table.columns]]
    rows += [
        [f"**{cell}**" if row in column.best else cell for column, cell in _cells(table, row)]
        for row in range(table.num_rows)
    ]
    widths = [max(3, *(cell_len(row[index]) for row in rows)) for index in range(len(rows[0]))]
    lines = [f"**{table.title}**", ""] if table.title else []
    for number_of_row, row in enumerate(rows):
        padded = [
            _pad(cell, width, is_left=column.is_text)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        ]
        lines.append(f"| {' | '.join(padded)} |")
        if number_of_row == 0:
            rules = [
                "-" * (width + 2) if column.is_text else "-" * (width + 1) + ":"
                for width, column in zip(widths, table.columns, strict=True)
            ]
            lines.append(f"|{'|'.join(rules)}|")
    notes = [f"**bold**: {_BEST_NOTE}"] if table.has_marks else []
    notes += [_escape(note) for note in table.notes]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines)


def to_rich(table: Table) -> RichTable:
    """Return a Rich table without its notes; best values are bold and carry the mark."""
    rich_table = RichTable(
        title=table.title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for column in table.columns:
        header = f"{column.name}\n{column.unit}" if column.unit else column.name
        rich_table.add_column(
            Text(header), justify="left" if column.is_text else "right", no_wrap=True
        )
    for row in range(table.num_rows):
        rich_table.add_row(
            *(
                Text(f"{column.cells[row]}{BEST_MARK}", style="bold green")
                if row in column.best
                else Text(column.cells[row] + (" " if column.best else ""))
                for column in table.columns
            )
        )
    return rich_table


def _cells(table: Table, row: int) -> list[tuple[Column, str]]:
    return [(column, _escape(column.cells[row])) for column in table.columns]


def _pad(text: str, width: int, *, is_left: bool) -> str:
    """Pad to a width in terminal cells: Hangul and kana take two each."""
    room = " " * (width - cell_len(text))
    return text + room if is_left else room + text


def _escape(text: str) -> str:
    """Keep bars and stars from being read as Markdown."""
    return text.replace("|", "\\|").replace("*", "\\*")

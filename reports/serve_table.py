"""The final table of a sweep: a row a load, and what a reader must know beside the figures.

Eight columns hold what decides: the load, what the machine delivers, how long users wait at the
middle and at the tail. The tail is the farthest percentile that the samples carry, since a column
of dashes helps no one. Only complete and valid cells compete for the best value; the others stand
in their rows with a letter that leads to the reason.
"""

import math
import string
from collections.abc import Iterable, Sequence

from llmbench.reports.cells import CellView, Record, best_tail, required_for, views, withheld_note
from llmbench.reports.format import (
    REQUESTS_PER_SECOND,
    TOKENS_PER_SECOND,
    Unit,
    counted,
    setting,
    time,
    time_unit,
)
from llmbench.reports.tables import Better, Column, Table, number_column, text_column

MIN_QUEUE_SHARE = 0.05
"""Share of E2EL from which waiting in the client is worth a note (as in bench/validity.py)."""


def serve_table(records: Iterable[Record], *, title: str = "") -> Table:
    """Return the table of a sweep's cells, in order of load."""
    cells = views(records)
    eligible = [cell.is_readable for cell in cells]
    # A saturated cell serves those fast whom it lets in: its latencies must not win.
    unsaturated = [cell.is_readable and not cell.is_saturated for cell in cells]
    tail = best_tail(cells, ("ttft_s",))
    itl_tail = best_tail(cells, ("itl_s",))
    marks, remarks = _remarks(cells)

    def latency(metric: str, name: str) -> Column:
        values = [cell.statistic(metric, name) for cell in cells]
        # One unit for all columns of a metric, so that p50 and p99 can be compared at a glance.
        unit = time_unit(
            cell.statistic(metric, other) for cell in cells for other in ("median", tail, itl_tail)
        )
        label = f"{metric.removesuffix('_s').upper()} {'p50' if name == 'median' else name}"
        return number_column(label, values, unit, better="lower", eligible=unsaturated)

    def figure(name: str, metric: str, unit: Unit, better: Better) -> Column:
        values = [cell.number(metric) for cell in cells]
        return number_column(name, values, unit, better=better, eligible=eligible)

    columns = [
        *_load_columns(cells, marks),
        figure("output", "output_throughput_tok_s", TOKENS_PER_SECOND, "higher"),
        latency("ttft_s", "median"),
        latency("ttft_s", tail),
        latency("tpot_s", "median"),
        latency("itl_s", itl_tail),
    ]
    if any(cell.number("request_goodput_req_s") is not None for cell in cells):
        columns.insert(3, figure("goodput", "request_goodput_req_s", REQUESTS_PER_SECOND, "higher"))
    else:
        columns.append(latency("e2el_s", "median"))
    notes = (*remarks, *_withheld(cells, tail), *_queueing(cells))
    return Table(columns=tuple(columns), title=title, notes=notes)


def _load_columns(cells: Sequence[CellView], marks: Sequence[str]) -> list[Column]:
    rates = [f"{setting(cell.request_rate)}{mark}" for cell, mark in zip(cells, marks, strict=True)]
    caps = [setting(cell.max_concurrency) for cell in cells]
    return [
        Column(name="rate", unit=REQUESTS_PER_SECOND.symbol, cells=tuple(rates), is_text=True),
        text_column("conc.", caps),
    ]


def _remarks(cells: Sequence[CellView]) -> tuple[list[str], list[str]]:
    """Return a mark for each row, empty for sound ones, and a note for each kind of remark."""
    letters: dict[tuple[str, str | None], str] = {}
    remarks: dict[str, list[str]] = {}
    marks = []
    for cell in cells:
        if cell.remark is None:
            marks.append("")
            continue
        kind = (cell.status, cell.verdict)
        letter = letters.setdefault(kind, string.ascii_lowercase[len(letters)])
        remarks.setdefault(letter, []).append(cell.remark)
        marks.append(f" [{letter}]")
    notes = []
    for letter, texts in remarks.items():
        others = f" (and {counted(len(texts) - 1, 'cell')} more)" if len(texts) > 1 else ""
        notes.append(f"[{letter}] {texts[0]}{others}")
    return marks, notes


def _withheld(cells: Sequence[CellView], tail: str) -> list[str]:
    """Say which tail is missing, where requests are too few for it."""
    sizes = [cell.sample_size("ttft_s") for cell in cells if cell.sample_size("ttft_s")]
    if not sizes:
        return []
    missing = [
        cell for cell in cells if cell.sample_size("ttft_s") and not cell.statistic("ttft_s", tail)
    ]
    if len(missing) == len(sizes):
        return [
            f"–: no tail; p90 needs {required_for('p90')} requests a cell and p99 "  # noqa: RUF001
            f"{required_for('p99')}, here are {max(sizes):,}"
        ]
    if missing:
        fewest = min(cell.sample_size("ttft_s") for cell in missing)
        return [f"–: {withheld_note(tail, fewest, 'request')}"]  # noqa: RUF001
    if tail != "p99":
        return [
            f"p99 is withheld: it needs {required_for('p99')} requests a cell, "
            f"here are {max(sizes):,}"
        ]
    return []


def _queueing(cells: Sequence[CellView]) -> list[str]:
    """Say that a cap held requests back, which latencies from sending do not show."""
    worst: tuple[float, CellView] | None = None
    for cell in cells:
        queue, latency = cell.statistic("client_queue_s", "mean"), cell.statistic("e2el_s", "mean")
        is_open = math.isfinite(cell.request_rate)
        if not is_open or not queue or not latency or queue < MIN_QUEUE_SHARE * latency:
            continue
        if worst is None or queue > worst[0]:
            worst = queue, cell
    if worst is None:
        return []
    queue, cell = worst
    return [
        f"latencies count from sending; the concurrency cap held requests back before that, "
        f"{time(queue)} on average at {cell.load}"
    ]

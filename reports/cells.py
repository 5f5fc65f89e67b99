"""The cells of a sweep as a report reads them: a record, whatever is missing from it.

A cell that failed has no metrics, one that was interrupted has some, and any metric may be null.
`CellView` answers every question with a value or None, says in words why a cell is not fit to be
compared, and knows how to name its load.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from llmbench.bench.stats import PERCENTILES, required_sample_size
from llmbench.reports.format import counted, setting

Record = Mapping[str, Any]

TAILS = ("p99", "p95", "p90")
SUMMARIES = (
    "ttft_s",
    "tpot_s",
    "e2el_s",
    "itl_s",
    "per_user_tok_s",
    "ttft_from_schedule_s",
    "e2el_from_schedule_s",
    "client_queue_s",
    "schedule_error_s",
)
NUMBERS = (
    "duration_s",
    "num_requests",
    "num_completed",
    "num_failed",
    "num_aborted",
    "num_lost",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput_req_s",
    "output_throughput_tok_s",
    "total_throughput_tok_s",
    "request_goodput_req_s",
    "slo_attainment",
    "offered_rate_req_s",
    "achieved_rate_req_s",
    "completion_rate_req_s",
    "tokens_per_chunk",
    "prefix_hit_rate",
    "kv_usage_peak",
    "kv_usage_mean",
    "kv_waste_mean",
    "num_preemptions",
    "peak_concurrency",
    "mean_concurrency",
)
MIN_ACHIEVED_SHARE = 0.95
"""Share of the offered rate below which a target is saturated (house figure 2)."""


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell's record."""

    record: Record

    @property
    def cell_id(self) -> str:
        """Name of the cell in its folder."""
        return str(self.record["cell_id"])

    @property
    def request_rate(self) -> float:
        """Requests a second; inf where they are not spread over time."""
        return float(self._cell.get("request_rate", math.inf))

    @property
    def max_concurrency(self) -> int | None:
        """Most requests in flight, None for no cap."""
        return self._cell.get("max_concurrency")

    @property
    def load(self) -> str:
        """The load in words: `4 req/s, concurrency 8`, `concurrency 8`, `all at once`."""
        cap = self.max_concurrency
        parts = []
        if math.isfinite(self.request_rate):
            parts.append(f"{setting(self.request_rate)} req/s")
        elif cap is None:
            return "all at once"
        if cap is not None:
            parts.append(f"concurrency {cap}")
        return ", ".join(parts)

    @property
    def status(self) -> str:
        """How the cell ended: `complete`, `interrupted` or `failed`."""
        return str(self.record["status"])

    @property
    def verdict(self) -> str | None:
        """Whether the run is fit to be read; None where nothing was measured."""
        return self._validity.get("verdict")

    @property
    def is_readable(self) -> bool:
        """Whether figures of the cell may stand beside those of others."""
        return (
            self.status == "complete"
            and self._validity.get("is_valid", self.verdict == "VALID")
            and self.number("output_throughput_tok_s") is not None
        )

    @property
    def is_saturated(self) -> bool:
        """Whether the target, or its concurrency cap, fell behind the offered rate."""
        offered = self.number("offered_rate_req_s") or 0.0
        achieved = self.number("achieved_rate_req_s")
        is_short = achieved is not None and achieved < MIN_ACHIEVED_SHARE * offered
        return is_short or self.verdict == "RATE-NOT-ACHIEVED"

    @property
    def keeps_up(self) -> bool:
        """Whether requests ended as fast as they came; False also where a short run cannot tell."""
        offered = self.number("offered_rate_req_s") or 0.0
        completed = self.number("completion_rate_req_s") or 0.0
        return not self.is_saturated and completed >= MIN_ACHIEVED_SHARE * offered > 0

    @property
    def remark(self) -> str | None:
        """What a reader must know before using the figures: verdict and reasons, or how it broke.

        None for a complete and valid cell.
        """
        parts = []
        if self.status != "complete":
            error = self.record.get("error") or {}
            parts.append(": ".join(filter(None, [self.status, error.get("message")])))
        if self.verdict not in (None, "VALID"):
            parts.append(": ".join([self.verdict, *self._validity.get("reasons", [])][:2]))
        return "; ".join(parts) or None

    def number(self, name: str) -> float | None:
        """Return one figure of the metrics."""
        value: float | None = self._metrics.get(name)
        return value

    def statistic(self, metric: str, name: str) -> float | None:
        """Return one statistic of a metric with a summary, such as `ttft_s`, `p99`."""
        value: float | None = self._summary(metric).get(name)
        return value

    def interval(self, metric: str, name: str) -> tuple[float, float] | None:
        """Return the interval of a statistic."""
        ends = self._summary(metric).get(f"{name}_ci")
        return None if ends is None else (ends[0], ends[1])

    def sample_size(self, metric: str) -> int:
        """Return how many values a summary rests on."""
        return int(self._summary(metric).get("n") or 0)

    @property
    def _cell(self) -> Mapping[str, Any]:
        return self.record.get("cell") or {}

    @property
    def _metrics(self) -> Mapping[str, Any]:
        return self.record.get("metrics") or {}

    @property
    def _validity(self) -> Mapping[str, Any]:
        return self.record.get("validity") or {}

    def _summary(self, metric: str) -> Mapping[str, Any]:
        return self._metrics.get(metric) or {}


def views(records: Iterable[Record]) -> list[CellView]:
    """Return the cells in order of load: by rate, then by cap, no cap and all at once last."""
    cells = [CellView(record) for record in records]
    return sorted(cells, key=lambda cell: (cell.request_rate, cap_value(cell)))


def cap_value(cell: CellView) -> float:
    """Return the cap on concurrency as a number that can be ordered and plotted."""
    return math.inf if cell.max_concurrency is None else float(cell.max_concurrency)


def best_tail(cells: Sequence[CellView], metrics: Sequence[str]) -> str:
    """Return the percentile to show as the tail: the one that most samples carry, p99 if none.

    Among those that equally many carry it is the farthest out.
    """
    carried = Counter(
        name
        for cell in cells
        for metric in metrics
        for name in TAILS
        if cell.statistic(metric, name) is not None
    )
    return max(TAILS, key=lambda name: carried[name])  # the first of equals, hence p99 first


def required_for(tail: str) -> int:
    """Return how many values a percentile needs."""
    return required_sample_size(PERCENTILES[tail])


def withheld_note(tail: str, num_values: int, noun: str) -> str:
    """Say why a percentile is missing: `p99 needs 368 requests, here are 64`."""
    return f"{tail} needs {required_for(tail)} {noun}s; the sample has {counted(num_values, noun)}"


def missing_note(cells: Sequence[CellView]) -> str:
    """Name the cells that a figure cannot show, and why."""
    reasons = [f"{cell.load} ({cell.remark or 'nothing measured'})" for cell in cells[:3]]
    if len(cells) > 3:
        reasons.append(counted(len(cells) - 3, "other cell"))
    return f"Not drawn: {'; '.join(reasons)}."


def cells_frame(cells: Sequence[CellView]) -> pd.DataFrame:
    """Return every figure of every cell, a row a cell, in stored units."""
    rows = []
    for cell in cells:
        row: dict[str, Any] = {
            "cell_id": cell.cell_id,
            "status": cell.status,
            "verdict": cell.verdict,
            "request_rate": cell.request_rate,
            "max_concurrency": cell.max_concurrency,
            "is_saturated": cell.is_saturated,
        }
        row |= {name: cell.number(name) for name in NUMBERS}
        for metric in SUMMARIES:
            row[f"{metric}_n"] = cell.sample_size(metric)
            for name in ("mean", *PERCENTILES):
                low, high = cell.interval(metric, name) or (None, None)
                row[f"{metric}_{name}"] = cell.statistic(metric, name)
                row[f"{metric}_{name}_low"], row[f"{metric}_{name}_high"] = low, high
        rows.append(row)
    counts = [name for name in rows[0] if name.startswith("num_")] if rows else []
    counts += ["max_concurrency", "total_input_tokens", "total_output_tokens", "peak_concurrency"]
    return pd.DataFrame(rows).astype(dict.fromkeys(counts, "Int64") if rows else {})

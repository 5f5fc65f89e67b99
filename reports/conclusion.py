"""One sentence at the end of a sweep: what was found, from the figures alone.

Which load gives the most output tokens and what a user gets there; which lighter load gives
nearly as many; where the target stops keeping up. Only complete and valid cells are quoted.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from llmbench.reports.cells import CellView, Record, views
from llmbench.reports.format import (
    REQUESTS_PER_SECOND,
    TOKENS_PER_SECOND,
    counted,
    number,
    percent,
    quantity,
    setting,
    time,
)

NEAR_SHARE = 0.95
"""Share of the best throughput that counts as nearly as much: 5 % is within the noise of a run."""

THROUGHPUT = "output_throughput_tok_s"


def conclude(records: Iterable[Record]) -> str:
    """Return the sentence; it also says when there is nothing to conclude."""
    cells = views(records)
    readable = [cell for cell in cells if cell.is_readable]
    if not readable:
        return _nothing(cells)
    best = max(readable, key=_throughput)
    parts = [_best(best, len(readable)), _knee(readable, best), _goodput(readable)]
    parts += [_saturation(cells), _left_out(len(cells) - len(readable))]
    return "; ".join(part for part in parts if part) + "."


def _nothing(cells: Sequence[CellView]) -> str:
    if not cells:
        return "There is no cell to conclude from."
    states = Counter(
        (cell.verdict if cell.status == "complete" else None) or cell.status for cell in cells
    )
    reasons = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"No cell is fit to be read ({reasons}), so nothing can be concluded."


def _best(best: CellView, num_readable: int) -> str:
    throughput = quantity(best.number(THROUGHPUT), TOKENS_PER_SECOND)
    if num_readable == 1:
        return f"{_where(best).capitalize()} the target gives {throughput} of output{_user(best)}"
    return f"Output is highest {_where(best)}: {throughput}{_user(best)}"


def _knee(readable: Sequence[CellView], best: CellView) -> str | None:
    """Name the lightest load whose throughput is within 5 % of the best."""
    near = [
        cell
        for cell in readable
        if _throughput(cell) >= NEAR_SHARE * _throughput(best) and _latency(cell) < _latency(best)
    ]
    if not near:
        return None
    knee = min(near, key=_latency)
    share = percent(_throughput(knee) / _throughput(best), 2)
    return f"{_where(knee)} it is already {share} of that{_user(knee)}"


def _goodput(readable: Sequence[CellView]) -> str | None:
    with_goodput = [cell for cell in readable if cell.number("request_goodput_req_s") is not None]
    if not with_goodput:
        return None
    best = max(with_goodput, key=lambda cell: cell.number("request_goodput_req_s") or 0.0)
    goodput = best.number("request_goodput_req_s")
    if not goodput:
        return "no request met the objectives under any load"
    met = percent(best.number("slo_attainment"), 2)
    rate = quantity(goodput, REQUESTS_PER_SECOND)
    return f"goodput is highest {_where(best)}: {rate} with {met} of requests in time"


def _saturation(cells: Sequence[CellView]) -> str | None:
    """Say up to which offered rate the target keeps up, over all caps."""
    measured = [cell for cell in cells if cell.is_readable and math.isfinite(cell.request_rate)]
    kept = {cell.request_rate for cell in measured if cell.keeps_up}
    lost = {cell.request_rate for cell in measured if cell.is_saturated} - kept
    unclear = {cell.request_rate for cell in measured} - kept - lost
    highest = max(kept, default=0.0)
    falls_behind = min((rate for rate in lost if rate > highest), default=None)
    parts = [f"keeps up with {setting(highest)} req/s"] if kept else []
    if falls_behind is not None:
        parts.append(f"falls behind at {setting(falls_behind)} req/s")
    text = f"it {' and '.join(parts)}" if parts else None
    beyond = [rate for rate in unclear if rate > highest and rate < (falls_behind or math.inf)]
    if beyond:
        rates = ", ".join(setting(rate) for rate in sorted(beyond))
        short = f"at {rates} req/s the runs are too short to tell whether it keeps up"
        text = f"{text}; {short}" if text else short
    return text


def _left_out(count: int) -> str | None:
    return f"{counted(count, 'cell')} not fit to be read left out" if count else None


def _where(cell: CellView) -> str:
    if math.isfinite(cell.request_rate):
        return f"at {cell.load}"
    if cell.max_concurrency is None:
        return "with all requests sent at once"
    return f"at {cell.load} (closed loop)"


def _user(cell: CellView) -> str:
    """Return what a user gets there: ` (TTFT p50 41.2 ms, 24.1 tok/s a user)`."""
    ttft, speed = cell.statistic("ttft_s", "median"), cell.statistic("per_user_tok_s", "median")
    parts = [f"TTFT p50 {time(ttft)}"] if ttft is not None else []
    if speed is not None:
        parts.append(f"{number(speed)} tok/s a user")
    return f" with {' and '.join(parts)}" if parts else ""


def _throughput(cell: CellView) -> float:
    return cell.number(THROUGHPUT) or 0.0


def _latency(cell: CellView) -> float:
    latency = cell.statistic("e2el_s", "median")
    return math.inf if latency is None else latency

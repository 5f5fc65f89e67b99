"""Service-level objectives: what a request must meet to count as good.

Goodput is the rate of requests that meet every objective at once (Zhong et al. 2024, DistServe),
written as in vLLM: `ttft:200 tpot:50 e2el:2000`, milliseconds. Attainment is the share of such
requests among all that were asked for. A request that failed was not served in time, so it is
never good, and it stays in the denominator.
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmbench.bench.errors import BenchConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Objectives in seconds; None is no objective, and at least one is set."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def __post_init__(self) -> None:
        limits = {name: getattr(self, name) for name in ("ttft_s", "tpot_s", "e2el_s")}
        if all(limit is None for limit in limits.values()):
            raise _with_form(BenchConfigError("goodput needs at least one objective, found none"))
        for name, limit in limits.items():
            if limit is not None and not (limit > 0 and math.isfinite(limit)):
                raise BenchConfigError(f"expected a positive time for {name}, found {limit}")

    @classmethod
    def parse(cls, text: str | Sequence[str]) -> "Goodput":
        """Read `NAME:MILLISECONDS` items, separated by spaces or commas or given one by one."""
        items = " ".join([text] if isinstance(text, str) else text).replace(",", " ").split()
        names = ("ttft", "tpot", "e2el")
        limits: dict[str, float] = {}
        for item in items:
            name, colon, number = item.partition(":")
            if not colon:
                raise _with_form(BenchConfigError(f"expected NAME:MILLISECONDS, found `{item}`"))
            if name not in names:
                error = BenchConfigError(f"unknown objective `{name}` in `{item}`")
                if close := difflib.get_close_matches(name.lower(), names, n=1):
                    error.add_note(f"did you mean `{close[0]}`?")
                raise _with_form(error)
            if f"{name}_s" in limits:
                raise BenchConfigError(f"objective `{name}` is given twice")
            try:
                milliseconds = float(number)
            except ValueError:
                milliseconds = math.nan
            if not (milliseconds > 0 and math.isfinite(milliseconds)):
                raise _with_form(
                    BenchConfigError(f"expected a positive number of ms, found `{item}`")
                )
            limits[f"{name}_s"] = milliseconds / 1000
        return cls(**limits)

    def is_met(self, *, ttft_s: float | None, tpot_s: float | None, e2el_s: float | None) -> bool:
        """Say whether a completed request with these times is good.

        A missing TPOT meets its objective, as in vLLM: with one token there is nothing to wait
        for after the first. A missing TTFT or E2EL is a time that nobody saw, so it does not.
        """
        return (
            (self.ttft_s is None or (ttft_s is not None and ttft_s <= self.ttft_s))
            and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)
            and (self.e2el_s is None or (e2el_s is not None and e2el_s <= self.e2el_s))
        )


def _with_form(error: BenchConfigError) -> BenchConfigError:
    error.add_note("objectives are `ttft:MS tpot:MS e2el:MS`, as in `--goodput ttft:200 tpot:50`")
    return error

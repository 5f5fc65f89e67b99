"""Numbers as text: the one place where a stored value gets its unit and its digits.

Records hold SI base values (seconds, bytes, shares of one). People read milliseconds, GiB and per
cent, to three digits: a fourth is below the noise of any serving benchmark. A column or an axis
has one unit for all its values, so the unit follows from the largest of them. What is not known
is a dash, never a zero.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NULL = "–"  # noqa: RUF001 (the dash is meant)
DIGITS = 3


@dataclass(frozen=True, slots=True)
class Unit:
    """What a reader sees: `symbol` after stored value x `per_stored`."""

    symbol: str
    per_stored: float = 1.0

    def of(self, value: float) -> float:
        """Return a stored value in this unit; a count stays a whole number."""
        return value if self.per_stored == 1 else value * self.per_stored


COUNT = Unit("")
RATIO = Unit("×")  # noqa: RUF001
PERCENT = Unit("%", 100.0)
TOKENS = Unit("tokens")
TOKENS_PER_SECOND = Unit("tok/s")
TOKENS_PER_SECOND_USER = Unit("tok/s/user")
REQUESTS_PER_SECOND = Unit("req/s")
SECONDS = Unit("s")
MILLISECONDS = Unit("ms", 1e3)
MICROSECONDS = Unit("µs", 1e6)
BYTES = tuple(
    Unit(symbol, 1 / 1024**power) for power, symbol in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))
)


def time_unit(values_s: Iterable[float | None]) -> Unit:
    """Return the unit in which the largest of the times has at most four digits before the dot."""
    largest = _largest(values_s)
    if largest is None or 1e-3 <= largest < 10:
        return MILLISECONDS
    return SECONDS if largest >= 10 else MICROSECONDS


def byte_unit(values_bytes: Iterable[float | None]) -> Unit:
    """Return the binary unit in which the largest of the sizes is at least 1."""
    largest = _largest(values_bytes) or 0.0
    power = int(math.log2(largest) // 10) if largest >= 1 else 0
    return BYTES[min(power, len(BYTES) - 1)]


def number(value: float | None, digits: int = DIGITS) -> str:
    """Return `digits` significant digits and all digits before the dot: 0.0412, 41.2, 41,234."""
    if value is None or math.isnan(value):
        return NULL
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    rounded = float(f"{value:.{digits - 1}e}")  # 9.996 has one digit before the dot, 10.0 two
    exponent = math.floor(math.log10(abs(rounded)))
    if exponent < -6:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def quantity(value: float | None, unit: Unit, digits: int = DIGITS) -> str:
    """Return a stored value with its unit: `41.2 ms`."""
    if value is None or math.isnan(value):
        return NULL
    return _with_symbol(number(unit.of(value), digits), unit)


def time(value_s: float | None, digits: int = DIGITS) -> str:
    """Return a time in the unit that suits it."""
    return quantity(value_s, time_unit([value_s]), digits)


def size(value_bytes: float | None, digits: int = DIGITS) -> str:
    """Return a size in the binary unit that suits it."""
    return quantity(value_bytes, byte_unit([value_bytes]), digits)


def percent(share: float | None, digits: int = DIGITS) -> str:
    """Return a share of one in per cent."""
    return quantity(share, PERCENT, digits)


def with_interval(value: float | None, interval: Sequence[float] | None, unit: Unit) -> str:
    """Return a stored value with its interval, where it has one: `41.2 [39.8, 43.0] ms`."""
    if value is None or interval is None:
        return quantity(value, unit)
    low, high = (number(unit.of(end)) for end in interval)
    return _with_symbol(f"{number(unit.of(value))} [{low}, {high}]", unit)


def setting(value: float | str | None) -> str:
    """Return a setting as its flag spells it: `4`, `inf`, `none`."""
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, int | float) else value


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 request`, `64 requests`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def header(name: str, unit: Unit) -> str:
    """Return the label of a column or an axis: `TTFT p50 (ms)`."""
    return f"{name} ({unit.symbol})" if unit.symbol else name


def shorten(text: str, limit: int = 48) -> str:
    """Cut a long name in its middle; both ends of a model's name tell models apart."""
    if len(text) <= limit:
        return text
    kept = limit - 1
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"


def _with_symbol(text: str, unit: Unit) -> str:
    return f"{text} {unit.symbol}" if unit.symbol else text


def _largest(values: Iterable[float | None]) -> float | None:
    known = (abs(value) for value in values if value is not None and math.isfinite(value))
    return max((value for value in known if value > 0), default=None)

r"""Answers out of generated text: stops, extraction filters, exact match, comparison of numbers.

A model that is asked for a number writes a paragraph; which part of it counts decides the score.
The rules of lm-evaluation-harness 0.4.13 are kept to the letter, since published GSM8K scores rest
on them: `strict-match` takes the first number behind "####", `flexible-extract` the last thing that
looks like a number, and both are compared as text after some characters are taken out.

Compared as text, "$29.00" is not "29". The filter `numeric` is ours, stands beside those two and
compares values: the number behind the first "####", else the last number of the answer. A number
begins and ends with a digit; it may have a sign, "$", thousands commas and decimals.

An answer in which nothing was found is the text "[invalid]": an answer of its own, always wrong.
"""

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Self

from llmbench.bench.errors import BenchConfigError

INVALID = "[invalid]"
NUMERIC = "numeric"

# A sign is one only where no word ends before it: "10-5" has no negative number.
_NUMBER = re.compile(
    r"(?:(?<![\w)])(?P<sign>[-\u2212]))?\$?(?P<sign2>(?<=\$)[-\u2212])?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?P<decimals>\.[0-9]+)?"
)
_DEFAULT_PATTERN = r"#### (\-?[0-9\.\,]+)"


def cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """Return what stands before the first occurrence of each stop; empty stops do not count."""
    for stop in stops:
        if stop:
            text = text.split(stop, 1)[0]
    return text


def parse_number(text: str) -> Decimal | None:
    """Return the number behind the first "####", else the last number; None where there is none."""
    found = _NUMBER.search(text.partition("####")[2])
    if found is None:
        numbers = list(_NUMBER.finditer(text))
        if not numbers:
            return None
        found = numbers[-1]
    value = Decimal(found["digits"].replace(",", "") + (found["decimals"] or ""))
    return -value if found["sign"] or found["sign2"] else value


def number_text(value: Decimal) -> str:
    """Write a number in one way: no commas, no trailing zeros, no exponent."""
    text = f"{value:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch:
    """When two texts are the same: what is removed from both sides before they are compared.

    In this order: each of `regexes_to_ignore`, then case, ASCII punctuation, ASCII digits.
    """

    regexes_to_ignore: tuple[str, ...] = ()
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False

    @classmethod
    def from_metric(cls, entry: Mapping[str, Any]) -> Self:
        """Read the settings from an entry of the harness's `metric_list`."""
        return cls(
            regexes_to_ignore=tuple(entry.get("regexes_to_ignore") or ()),
            ignore_case=bool(entry.get("ignore_case", False)),
            ignore_punctuation=bool(entry.get("ignore_punctuation", False)),
            ignore_numbers=bool(entry.get("ignore_numbers", False)),
        )

    def normalized(self, text: str) -> str:
        """Return the text as it is compared."""
        for pattern in self.regexes_to_ignore:
            text = re.sub(pattern, "", text)
        if self.ignore_case:
            text = text.lower()
        if self.ignore_punctuation:
            text = text.translate(str.maketrans("", "", string.punctuation))
        if self.ignore_numbers:
            text = text.translate(str.maketrans("", "", string.digits))
        return text

    def matches(self, answer: str, target: str) -> bool:
        """Whether the two are the same."""
        return self.normalized(answer) == self.normalized(target)


Step = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extractor:
    """A task's filter made ready: a named chain of steps from a response to the answer in it."""

    name: str
    steps: tuple[Step, ...] = ()
    is_numeric: bool = False
    """Compare values, not texts."""

    def answer(self, response: str) -> str:
        """Return the answer, or "[invalid]"."""
        for step in self.steps:
            response = step(response)
        return response

    def is_right(self, answer: str, target: str, match: ExactMatch) -> bool:
        """Whether what `answer` returned is the target."""
        if not self.is_numeric:
            return match.matches(answer, target)
        value, wanted = parse_number(answer), parse_number(target)
        return value is not None and value == wanted


def build_filters(filter_list: Sequence[Mapping[str, Any]]) -> tuple[Extractor, ...]:
    """Make a task's filters ready, given as the harness's `filter_list`.

    An empty list is one filter named "none", which takes the whole response.

    Raises:
        BenchConfigError: a function that is not known here, or a pattern that is no regex.
    """
    if not filter_list:
        return (Extractor(name="none"),)
    built = []
    for entry in filter_list:
        name, functions = str(entry["name"]), entry["filter"]
        steps = tuple(_step(name, dict(settings)) for settings in functions)
        is_numeric = any(settings["function"] == NUMERIC for settings in functions)
        built.append(Extractor(name=name, steps=steps, is_numeric=is_numeric))
    return tuple(built)


def _step(name: str, settings: dict[str, Any]) -> Step:
    function = settings.pop("function", None)
    build = _FUNCTIONS.get(str(function))
    if build is None:
        error = BenchConfigError(f"filter `{name}` asks for an unknown function `{function}`")
        error.add_note("known functions: " + ", ".join(_FUNCTIONS))
        raise error
    try:
        return build(**settings)
    except (TypeError, re.error) as cause:
        raise BenchConfigError(f"function `{function}` of filter `{name}`: {cause}") from cause


def _regex(
    regex_pattern: str = _DEFAULT_PATTERN, group_select: int = 0, fallback: str = INVALID
) -> Step:
    """Take the match number `group_select`; of several groups in it, the first that is not empty.

    An index beyond the matches falls back, where the harness would stop with an IndexError.
    """
    pattern = re.compile(regex_pattern)

    def extract(response: str) -> str:
        matches = pattern.findall(response)
        if not -len(matches) <= group_select < len(matches):
            return fallback
        match = matches[group_select]
        if isinstance(match, tuple):
            match = next((group for group in match if group), fallback)
        return str(match).strip()

    return extract


def _number() -> Step:
    def extract(response: str) -> str:
        value = parse_number(response)
        return INVALID if value is None else number_text(value)

    return extract


def _mapped(mapping_dict: Mapping[str, str], default_value: str | None = None) -> Step:
    return lambda response: str(mapping_dict.get(response, default_value or INVALID))


# One response is asked for each document, so picking among repeats changes nothing.
_FUNCTIONS: dict[str, Callable[..., Step]] = {
    "regex": _regex,
    NUMERIC: _number,
    "take_first": lambda: lambda response: response,
    "majority_vote": lambda: lambda response: response,
    "remove_whitespace": lambda: str.strip,
    "lowercase": lambda: str.lower,
    "uppercase": lambda: str.upper,
    "map": _mapped,
}

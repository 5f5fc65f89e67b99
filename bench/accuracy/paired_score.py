"""One metric of a candidate and its baseline on the same items: the record of a comparison.

Imports no torch.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmbench.bench import strict_json
from llmbench.bench.accuracy.paired_tests import ALPHA, detectable_mean, detectable_share, holm

Unit = Literal["share", "ratio", "bits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """What became of right and wrong answers; `num_wrong_to_other` are still wrong, but another."""

    num_right_to_wrong: int
    num_wrong_to_right: int
    num_wrong_to_other: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedScore:
    """One metric of both models on the same items.

    Attributes:
        unit: `share`: 0 … 1, differences are in points of 100. `ratio`: a perplexity, whose
            difference is relative. `bits`: bits per byte.
        n: Pairs; `num_left_out` more have no usable answer of one of the models.
        difference: Candidate minus base; relative to the base for a ratio.
        low, high: 95 % interval of the difference; None where there are too few items.
        interval: How the interval comes about.
        flips: Where every item is right or wrong.
        p_value: Two-sided, of `test`; by itself. None without pairs.
        adjusted_p: With regard to the other tasks that it was tested with (`adjust`).
        detectable: Smallest true difference that the test finds four times out of five; None
            where there is none.
    """

    task: str
    metric: str
    unit: Unit
    higher_is_better: bool
    n: int
    num_left_out: int = 0
    base: float | None = None
    candidate: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    interval: str = ""
    flips: Flips | None = None
    test: str = ""
    p_value: float | None = None
    adjusted_p: float | None = None
    detectable: float | None = None
    standard_error: float | None = None

    @property
    def mcnemar_p(self) -> float | None:
        """The p-value of McNemar's exact test, where the metric is right or wrong."""
        return self.p_value if self.flips is not None else None

    @property
    def flip_rate(self) -> float | None:
        """Share of items that went from right to wrong or back."""
        if self.flips is None or not self.n:
            return None
        return (self.flips.num_right_to_wrong + self.flips.num_wrong_to_right) / self.n

    @property
    def agreement(self) -> float | None:
        """Share of items with the same answer."""
        if self.flips is None or self.flip_rate is None:
            return None
        return 1 - self.flip_rate - self.flips.num_wrong_to_other / self.n

    @property
    def is_worse(self) -> bool | None:
        """Whether the difference is to the candidate's disadvantage; None if there is none."""
        if not self.difference:
            return None
        return (self.difference < 0) is self.higher_is_better

    def to_record(self) -> dict[str, Any]:
        """Return the JSON form."""
        plain: dict[str, Any] = strict_json.strict(
            {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
            | {"flip_rate": self.flip_rate, "agreement": self.agreement}
        )
        return plain


def adjust(scores: Sequence[PairedScore]) -> tuple[PairedScore, ...]:
    """Adjust p-values for their number (Holm), and what could have been found accordingly.

    Give each item once: a group's score or its tasks' scores, not both.
    """
    tested = [score for score in scores if score.p_value is not None]
    adjusted = iter(holm([score.p_value for score in tested if score.p_value is not None]))
    alpha = ALPHA / max(1, len(tested))  # what the smallest p-value has to meet
    return tuple(
        score
        if score.p_value is None
        else dataclasses.replace(
            score, adjusted_p=next(adjusted), detectable=detectable(score, alpha)
        )
        for score in scores
    )


def detectable(score: PairedScore, alpha: float = ALPHA) -> float | None:
    """Return the smallest true difference that a score's test finds four times out of five."""
    if score.flips is not None:
        num_flips = score.flips.num_right_to_wrong + score.flips.num_wrong_to_right
        return detectable_share(score.n, num_flips, alpha)
    if score.standard_error is None:
        return None
    found = detectable_mean(score.standard_error, alpha)
    return relative_change(found) if score.unit == "ratio" else found


def relative_change(log_ratio: float) -> float:
    """Return e to the value, minus 1; infinity where that is beyond a float."""
    try:
        return math.expm1(log_ratio)
    except OverflowError:
        return math.inf

"""The score so far, while a run is under way: cheap to keep up, and honest about its width.

The final score is computed from all items at the end (aggregate.py); this one only has to say
where it is heading. A share of right answers gets Wilson's interval, another mean 1.96 standard
errors, and the perplexity of a text, a ratio of sums, none before the end.
"""

import math
from dataclasses import dataclass

from llmbench.bench.accuracy.intervals import normal_interval, wilson_interval
from llmbench.bench.accuracy.items import ItemRecord
from llmbench.bench.accuracy.scoring import ROLLING_METRICS, perplexity


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A task's score so far, with its 95 % interval where there is one."""

    task: str
    metric: str
    value: float
    low: float | None
    high: float | None
    num_items: int

    def __str__(self) -> str:
        between = "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.task} {self.metric} {self.value:.3f}{between}"


class RunningScore:
    """Sums of one task's primary metric."""

    def __init__(self, task: str, metric: str) -> None:
        """`metric` is a name in the items' metrics, or the perplexity of a text."""
        self._task, self._metric = task, metric
        self._n = 0
        self._sum = self._squares = 0.0
        self._loglikelihood = 0.0
        self._weight = 0
        self._is_share = True

    def add(self, record: ItemRecord) -> None:
        """Take an item in; an invalid one does not count."""
        if record.invalid is not None:
            return
        if self._is_ratio:
            self._n += 1
            self._loglikelihood += math.fsum(record.loglikelihoods or ())
            self._weight += self._weight_of(record)
            return
        # F1 is a score of all items together; while they come, the share of right ones stands in.
        value = record.metrics.get(self._metric, record.metrics.get("acc"))
        if value is None:
            return
        self._n += 1
        self._sum += value
        self._squares += value * value
        self._is_share &= value in (0.0, 1.0)

    @property
    def estimate(self) -> Estimate | None:
        """The score so far; None before the first item."""
        if self._n == 0 or (self._is_ratio and self._weight == 0):
            return None
        interval: tuple[float | None, float | None] = (None, None)
        if self._is_ratio:
            value = perplexity(self._loglikelihood, self._weight)
            if self._metric == "bits_per_byte":
                value = math.log2(value)
        else:
            value = self._sum / self._n
            if self._is_share:
                interval = wilson_interval(self._sum, self._n)
            elif self._n > 1:
                spread = max(0.0, self._squares - self._n * value * value) / (self._n - 1)
                ends = normal_interval(value, math.sqrt(spread / self._n))
                interval = max(0.0, ends[0]), min(1.0, ends[1])  # every such metric is a share
        low, high = interval
        return Estimate(
            task=self._task, metric=self._metric, value=value, low=low, high=high, num_items=self._n
        )

    @property
    def _is_ratio(self) -> bool:
        return self._metric in (*ROLLING_METRICS, "perplexity")

    def _weight_of(self, record: ItemRecord) -> int:
        if self._metric == "perplexity":
            return sum(record.num_tokens)
        words, num_bytes = record.text_size or (0, 0)
        return words if self._metric == "word_perplexity" else num_bytes

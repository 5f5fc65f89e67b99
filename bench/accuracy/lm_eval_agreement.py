"""How far our answers are from those of lm-evaluation-harness to the same questions.

Compared are the log-likelihood of every continuation, the answer that follows from it, and the
scores. In float32 the first agree to rounding and the rest exactly. In bfloat16 the sums of two
programs differ in the second decimal, near ties fall either way, and the share of equal answers
says how often. That the prompts are equal is told by their hashes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmbench.bench.accuracy.aggregate import TaskScore
from llmbench.bench.accuracy.items import ItemRecord
from llmbench.bench.accuracy.lm_eval_format import HARNESS_METRICS, NO_FILTER
from llmbench.bench.errors import BenchError

SCORE_TOLERANCE = 1e-9
"""Two sums of the same answers in another order; a single other answer is far more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Two programs on the same documents.

    Attributes:
        num_items: Documents that both answered.
        num_other_prompts: Of them, those with another prompt; nothing else is comparable if any.
        max_difference: Largest |difference| in log-likelihood, nats; None for generation. Of a
            whole text it is per token: the harness sums thousands of them in float32.
        num_same_answers: Documents with the same pick, or the same extracted answers.
        num_answers: Documents that have an answer; a whole text has none.
        score_differences: Metric as the harness names it → ours minus theirs, of each task.
    """

    num_items: int
    num_other_prompts: int
    max_difference: float | None
    num_same_answers: int
    num_answers: int
    score_differences: Mapping[str, float]

    @property
    def max_score_difference(self) -> float:
        """Largest of all differences between two scores."""
        values = [abs(value) for value in self.score_differences.values()]
        return max(values, key=_nan_last, default=0.0)

    @property
    def has_equal_scores(self) -> bool:
        """Whether every score is the same."""
        return self.max_score_difference <= SCORE_TOLERANCE


def compare_answers(
    items: Mapping[str, Sequence[ItemRecord]],
    scores: Mapping[str, TaskScore],
    harness: Mapping[str, Any],
) -> Agreement:
    """Compare tasks by name with the harness's `samples` and `scores` of the same tasks.

    Raises:
        BenchError: one side lacks a task or a document of the other.
    """
    samples: Mapping[str, Sequence[Mapping[str, Any]]] = harness["samples"]
    if items.keys() != samples.keys():
        raise BenchError(
            f"expected the same tasks on both sides, found {', '.join(sorted(items))} "
            f"and {', '.join(sorted(samples))}"
        )
    differences: list[float] = []
    num_other = num_same = num_answers = num_items = 0
    for task, ours in items.items():
        theirs = {sample["doc_id"]: sample for sample in samples[task]}
        if theirs.keys() != {item.doc_id for item in ours}:
            raise BenchError(
                f"expected the same documents of {task} on both sides, found {len(ours)} "
                f"and {len(theirs)}"
            )
        for item in ours:
            sample = theirs[item.doc_id]
            num_items += 1
            num_other += sample["prompt_hash"] != item.prompt_hash
            if item.loglikelihoods is not None:
                pairs = zip(item.loglikelihoods, sample["loglikelihoods"], strict=True)
                size = 1 if item.text_size is None else sum(item.num_tokens)
                differences += [abs(one - other) / size for one, other in pairs]
            same = _is_same_answer(item, sample)
            num_answers += same is not None
            num_same += bool(same)
    return Agreement(
        num_items=num_items,
        num_other_prompts=num_other,
        max_difference=max(differences, key=_nan_last, default=None),
        num_same_answers=num_same,
        num_answers=num_answers,
        score_differences=_score_differences(scores, harness["scores"]),
    )


def _is_same_answer(item: ItemRecord, sample: Mapping[str, Any]) -> bool | None:
    if item.response is not None:
        shared = item.filtered.keys() & sample["filtered"].keys()
        return all(item.filtered[name] == sample["filtered"][name] for name in shared)
    if item.text_size is not None or item.loglikelihoods is None:
        return None
    theirs = sample["loglikelihoods"]
    return bool(item.pick == theirs.index(max(theirs)))


def _score_differences(
    scores: Mapping[str, TaskScore], harness: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    found = {}
    for task, score in scores.items():
        for key, metric in score.metrics.items():
            name, _, filter_name = key.partition(",")
            named = f"{HARNESS_METRICS.get(name, name)},{filter_name or NO_FILTER}"
            theirs = harness.get(task, {}).get(named)
            if isinstance(theirs, int | float):
                ours = math.nan if metric.value is None else metric.value
                found[f"{task} {named}"] = ours - theirs
    return found


def _nan_last(value: float) -> tuple[bool, float]:
    """Order NaN behind every number, so that it is the largest difference."""
    return math.isnan(value), value

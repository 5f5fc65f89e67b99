"""Scores of tasks and groups are the stated means, with intervals that hold what they promise."""

import dataclasses
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, norm, t

from llmbench.bench.accuracy.aggregate import (
    GroupScore,
    TaskScore,
    score_group,
    score_groups,
    score_task,
)
from llmbench.bench.accuracy.intervals import (
    macro_f1,
    macro_f1_interval,
    mean_interval,
    ratio_interval,
    standard_error,
    wilson_interval,
)
from llmbench.bench.accuracy.items import ItemRecord
from llmbench.bench.accuracy.metric_scores import MetricScore, mean, weighted_perplexity
from llmbench.bench.accuracy.scoring import score_choices
from llmbench.bench.accuracy.task import Task, TaskGroup
from llmbench.bench.accuracy.task_catalog import load_tasks
from llmbench.bench.errors import BenchError
from llmbench.bench.strict_json import dumps, loads


def task_named(name: str) -> Task:
    (task,) = load_tasks([name]).tasks
    return task


def item(task: str, doc_id: int, **fields: Any) -> ItemRecord:
    fields.setdefault("gold", 0)
    return ItemRecord(
        task=task, doc_id=doc_id, key="", doc_hash="", prompt_hash="", target_hash="", **fields
    )


def answered(task: Task, num_right: int, n: int, **fields: Any) -> TaskScore:
    """A task of which so many of n items are right, by every metric."""
    items = [
        item(
            task.name,
            index,
            metrics={name: float(index < num_right) for name in ("acc", "acc_norm", "mc2")},
            pick=0 if index < num_right else 1,
            **fields,
        )
        for index in range(n)
    ]
    return score_task(task, items)


def group_of(name: str, members: list[str], weighting: Any = "items", metric: Any = "acc") -> Any:
    return TaskGroup(
        name=name,
        alias=name,
        summary="",
        members=tuple(members),
        metric=metric,
        weighting=weighting,
        version=1,
    )


class TestIntervals:
    """Each interval against scipy, a closed form, or brute force."""

    @given(n=st.integers(1, 300), data=st.data())
    def test_wilson_is_scipys(self, n: int, data: st.DataObject) -> None:
        k = data.draw(st.integers(0, n))
        wanted = binomtest(k, n).proportion_ci(method="wilson")
        assert wilson_interval(k, n) == pytest.approx((wanted.low, wanted.high), abs=1e-12)

    @given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
    def test_standard_error_is_sample_deviation_over_root_n(self, values: list[float]) -> None:
        wanted = statistics.stdev(values) / math.sqrt(len(values))
        assert standard_error(values) == pytest.approx(wanted, abs=1e-12)

    def test_one_item_has_no_standard_error(self) -> None:
        assert standard_error([1.0]) is None

    def test_mean_interval_is_about_the_normal_one_for_many_values(self) -> None:
        values = list(np.random.default_rng(1).random(2000))
        half = norm.ppf(0.975) * (standard_error(values) or 0)
        low, high = mean_interval(values) or (0, 0)
        assert low == pytest.approx(np.mean(values) - half, abs=0.1 * half)
        assert high == pytest.approx(np.mean(values) + half, abs=0.1 * half)

    def test_jackknife_leaves_each_unit_out_once(self) -> None:
        sums, weights = [3.0, 5.0, 1.0, 8.0], [2.0, 4.0, 1.0, 3.0]
        without = [(sum(sums) - a) / (sum(weights) - b) for a, b in zip(sums, weights, strict=True)]
        centre = statistics.fmean(without)
        stderr = math.sqrt(3 / 4 * sum((value - centre) ** 2 for value in without))
        half = t.ppf(0.975, 3) * stderr
        assert ratio_interval(sums, weights) == pytest.approx((1.7 - half, 1.7 + half))

    def test_jackknife_of_equal_weights_is_students_interval(self) -> None:
        sums = [3.0, 5.0, 1.0, 8.0, 2.0]
        half = t.ppf(0.975, 4) * (standard_error(sums) or 0)
        assert ratio_interval(sums, [1.0] * 5) == pytest.approx((3.8 - half, 3.8 + half))

    def test_one_text_has_no_interval(self) -> None:
        assert ratio_interval([1.0], [2.0]) is None

    @pytest.mark.parametrize(
        ("golds", "picks", "value"),
        [
            ([0, 0, 1, 1], [0, 1, 1, 1], (2 / 3 + 4 / 5) / 2),
            ([0, 1, 0, 1], [0, 0, 0, 0], (2 / 3 + 0) / 2),
            ([0, 0, 0], [0, 0, 0], 1.0),  # a label that nobody uses does not count
            ([0, 1, 2], [0, 1, 3], (1 + 1 + 0 + 0) / 4),
        ],
    )
    def test_macro_f1_is_the_mean_over_labels(
        self, golds: list[int], picks: list[int], value: float
    ) -> None:
        assert macro_f1(golds, picks) == pytest.approx(value)

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=25))
    def test_macro_f1_follows_from_precision_and_recall(self, pairs: list[tuple[int, int]]) -> None:
        scores = []
        for label in {label for pair in pairs for label in pair}:
            hits = sum(gold == pick == label for gold, pick in pairs)
            asked = sum(gold == label for gold, _ in pairs)
            given_ = sum(pick == label for _, pick in pairs)
            precision, recall = hits / given_ if given_ else 0, hits / asked if asked else 0
            both = precision + recall
            scores.append(2 * precision * recall / both if both else 0)
        golds, picks = zip(*pairs, strict=True)
        assert macro_f1(golds, picks) == pytest.approx(statistics.fmean(scores))

    def test_macro_f1_interval_is_what_resampled_items_give(self) -> None:
        rng = np.random.default_rng(3)
        golds = rng.integers(0, 2, 200)
        picks = np.where(rng.random(200) < 0.7, golds, 1 - golds)
        drawn = [rng.integers(0, 200, 200) for _ in range(2000)]
        scores = [macro_f1(golds[rows].tolist(), picks[rows].tolist()) for rows in drawn]
        wanted = np.quantile(scores, [0.025, 0.975])
        found = macro_f1_interval(golds.tolist(), picks.tolist())
        assert found == pytest.approx(tuple(wanted), abs=0.015)
        assert macro_f1_interval([0] * 5, [0] * 5) is None


class TestTask:
    """One task's items."""

    def test_share_of_right_answers(self) -> None:
        score = answered(task_named("arc_easy"), 90, 120)
        acc = score.metrics["acc"]
        assert (acc.value, acc.n, acc.interval, acc.unit) == (0.75, 120, "wilson", "share")
        assert acc.stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 119))
        assert (acc.low, acc.high) == wilson_interval(90, 120)
        assert acc.note == ""
        assert score.flags == ()

    def test_probability_metrics_are_bootstrapped(self) -> None:
        task = task_named("truthfulqa_mc2")
        values = [0.1 + 0.008 * index for index in range(100)]
        score = score_task(
            task,
            [item(task.name, i, metrics={"mc2": value}) for i, value in enumerate(values)],
        )
        assert score.primary.value == pytest.approx(statistics.fmean(values))
        assert score.primary.interval == "bootstrap"
        assert (score.primary.low, score.primary.high) == mean_interval(values)

    def test_invalid_items_are_left_out_counted_and_flagged(self) -> None:
        task = task_named("truthfulqa_mc1")
        logs = [[math.nan, -5.0], [-5.0, -1.0], [-1.0, -5.0], [-1.0, -5.0]]
        items = []
        for index, row in enumerate(logs):
            worth = score_choices(row, ["a", "b"], 0, ("acc",))
            items.append(
                item(
                    task.name,
                    index,
                    metrics=worth.metrics,
                    pick=worth.pick,
                    is_tied=worth.is_tied,
                    invalid=worth.invalid,
                )
            )
        score = score_task(task, items)
        assert score.primary.value == pytest.approx(2 / 3)
        assert (score.num_items, score.num_invalid, score.primary.n) == (4, 1, 3)
        assert "1 of 4 items could not be scored" in score.flags[0]
        assert "nan" in score.flags[0]

    def test_task_without_a_valid_item_has_no_score_instead_of_nan(self) -> None:
        task = task_named("arc_easy")
        metrics = {"acc": 0.0, "acc_norm": 0.0}
        score = score_task(task, [item(task.name, 0, metrics=metrics, invalid="NaN")])
        assert score.primary.value is None
        assert score.primary.note == "no items"
        assert json.loads(dumps(score.to_record()))["metrics"][task.primary_metric]["value"] is None

    @pytest.mark.parametrize(("num_tied", "is_flagged"), [(0, False), (10, False), (11, True)])
    def test_more_than_a_tenth_of_ties_is_flagged(self, num_tied: int, is_flagged: bool) -> None:
        task = task_named("arc_easy")
        items = [
            item(task.name, i, metrics={"acc": 1.0, "acc_norm": 1.0}, is_tied=i < num_tied)
            for i in range(100)
        ]
        score = score_task(task, items)
        assert score.num_tied == num_tied
        assert bool(score.flags) == is_flagged

    @pytest.mark.parametrize(
        ("num_items", "num_tied", "is_flagged"),
        [(12, 12, True), (29, 14, False), (29, 15, True), (30, 4, True)],
    )
    def test_of_few_items_it_takes_more_than_half(
        self, num_items: int, num_tied: int, is_flagged: bool
    ) -> None:
        task = task_named("arc_easy")
        items = [
            item(task.name, i, metrics={"acc": 1.0, "acc_norm": 1.0}, is_tied=i < num_tied)
            for i in range(num_items)
        ]
        score = score_task(task, items)
        assert score.num_tied == num_tied
        assert bool(score.flags) == is_flagged

    def test_truncated_items_and_shots_are_counted(self) -> None:
        task = task_named("arc_easy")
        items = [
            item(task.name, i, metrics={}, num_truncated_tokens=i, fewshot_ids=(4, 5))
            for i in range(3)
        ]
        score = score_task(task, items)
        assert (score.num_truncated, score.num_shots) == (2, 2)

    @pytest.mark.parametrize(
        ("n", "note"),
        [
            (12, "too few items to compare (12): the interval is 49 points wide"),
            (40, "only 40 items: the interval is 30 points wide"),
            (100, ""),
        ],
    )
    def test_scores_of_few_items_say_so(self, n: int, note: str) -> None:
        score = answered(task_named("arc_easy"), n // 2, n)
        assert score.metrics["acc"].note == note

    def test_kobest_has_the_macro_f1_of_its_picks(self) -> None:
        task = task_named("kobest_boolq")
        golds, picks = [0, 0, 1, 1] * 5, [0, 1, 1, 1] * 5
        items = [
            item(task.name, i, gold=gold, pick=pick, metrics={"acc": float(gold == pick)})
            for i, (gold, pick) in enumerate(zip(golds, picks, strict=True))
        ]
        score = score_task(task, items)
        assert score.metrics["acc"].value == 0.75
        assert score.metrics["f1"].value == pytest.approx((2 / 3 + 4 / 5) / 2)
        assert score.metrics["f1"].stderr is None
        assert score.metrics["f1"].interval == "bootstrap"

    def test_perplexity_weighs_texts_by_their_size(self) -> None:
        task = task_named("wikitext")
        texts = [(-40.0, (10, 50)), (-90.0, (10, 60)), (-3.0, (1, 4))]
        items = [
            item(task.name, i, gold="", loglikelihoods=(log,), text_size=size, metrics={})
            for i, (log, size) in enumerate(texts)
        ]
        score = score_task(task, items)
        word, byte, bits = (
            score.metrics[name] for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        )
        assert word.value == pytest.approx(math.exp(133 / 21))
        assert byte.value == pytest.approx(math.exp(133 / 114))
        assert bits.value == pytest.approx(133 / 114 / math.log(2))
        assert word.stderr is None
        assert not word.higher_is_better
        assert (word.interval, bits.unit) == ("jackknife", "bits/byte")
        low, high = ratio_interval([40, 90, 3], [10, 10, 1]) or (0, 0)
        assert (word.low, word.high) == pytest.approx((math.exp(low), math.exp(high)))
        assert word.note.startswith("too few texts to compare (3)")

    def test_windows_are_weighed_by_their_tokens(self) -> None:
        value, _ = weighted_perplexity([-4.0, -3.0], [4, 1])
        assert value == pytest.approx(4.0551999668446745)  # 7.389 is the mean of means

    def test_generated_answers_have_a_score_for_each_filter(self) -> None:
        task = task_named("gsm8k")
        keys = ("exact_match,strict-match", "exact_match,flexible-extract")
        items = [
            item(
                task.name,
                i,
                gold="1",
                response="",
                metrics={keys[0]: float(i < 2), keys[1]: float(i < 6)},
            )
            for i in range(8)
        ]
        score = score_task(task, items)
        assert [score.metrics[key].value for key in keys] == [0.25, 0.75]
        assert score.primary == score.metrics[task.primary_metric]

    def test_two_items_of_one_document_are_refused(self) -> None:
        task = task_named("arc_easy")
        with pytest.raises(BenchError, match="two of 3"):
            score_task(task, [item(task.name, 3, metrics={})] * 2)

    def test_items_of_another_task_are_refused(self) -> None:
        with pytest.raises(BenchError, match="expected items of arc_easy, found one of piqa"):
            score_task(task_named("arc_easy"), [item("piqa", 0, metrics={})])


class TestGroup:
    """Means over items and over tasks."""

    @pytest.fixture
    def subjects(self) -> dict[str, TaskScore]:
        tasks = [
            dataclasses.replace(task_named("arc_easy"), name=name, primary_metric="acc")
            for name in ("big", "small")
        ]
        sizes = ((90, 100), (1, 10))
        return {
            task.name: answered(task, right, n)
            for task, (right, n) in zip(tasks, sizes, strict=True)
        }

    def test_both_means_have_the_error_of_their_own(self, subjects: dict[str, TaskScore]) -> None:
        score = score_group(group_of("g", ["big", "small"]), subjects)
        assert score.by_items.value == pytest.approx(0.8272727272727273)
        assert score.by_tasks.value == pytest.approx(0.5)
        big, small = (subjects[name].metrics["acc"].stderr or 0 for name in ("big", "small"))
        pooled = math.sqrt((99 * big**2 * 100 + 9 * small**2 * 10) / (110 - 2) / 110)
        assert score.by_items.stderr == pytest.approx(pooled)
        assert score.by_tasks.stderr == pytest.approx(math.sqrt(big**2 + small**2) / 2)
        assert (score.by_items.low, score.by_items.high) == pytest.approx(wilson_interval(91, 110))
        half = norm.ppf(0.975) * (score.by_tasks.stderr or 0)
        assert (score.by_tasks.low, score.by_tasks.high) == pytest.approx((0.5 - half, 0.5 + half))

    def test_weighting_chooses_the_groups_score(self, subjects: dict[str, TaskScore]) -> None:
        for weighting, name in (("items", "by_items"), ("tasks", "by_tasks")):
            score = score_group(group_of("g", ["big", "small"], weighting), subjects)
            assert score.primary is getattr(score, name)

    def test_case_file_holds(self, cases_dir: Path) -> None:
        case = json.loads((cases_dir / "C22_aggregate.json").read_text(encoding="utf-8"))
        task = dataclasses.replace(task_named("arc_easy"), primary_metric="acc")
        scores = {
            one["name"]: answered(
                dataclasses.replace(task, name=one["name"]), one["correct"], one["n"]
            )
            for one in case["mmlu_subjects"]
        }
        score = score_group(group_of("mmlu", list(scores)), scores)
        expected = case["expect"]
        assert score.by_items.value == pytest.approx(expected["mmlu_acc_over_questions"])
        assert score.by_tasks.value == pytest.approx(expected["plain_mean_of_subjects"])

    def test_mmlu_is_the_mean_of_its_subjects_and_of_its_questions(self) -> None:
        selection = load_tasks(["mmlu"])
        tasks = {
            task.name: answered(task, 1 + index % 4, 4 + index % 3)
            for index, task in enumerate(selection.tasks)
        }
        score = score_groups(selection.groups, tasks)["mmlu"]
        assert len(score.tasks) == 57
        right = sum(1 + index % 4 for index in range(57))
        assert score.by_items.value == pytest.approx(right / score.num_items)
        assert score.by_tasks.value == pytest.approx(
            statistics.fmean((1 + index % 4) / (4 + index % 3) for index in range(57))
        )

    def test_open_llm_v1_is_the_plain_mean_of_six_numbers(self) -> None:
        selection = load_tasks(["open-llm-v1"])
        tasks = {}
        for index, task in enumerate(selection.tasks):
            metrics = dict.fromkeys(("acc", "acc_norm", "mc2", "exact_match,strict-match"), 0.0) | {
                task.primary_metric: float(index % 2)
            }
            tasks[task.name] = score_task(
                task,
                [
                    item(task.name, 0, gold=0, metrics=metrics),
                    item(task.name, 1, gold=0, metrics=metrics),
                ],
            )
        groups = score_groups(selection.groups, tasks)
        score = groups["open-llm-v1"]
        subjects = [tasks[name].primary.value for name in groups["mmlu"].tasks]
        others = [
            tasks[name].primary.value
            for name in ("arc_challenge", "hellaswag", "truthfulqa_mc2", "winogrande", "gsm8k")
        ]
        assert score.weighting == "tasks"
        assert len(score.members) == 6
        assert len(score.tasks) == 62
        values = [value for value in others if value is not None]
        wanted = (sum(values) + statistics.fmean(v for v in subjects if v is not None)) / 6
        assert score.primary.value == pytest.approx(wanted)

    def test_task_in_two_subgroups_counts_once_among_items(
        self, subjects: dict[str, TaskScore]
    ) -> None:
        groups = [
            group_of("a", ["big"]),
            group_of("b", ["big", "small"]),
            group_of("top", ["a", "b"], "tasks"),
        ]
        score = score_groups(groups, subjects)["top"]
        assert score.num_items == 110
        assert score.by_items.value == pytest.approx(91 / 110)
        assert score.by_tasks.value == pytest.approx((0.9 + 0.5) / 2)

    def test_group_without_spread_claims_no_certainty(self) -> None:
        task = dataclasses.replace(task_named("arc_easy"), primary_metric="acc")
        names = ["a", "b"]
        scores = {name: answered(dataclasses.replace(task, name=name), 5, 5) for name in names}
        score = score_group(group_of("g", names), scores)
        assert score.by_tasks.low is None
        assert (score.by_items.low or 1) < 0.75

    def test_group_has_no_score_while_a_member_has_none(
        self, subjects: dict[str, TaskScore]
    ) -> None:
        empty = dataclasses.replace(subjects["small"], metrics={"acc": mean([])})
        score = score_group(group_of("g", ["big", "small"]), {**subjects, "small": empty})
        assert score.primary.value is None
        assert score.primary.note == "not every member has a score"

    def test_flags_of_members_are_the_groups(self, subjects: dict[str, TaskScore]) -> None:
        flagged = dataclasses.replace(subjects["small"], flags=("3 ties",), num_invalid=2)
        score = score_group(group_of("g", ["big", "small"]), {**subjects, "small": flagged})
        assert score.flags == ("small: 3 ties",)
        assert score.num_invalid == 2

    def test_missing_member_is_named(self, subjects: dict[str, TaskScore]) -> None:
        with pytest.raises(BenchError, match="expected a score of other, a member of g"):
            score_group(group_of("g", ["big", "other"]), subjects)

    def test_member_without_the_metric_is_named(self, subjects: dict[str, TaskScore]) -> None:
        with pytest.raises(BenchError, match="expected `f1` of every task in g; big has acc"):
            score_group(group_of("g", ["big"], metric="f1"), subjects)

    @given(st.lists(st.lists(st.booleans(), min_size=2, max_size=9), min_size=2, max_size=5))
    def test_item_mean_is_that_of_all_items_in_one_list(self, answers: list[list[bool]]) -> None:
        task = dataclasses.replace(task_named("arc_easy"), primary_metric="acc")
        scores = {}
        for index, rights in enumerate(answers):
            name = f"t{index}"
            items = [item(name, i, metrics={"acc": float(right)}) for i, right in enumerate(rights)]
            scores[name] = score_task(dataclasses.replace(task, name=name), items)
        score = score_group(group_of("g", list(scores)), scores)
        every = list(itertools.chain(*answers))
        assert score.by_items.value == pytest.approx(statistics.fmean(every))
        assert score.by_items.n == len(every)


def test_records_are_strict_json_and_come_back_whole() -> None:
    task = dataclasses.replace(task_named("kobest_boolq"), primary_metric="acc")
    score = answered(task, 3, 9)
    group = score_group(group_of("g", [task.name], "tasks"), {task.name: score})
    assert TaskScore.from_record(loads(dumps(score.to_record()))) == score
    assert GroupScore.from_record(loads(dumps(group.to_record()))) == group
    metric = score.metrics["f1"]
    assert MetricScore.from_record(loads(dumps(metric.to_record()))) == metric

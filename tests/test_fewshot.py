"""Draws of shots: the harness's, question for question, whatever part of them is asked."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbench.bench.accuracy.fewshot import choose_num_fewshot, draw_shots
from llmbench.bench.accuracy.task_catalog import load_tasks
from llmbench.bench.errors import BenchConfigError, WorkloadError


def harness_draws(
    docs: list[Any], pool: list[Any], count: int, seed: int, excludes: bool
) -> list[list[Any]]:
    """The harness's sampler, restated: one generator, rows instead of positions."""
    rng = Random(seed)
    draws = []
    for doc in docs:
        if excludes:
            drawn = [row for row in rng.sample(pool, count + 1) if row != doc][:count]
            if len(drawn) < count:
                drawn = rng.sample([row for row in pool if row != doc], count)
        else:
            drawn = rng.sample(pool, count)
        draws.append(drawn)
    return draws


def rows(values: list[int]) -> list[dict[str, int]]:
    return [{"value": value} for value in values]


@given(
    values=st.lists(st.integers(0, 30), min_size=12, max_size=60),
    count=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    excludes=st.booleans(),
)
def test_draws_are_the_harness_s(values: list[int], count: int, seed: int, excludes: bool) -> None:
    pool = rows([*values, 100, 101, 102, 103, 104])
    found = draw_shots(pool, pool, count, seed=seed, must_exclude_doc=excludes)
    drawn = [[pool[index] for index in indices] for indices in found]
    assert drawn == harness_draws(pool, pool, count, seed, excludes)
    if excludes:
        assert all(doc not in shots for doc, shots in zip(pool, drawn, strict=True))


def test_draws_of_the_first_documents_do_not_depend_on_the_rest() -> None:
    docs, pool = rows(list(range(50))), rows(list(range(100, 140)))
    assert draw_shots(docs, pool, 5, seed=1)[:7] == draw_shots(docs[:7], pool, 5, seed=1)


def test_every_document_has_shots_of_its_own_and_the_seed_changes_them() -> None:
    docs, pool = rows(list(range(20))), rows(list(range(100, 200)))
    first = draw_shots(docs, pool, 3, seed=1234)
    assert len(set(first)) == len(docs)
    assert all(a != b for a, b in zip(first, draw_shots(docs, pool, 3, seed=1235), strict=True))


def test_first_rows_are_taken_in_order_by_first_n() -> None:
    docs, pool = rows([7, 0]), rows([0, 1, 2, 3])
    assert draw_shots(docs, pool, 2, seed=1, sampler="first_n") == [(0, 1), (0, 1)]
    found = draw_shots(docs, pool, 2, seed=1, sampler="first_n", must_exclude_doc=True)
    assert found == [(0, 1), (1, 2)]


def test_no_shots_need_no_pool() -> None:
    assert draw_shots(rows([1, 2]), [], 0, seed=1) == [(), ()]


@pytest.mark.parametrize(("excludes", "needed"), [(False, 5), (True, 6)])
def test_pool_that_is_too_small_is_refused(excludes: bool, needed: int) -> None:
    docs = rows([1])
    pool = rows(list(range(10, 10 + needed)))
    assert draw_shots(docs, pool, 5, seed=1, must_exclude_doc=excludes)
    with pytest.raises(WorkloadError, match=f"need {needed} rows, the pool has {needed - 1}"):
        draw_shots(docs, pool[:-1], 5, seed=1, must_exclude_doc=excludes)


def test_pool_of_copies_of_the_question_is_refused() -> None:
    with pytest.raises(WorkloadError, match="2 shots asked for, the pool has 1 rows other"):
        draw_shots(rows([1]), rows([1, 1, 1, 2]), 2, seed=1, must_exclude_doc=True)


@pytest.mark.parametrize(
    ("name", "asked", "count"),
    [
        ("arc_challenge", None, 25),
        ("arc_challenge", 3, 3),
        ("arc_challenge", 0, 0),
        ("arc_easy", None, 0),
        ("arc_easy", 4, 4),
        ("truthfulqa_mc2", None, 0),
        ("truthfulqa_mc2", 0, 0),
    ],
)
def test_asked_number_of_shots_goes_before_the_task_s(
    name: str, asked: int | None, count: int
) -> None:
    (task,) = load_tasks([name]).tasks
    assert choose_num_fewshot(task, asked) == (count, None)


@pytest.mark.parametrize("name", ["truthfulqa_mc1", "truthfulqa_mc2", "wikitext"])
def test_shots_for_a_task_that_takes_none_are_ignored_with_notice(name: str) -> None:
    (task,) = load_tasks([name]).tasks
    assert choose_num_fewshot(task, 5) == (
        0,
        f"{name} takes no shots by definition: 5 asked for, ignored",
    )


def test_negative_number_of_shots_is_refused() -> None:
    (task,) = load_tasks(["piqa"]).tasks
    with pytest.raises(BenchConfigError, match="at least 0, found -1"):
        choose_num_fewshot(task, -1)

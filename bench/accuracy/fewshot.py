"""Which solved examples stand in front of each question: the harness's draws, made all at once.

lm-evaluation-harness draws from one `random.Random(seed)` a task, question after question, so the
shots of a question depend on how many came before it. Here all draws are made up front for the
whole list of questions: a limit, a resumed run or a share of the questions then sees the same
shots as a whole run. Drawing positions takes the same numbers from the generator as drawing rows.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from llmbench.bench.accuracy.task import Sampler, Task
from llmbench.bench.errors import BenchConfigError, WorkloadError

DEFAULT_SEED = 1234  # the harness's seed of shots


def choose_num_fewshot(task: Task, asked: int | None) -> tuple[int, str | None]:
    """Return the number of shots, and a notice if what was asked for does not apply."""
    if asked is not None and asked < 0:
        raise BenchConfigError(f"the number of shots must be at least 0, found {asked}")
    if task.has_fixed_shots:
        notice = f"{task.name} takes no shots by definition: {asked} asked for, ignored"
        return 0, notice if asked else None
    return (task.num_fewshot or 0) if asked is None else asked, None


def draw_shots(
    docs: Sequence[Mapping[str, Any]],
    pool: Sequence[Mapping[str, Any]],
    num_fewshot: int,
    *,
    seed: int,
    sampler: Sampler = "default",
    must_exclude_doc: bool = False,
    where: str = "the pool",
) -> list[tuple[int, ...]]:
    """Return for each document the positions in `pool` of its shots, in the order of the prompt.

    Raises:
        WorkloadError: the pool is too small.
    """
    if num_fewshot == 0:
        return [()] * len(docs)
    needed = num_fewshot + must_exclude_doc
    if len(pool) < needed:
        spare = ", and one to spare for the question itself," if must_exclude_doc else ""
        raise WorkloadError(
            f"{num_fewshot} shots{spare} need {needed} rows, {where} has {len(pool)}"
        )
    rng = Random(seed)
    if sampler == "first_n" and not must_exclude_doc:
        return [tuple(range(num_fewshot))] * len(docs)
    draws = []
    positions = range(len(pool))
    for doc in docs:
        if sampler == "first_n":
            drawn = [index for index in positions if pool[index] != doc]
        elif must_exclude_doc:
            drawn = [index for index in rng.sample(positions, needed) if pool[index] != doc]
            if len(drawn) < num_fewshot:  # the document stands in the pool more than once
                others = [index for index in positions if pool[index] != doc]
                drawn = rng.sample(others, min(num_fewshot, len(others)))
        else:
            drawn = rng.sample(positions, num_fewshot)
        if len(drawn) < num_fewshot:
            raise WorkloadError(
                f"{num_fewshot} shots asked for, {where} has {len(drawn)} rows other than the "
                f"question"
            )
        draws.append(tuple(drawn[:num_fewshot]))
    return draws

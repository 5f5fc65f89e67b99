"""Do an evaluation's answers depend on how the engine runs it? The same questions, run five ways.

A score must be the model's and not the batch's: which requests share a step, where a prompt is cut
into chunks, whether its beginning comes from the prefix cache. So the same documents are asked as
`llmbench eval` does it, one request at a time, in short chunks, without a prefix cache, and every
second document before the others. In float32 log-likelihoods agree to rounding (1e-5 nats). In
bfloat16 a sum in another order may round another way, and the share of documents with the same
answer says how much of a score is arithmetic.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.bench.accuracy.eval_config import PERPLEXITY
from llmbench.bench.errors import BenchConfigError
from llmbench.bench.studies.study import (
    Conclusion,
    Lab,
    ModelSettings,
    Row,
    Study,
    require_positive,
)

if TYPE_CHECKING:
    from llmbench.bench.accuracy.eval_config import EvalConfig
    from llmbench.bench.accuracy.items import ItemRecord

AS_IT_RUNS = "as it runs"
HALVES = "in two halves"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    AS_IT_RUNS: {},
    "one at a time": {"max_num_seqs": 1},
    "short chunks": {"max_num_batched_tokens": 48, "max_num_seqs": 16},
    "no prefix cache": {"prefix_cache": "none"},
    HALVES: {},
}
"""Engine settings by way of running; what they leave open is `llmbench eval`'s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalInvarianceSettings(ModelSettings):
    """What is asked.

    Attributes:
        tasks: Names of tasks and groups.
        limit: First documents of each task.
        data_dir: Folder of local data.
        include: Task file of the user's own, or a folder of them.
    """

    tasks: tuple[str, ...] = ("arc_challenge", "winogrande", "gsm8k")
    limit: int = 16
    data_dir: str = "data"
    include: str | None = None

    def __post_init__(self) -> None:
        require_positive(self, "limit")
        if not self.tasks:
            raise BenchConfigError("expected at least one task, found none")
        if PERPLEXITY in self.tasks:
            raise BenchConfigError(f"tasks are asked here, and {PERPLEXITY} of a text is none")

    @property
    def eval_config(self) -> "EvalConfig":
        """The documents and their prompts."""
        from llmbench.bench.accuracy.eval_config import EvalConfig

        return EvalConfig(
            tasks=self.tasks,
            limits=self.limit,
            data_dir=Path(self.data_dir).expanduser(),
            include=() if self.include is None else (Path(self.include).expanduser(),),
        )


def measure(settings: EvalInvarianceSettings, lab: Lab) -> Iterator[Row]:
    """Yield a row for each task and way of running it."""
    from llmbench.bench.accuracy.eval_plan import prepare

    prepare(settings.eval_config)  # what cannot be asked fails before a model is loaded
    expected: dict[str, list[ItemRecord]] = {}
    for done, variant in enumerate(VARIANTS):
        lab.progress(variant, done, len(VARIANTS))
        folder = lab.folder / variant.replace(" ", "-")
        seconds, items = answer(settings, variant, folder)
        expected = expected or items
        for task, found in items.items():
            yield {
                "task": task,
                "variant": variant,
                "num_items": len(found),
                "duration_s": seconds,
                **compare(expected[task], found),
            }


def answer(
    settings: EvalInvarianceSettings, variant: str, folder: Path
) -> "tuple[float, dict[str, list[ItemRecord]]]":
    """Ask all; returns the seconds of asking with a loaded model, and the items by task."""
    import time

    from llmbench.bench.accuracy.engine_model import EngineModel
    from llmbench.bench.accuracy.eval_plan import prepare
    from llmbench.bench.accuracy.evaluation import evaluate
    from llmbench.bench.accuracy.items import items_path, read_items

    shards: tuple[tuple[int, int] | None, ...] = ((1, 2), (0, 2)) if variant == HALVES else (None,)
    parts = [prepare(dataclasses.replace(settings.eval_config, shard=shard)) for shard in shards]
    model = EngineModel(settings.engine(**VARIANTS[variant]))
    try:
        model.load()
        model.identity  # noqa: B018  (reads tokenizer and digests, once)
        started = time.perf_counter()
        for number, prepared in enumerate(parts):
            evaluate(prepared, model, folder / str(number))
        seconds = time.perf_counter() - started
    finally:
        model.close()
    items: dict[str, list[ItemRecord]] = {}
    for number, prepared in enumerate(parts):
        for each in prepared.tasks:
            name = each.task.name
            items.setdefault(name, []).extend(read_items(items_path(folder / str(number), name)))
    return seconds, {
        name: sorted(found, key=lambda item: item.doc_id) for name, found in items.items()
    }


def compare(expected: "Sequence[ItemRecord]", found: "Sequence[ItemRecord]") -> Row:
    """How far answers to the same documents are apart; a text's log-likelihood is per token.

    Where one side is no finite number and the other is, there is no distance: these are counted.
    """
    differences: list[float] = []
    num_same = num_answers = num_unlike = 0
    for one, other in zip(expected, found, strict=True):
        assert (one.doc_id, one.prompt_hash) == (other.doc_id, other.prompt_hash)
        if one.loglikelihoods is not None and other.loglikelihoods is not None:
            size = 1 if one.text_size is None else sum(one.num_tokens)
            for a, b in zip(one.loglikelihoods, other.loglikelihoods, strict=True):
                if a == b or (math.isnan(a) and math.isnan(b)):
                    differences.append(0.0)
                elif math.isfinite(a) and math.isfinite(b):
                    differences.append(abs(a - b) / size)
                else:
                    num_unlike += 1
        if one.response is not None or one.pick is not None:
            num_answers += 1
            num_same += (one.response, one.pick) == (other.response, other.pick)
    return {
        "num_answers": num_answers,
        "num_same_answers": num_same,
        "max_logprob_difference": max(differences, default=None),
        "num_logprobs": len(differences) + num_unlike,
        "num_equal_logprobs": differences.count(0.0),
        "num_unlike_logprobs": num_unlike,
    }


def conclude(rows: Sequence[Row]) -> Conclusion:
    """A line a way of running, over all tasks."""
    table = [_table_row(variant, rows) for variant in VARIANTS]
    others = [row for row in rows if row["variant"] != AS_IT_RUNS]
    answers, logprobs = _sum(others, "num_answers"), _sum(others, "num_logprobs")
    same, unlike = _sum(others, "num_same_answers"), _sum(others, "num_unlike_logprobs")
    apart = _known(others, "max_logprob_difference")
    parts = []
    if answers:
        parts.append(f"{same:,} of {answers:,} answers are the same")
    if unlike:
        parts.append(f"{unlike:,} of {logprobs:,} log-likelihoods are not finite on one side alone")
    if apart:
        parts.append(
            f"log-likelihoods are at most {max(apart):.1e} nats apart"
            if max(apart) > 0
            else "finite log-likelihoods are equal to the last bit"
        )
    return Conclusion(
        finding=f"{table[0]['num_items']} documents, run {len(table)} ways: {', '.join(parts)}",
        table=table,
        summary={
            "same_answer_share": same / answers if answers else None,
            "max_logprob_difference": max(apart, default=None),
            "num_unlike_logprobs": unlike,
        },
        notes=(f"compared with {AS_IT_RUNS!r}; every way asks the same prompts",),
    )


def _table_row(variant: str, rows: Sequence[Row]) -> Row:
    here = [row for row in rows if row["variant"] == variant]
    answers, logprobs = _sum(here, "num_answers"), _sum(here, "num_logprobs")
    apart = _known(here, "max_logprob_difference")
    return {
        "variant": variant,
        "num_items": _sum(here, "num_items"),
        "same_answer_share": _sum(here, "num_same_answers") / answers if answers else None,
        "equal_logprob_share": _sum(here, "num_equal_logprobs") / logprobs if logprobs else None,
        "largest_difference": f"{max(apart):.1e} nats" if apart else "none",
        "duration_s": here[0]["duration_s"],
    }


def _sum(rows: Sequence[Row], name: str) -> int:
    return sum(int(row[name]) for row in rows)


def _known(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row[name] is not None]


STUDY = Study(
    name="eval-invariance",
    settings_type=EvalInvarianceSettings,
    measure=measure,
    conclude=conclude,
)

"""What does a step cost without a model? The engine's own work, part by part.

With a model that computes nothing (engine/models/null_model.py) a step is what the engine adds to
every token: `schedule` deals out tokens and blocks, `run` builds the batch and samples, `update`
appends, checks for the end and frees. All sequences decode, the state in which an engine spends
its life. What this costs, a real step pays too, whatever the model.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmbench.bench.studies.study import (
    Conclusion,
    Lab,
    Row,
    Study,
    require_positive,
    time_text,
)

if TYPE_CHECKING:
    from llmbench.engine.models.loader import LoadedModel

PARTS = ("schedule", "run", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCostSettings:
    """Sizes of the batch, and the steps to time.

    Attributes:
        vocab_size: Logits of a row that the sampler searches; a model's own would make this a
            measurement of memory bandwidth.
    """

    num_seqs: tuple[int, ...] = (1, 8, 64)
    num_steps: int = 500
    num_warmup_steps: int = 50
    input_len: int = 128
    vocab_size: int = 64
    num_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(
            self, "num_seqs", "num_steps", "num_warmup_steps", "input_len", "vocab_size"
        )


def measure(settings: StepCostSettings, lab: Lab) -> Iterator[Row]:
    """Yield a row for each batch size."""
    for done, num_seqs in enumerate(settings.num_seqs):
        lab.progress(f"{num_seqs} sequences", done, len(settings.num_seqs))
        yield _row(settings, num_seqs)


def _row(settings: StepCostSettings, num_seqs: int) -> Row:
    from llmbench.bench.stats import summarize
    from llmbench.engine.config import EngineConfig
    from llmbench.engine.engine_core import EngineCore
    from llmbench.engine.request import SamplingParams

    total = settings.input_len + settings.num_warmup_steps + settings.num_steps + 1
    budget = num_seqs * settings.input_len  # all prompts in the first step
    core = EngineCore(
        EngineConfig(
            model="null",
            num_threads=settings.num_threads,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            num_kv_blocks=num_seqs * -(-total // 16),
            seed=settings.seed,
        ),
        loaded=null_model(settings.vocab_size, max_model_len=total),
    )
    params = SamplingParams(temperature=0.0, max_tokens=total - settings.input_len)
    for index in range(num_seqs):
        prompt = [
            (index + position) % settings.vocab_size for position in range(settings.input_len)
        ]
        (request,) = core.make_requests(prompt, params, f"stream-{index}")
        core.add_request(request)
    gc.collect()
    for _ in range(1 + settings.num_warmup_steps + settings.num_steps):
        core.step()
    records = core.step_records[-settings.num_steps :]
    assert all(record.num_decode_tokens == num_seqs for record in records), "not all decode"
    steps = summarize([record.duration_s for record in records])
    row: Row = {
        "num_seqs": num_seqs,
        "num_steps": len(records),
        "step_p50_s": steps.median,
        "step_mean_s": steps.mean,
        "step_p99_s": steps.p99,
        "step_max_s": steps.max,
    }
    times = {
        "schedule": [record.schedule_s for record in records],
        "run": [record.forward_s for record in records],
        "update": [record.update_s for record in records],
    }
    row |= {f"{part}_p50_s": summarize(times[part]).median for part in PARTS}
    return row


def null_model(vocab_size: int, max_model_len: int) -> "LoadedModel":
    """The model that computes nothing, as the loader would give it."""
    import torch

    from llmbench.engine.models.loader import LoadedModel
    from llmbench.engine.models.null_model import NullModel

    return LoadedModel(
        model=NullModel(vocab_size),
        folder=Path("null"),
        hf_config=None,
        architecture=None,
        checkpoint=None,
        tokenizer=None,
        eos_token_ids=frozenset(),
        max_model_len=max_model_len,
        dtype=torch.float32,
        device=torch.device("cpu"),
        vocab_size=vocab_size,
        hidden_size=1,
        intermediate_size=1,
        kv_bytes_per_token=1,
        weight_bytes=0,
        free_bytes=2**30,
    )


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Say what the largest batch costs, and where."""
    columns = (
        "num_seqs",
        *(f"{part}_p50_s" for part in PARTS),
        "step_p50_s",
        "step_p99_s",
        "step_max_s",
    )
    largest = max(rows, key=lambda row: row["num_seqs"])
    parts = ", ".join(f"{part} {time_text(largest[f'{part}_p50_s'])}" for part in PARTS)
    step_s = largest["step_p50_s"]
    return Conclusion(
        finding=(
            f"a step of {largest['num_seqs']} sequences costs {time_text(step_s)} besides the "
            f"model ({parts}), {time_text(step_s / largest['num_seqs'])} a token"
        ),
        table=[{name: row[name] for name in columns} for row in rows],
        summary={"step_cost_s": step_s, "num_seqs": largest["num_seqs"]},
    )


STUDY = Study(name="step-cost", settings_type=StepCostSettings, measure=measure, conclude=conclude)

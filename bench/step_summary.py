"""What the built-in engine's step records say of a run: KV use and waste, batch size, preemptions.

Means weigh each step by the time it took, so they are means over time and not over steps: a step
that prefills 512 tokens lasts many times longer than one that decodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmbench.engine.step_record import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The steps of one run; None where no step can say."""

    num_steps: int
    num_preemptions: int
    num_prefix_queried_tokens: int
    """Tokens looked up in the prefix cache; 0 where there is none."""
    kv_usage_peak: float | None
    kv_usage_mean: float | None
    """Share of the pool's blocks that sequences hold."""
    kv_waste_mean: float | None
    """Share of held slots without a token: reserved for later, or the rest of a last block."""
    mean_batch_size: float | None
    mean_step_tokens: float | None
    forward_time_share: float | None
    """Share of the steps' time that the model and sampler took; the rest is bookkeeping."""


def step_summary(records: Sequence[StepRecord]) -> StepSummary:
    """Summarize the step records of one run."""
    durations = [record.duration_s for record in records]

    def mean(value: Callable[[StepRecord], float | None]) -> float | None:
        pairs = [
            (number, duration)
            for record, duration in zip(records, durations, strict=True)
            if (number := value(record)) is not None
        ]
        total = sum(duration for _, duration in pairs)
        return sum(number * duration for number, duration in pairs) / total if total > 0 else None

    usages = [usage for record in records if (usage := _kv_usage(record)) is not None]
    busy = sum(durations)
    return StepSummary(
        num_steps=len(records),
        num_preemptions=sum(record.num_preempted for record in records),
        num_prefix_queried_tokens=sum(record.num_prefix_queried_tokens for record in records),
        kv_usage_peak=max(usages, default=None),
        kv_usage_mean=mean(_kv_usage),
        kv_waste_mean=mean(_kv_waste),
        mean_batch_size=mean(lambda record: record.num_seqs),
        mean_step_tokens=mean(lambda record: record.num_prefill_tokens + record.num_decode_tokens),
        forward_time_share=sum(record.forward_s for record in records) / busy if busy else None,
    )


def _kv_usage(record: StepRecord) -> float | None:
    if record.kv_num_blocks == 0:
        return None
    return 1 - record.kv_free_blocks / record.kv_num_blocks


def _kv_waste(record: StepRecord) -> float | None:
    if record.kv_reserved_slots == 0:
        return None
    return record.kv_wasted_slots / record.kv_reserved_slots

"""How many requests does the same KV memory hold? Fixed blocks against reserved stretches.

Nobody knows how long an answer will be. An engine that keeps each sequence's K/V in one stretch has
to reserve it at the start: for the longest sequence of the model, or for the tokens that the
request may generate. Most of that stays empty, and what ends leaves holes that the next request
may not fit into. Fixed-size blocks are taken one by one as a sequence grows, wherever they are free
(Kwon et al. 2023, PagedAttention, section 3.1 and figure 2).

All three run the same requests in the same pool. Requests are stopped at an answer length drawn
beforehand (log-normal, within what they asked for), as an end-of-text token would. Means are over
the time in which memory, and nothing else, kept requests waiting: while prompts come in or the last
answers run out, nobody competes for it. After every step the state of each block goes into a
picture: free, with tokens, or reserved and empty.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from llmbench.bench.studies.prompts import PromptSource
    from llmbench.engine.engine_core import EngineCore
    from llmbench.engine.request import Request
    from llmbench.engine.step_record import StepRecord

VARIANTS: dict[str, dict[str, Any]] = {
    "reserved-model-length": {"kv_manager": "contiguous", "reservation": "max_model_len"},
    "reserved-max-tokens": {"kv_manager": "contiguous", "reservation": "max_tokens"},
    "paged": {"kv_manager": "paged", "prefix_cache": "none"},
}
FREE, FILLED, EMPTY = 0, 1, 2
"""State of a block in the picture: held by nobody, with tokens, reserved without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedVsReservedSettings(ModelSettings):
    """Requests of unpredictable lengths, and the pool that they share.

    Attributes:
        kv_tokens: Tokens that the KV pool holds.
        max_model_len: Longest sequence; what the first variant reserves for each request.
        input_lens: Least and most tokens of a prompt, drawn uniformly.
        max_tokens: What requests ask for, one of these each.
        mean_output_len: Mean of the answer lengths, before they are cut at what was asked for.
    """

    num_prompts: int = 64
    kv_tokens: int = 4096
    max_model_len: int = 1024
    input_lens: tuple[int, int] = (16, 128)
    max_tokens: tuple[int, ...] = (128, 256, 512)
    mean_output_len: int = 64
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_prompts",
            "kv_tokens",
            "max_model_len",
            "input_lens",
            "max_tokens",
            "mean_output_len",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
        )
        least, most = self.input_lens
        if least > most:
            raise BenchConfigError(f"input_lens must be least,most, not {least},{most}")
        if most + max(self.max_tokens) > self.max_model_len:
            raise BenchConfigError(
                f"input_lens up to {most} + max_tokens up to {max(self.max_tokens)} exceed "
                f"max_model_len {self.max_model_len}"
            )
        if self.kv_tokens < self.max_model_len:
            raise BenchConfigError(
                f"kv_tokens {self.kv_tokens} hold no reservation of max_model_len "
                f"{self.max_model_len}"
            )


@dataclass(frozen=True, slots=True)
class _Job:
    prompt: tuple[int, ...]
    max_tokens: int
    output_len: int


def measure(settings: PagedVsReservedSettings, lab: Lab) -> Iterator[Row]:
    """Yield a row for each way of holding KV."""
    from llmbench.bench.studies.prompts import PromptSource
    from llmbench.engine import step_record
    from llmbench.engine.engine_core import EngineCore
    from llmbench.engine.models.loader import load_model

    config = settings.engine(max_model_len=settings.max_model_len)
    lab.note(f"loading {settings.model}")
    loaded = load_model(config)
    source = PromptSource(loaded.tokenizer, loaded.vocab_size, settings.seed)
    jobs = _draw_jobs(settings, source)
    for name, fields in VARIANTS.items():
        core = EngineCore(
            settings.engine(
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                num_kv_blocks=settings.kv_tokens // settings.block_size,
                block_size=settings.block_size,
                **fields,
            ),
            loaded=loaded,
        )
        _serve(core, jobs[:2])  # everything has run once
        core.step_records.clear()
        picture = _Picture()
        stage = f"serving, {name}"
        _serve(core, jobs, picture, functools.partial(_report, lab, stage, len(jobs)))
        picture.save(lab.folder / f"memory-{name}.npz")
        step_record.write_parquet(core.step_records, lab.folder / f"steps-{name}.parquet")
        yield {"variant": name} | _row(settings, core.step_records, jobs, loaded.kv_bytes_per_token)


def _draw_jobs(settings: PagedVsReservedSettings, source: "PromptSource") -> list[_Job]:
    from llmbench.bench.workloads.streams import stream

    lengths = stream(settings.seed, "paged-vs-reserved/lengths")
    least, most = settings.input_lens
    count = settings.num_prompts
    input_lens = lengths.integers(least, most + 1, size=count).tolist()
    asked = lengths.choice(settings.max_tokens, size=count).tolist()
    # Standard deviation 0.8 of the logarithm: most answers short, a few ten times as long.
    spread = 0.8
    drawn = settings.mean_output_len * lengths.lognormal(-spread * spread / 2, spread, size=count)
    prompts = source.draw(input_lens, "paged-vs-reserved")
    return [
        _Job(prompt, max_tokens, min(max(1, round(output_len)), max_tokens))
        for prompt, max_tokens, output_len in zip(prompts, asked, drawn.tolist(), strict=True)
    ]


def _report(lab: Lab, stage: str, total: int, done: int) -> None:
    lab.progress(stage, done, total)


class _Picture:
    """State of each block after each step."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._states: list[Any] = []

    def add(self, core: "EngineCore", requests: "dict[str, Request]") -> None:
        import numpy as np

        state = np.full(core.kv.num_blocks + 1, FREE, dtype=np.uint8)
        for request in requests.values():
            block_ids = np.asarray(core.kv.block_ids(request), dtype=np.int64)
            num_filled = -(-request.num_computed_tokens // core.kv.block_size)
            state[block_ids[:num_filled]] = FILLED
            state[block_ids[num_filled:]] = EMPTY
        record = core.step_records[-1]
        self._times_s.append(record.start_s + record.duration_s)
        self._states.append(state[1:])  # block 0 belongs to nobody

    def save(self, path: Path) -> None:
        """Write `time_s` [steps], from the first step on, and `state` [steps, blocks]."""
        import numpy as np

        times = np.array(self._times_s) - self._times_s[0]
        np.savez_compressed(path, time_s=times, state=np.stack(self._states))


def _serve(
    core: "EngineCore",
    jobs: Sequence[_Job],
    picture: _Picture | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Run all jobs at once; each is stopped when its answer has the length drawn for it."""
    from llmbench.engine.request import SamplingParams

    running: dict[str, Request] = {}
    lengths: dict[str, int] = {}
    for index, job in enumerate(jobs):
        params = SamplingParams(
            temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False
        )
        (request,) = core.make_requests(job.prompt, params, f"job-{index}")
        core.add_request(request)
        running[request.request_id], lengths[request.request_id] = request, job.output_len
    try:
        while core.has_unfinished:
            for output in core.step():
                if output.num_output_tokens >= lengths[output.request_id]:
                    core.abort(output.request_id)
                    del running[output.request_id]
            if picture is not None:
                picture.add(core, running)
            if on_progress is not None:
                on_progress(len(jobs) - len(running))
    finally:
        for request_id in running:
            core.abort(request_id)


def _row(
    settings: PagedVsReservedSettings,
    records: "Sequence[StepRecord]",
    jobs: Sequence[_Job],
    kv_bytes_per_token: int,
) -> Row:
    def is_limited_by_memory(record: "StepRecord") -> bool:
        num_tokens = record.num_prefill_tokens + record.num_decode_tokens
        return (
            record.num_waiting > 0
            and record.num_seqs < settings.max_num_seqs
            and num_tokens < settings.max_num_batched_tokens
        )

    limited = [record for record in records if is_limited_by_memory(record)]
    limited_s = sum(record.duration_s for record in limited)
    counted = limited or list(records)
    counted_s = sum(record.duration_s for record in counted)

    def mean(value: "Callable[[StepRecord], float]") -> float:
        return sum(value(record) * record.duration_s for record in counted) / counted_s

    pool = records[0].kv_num_blocks * settings.block_size
    reserved = mean(lambda record: record.kv_reserved_slots)
    used = mean(lambda record: record.kv_used_slots)
    duration_s = records[-1].start_s + records[-1].duration_s - records[0].start_s
    num_output_tokens = sum(job.output_len for job in jobs)
    return {
        "num_requests": len(jobs),
        "num_output_tokens": num_output_tokens,
        "duration_s": duration_s,
        "output_throughput_tok_s": num_output_tokens / duration_s,
        "largest_batch": max(record.num_seqs for record in records),
        "mean_batch": mean(lambda record: record.num_seqs),
        "memory_limited_s": limited_s,
        "num_preemptions": sum(record.num_preempted for record in records),
        "kv_pool_bytes": pool * kv_bytes_per_token,
        "kv_reserved_mean_bytes": reserved * kv_bytes_per_token,
        "kv_used_mean_bytes": used * kv_bytes_per_token,
        "kv_wasted_mean_bytes": (reserved - used) * kv_bytes_per_token,
        "kv_stranded_mean_bytes": (pool - reserved) * kv_bytes_per_token if limited else 0.0,
        "kv_waste_share": (reserved - used) / reserved,
        "kv_used_share": used / pool,
    }


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Compare paging with both reservations."""
    columns = (
        "variant",
        "kv_reserved_mean_bytes",
        "kv_used_mean_bytes",
        "kv_wasted_mean_bytes",
        "kv_waste_share",
        "kv_stranded_mean_bytes",
        "largest_batch",
        "output_throughput_tok_s",
    )
    by_name = {row["variant"]: row for row in rows}
    whole, asked, paged = (by_name[name] for name in VARIANTS)
    gains = {
        name: paged["output_throughput_tok_s"] / by_name[name]["output_throughput_tok_s"]
        for name in VARIANTS
        if name != "paged"
    }
    finding = (
        f"blocks waste {paged['kv_waste_share']:.0%} of the memory that they hold, reserving for "
        f"what a request asks wastes {asked['kv_waste_share']:.0%} and for the model's length "
        f"{whole['kv_waste_share']:.0%}; the same memory held {paged['largest_batch']} requests at "
        f"once in place of {asked['largest_batch']} and {whole['largest_batch']}, which gave "
        f"{gains['reserved-max-tokens']:.2f} and {gains['reserved-model-length']:.2f} times the "
        "output tokens/s"
    )
    return Conclusion(
        finding=finding,
        table=[{name: row[name] for name in columns} for row in rows],
        summary={
            "throughput_ratio_to_reserved_max_tokens": gains["reserved-max-tokens"],
            "throughput_ratio_to_reserved_model_length": gains["reserved-model-length"],
        },
        notes=tuple(
            f"{row['variant']}: memory never kept a request waiting, so its means are over the "
            "whole run"
            for row in rows
            if not row["memory_limited_s"]
        ),
    )


STUDY = Study(
    name="paged-vs-reserved",
    settings_type=PagedVsReservedSettings,
    measure=measure,
    conclude=conclude,
)

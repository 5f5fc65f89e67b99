"""What does the KV cache save? One stream, with it and without.

Attention needs keys and values of all earlier tokens. Kept, a step computes one token; not kept, a
step computes the whole sequence again, so n tokens cost about n²/2 token computations in place of
n. Both ways run the same prompt to the same length; as a stream of n tokens is the beginning of a
longer one, one run is read off at every length.

The growth exponent is the slope of log(seconds) over log(length), fitted over the lengths from a
quarter of the longest on: for shorter ones the prompt and the fixed cost of a step still count.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmbench.bench.errors import BenchConfigError
from llmbench.bench.studies.study import (
    Conclusion,
    Lab,
    ModelSettings,
    Row,
    Study,
    interleaved,
    median_of,
    require_positive,
    three_digits,
    time_text,
)

if TYPE_CHECKING:
    from llmbench.engine.engine_core import EngineCore

WITH, WITHOUT = "paged", "uncached"
WARMUP_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSettings(ModelSettings):
    """A prompt length, and the output lengths at which the clock is read."""

    input_len: int = 32
    output_lens: tuple[int, ...] = (16, 32, 64, 128, 256)
    repetitions: int = 2

    def __post_init__(self) -> None:
        require_positive(self, "input_len", "output_lens", "repetitions")


def measure(settings: KVCacheSettings, lab: Lab) -> Iterator[Row]:
    """Yield a row for each KV manager, output length and repetition."""
    from llmbench.bench.studies.prompts import PromptSource
    from llmbench.engine.engine_core import EngineCore
    from llmbench.engine.models.loader import load_model

    lengths = sorted(set(settings.output_lens))
    longest = settings.input_len + lengths[-1]
    configs = {
        manager: settings.engine(
            kv_manager=manager,
            prefix_cache="none",
            max_num_seqs=1,
            max_num_batched_tokens=max(512, longest),
            num_kv_blocks=-(-longest // 16) + 1,
        )
        for manager in (WITH, WITHOUT)
    }
    lab.note(f"loading {settings.model}")
    loaded = load_model(configs[WITH])
    if longest > loaded.max_model_len:
        error = BenchConfigError(
            f"input_len {settings.input_len} + output_lens up to {lengths[-1]} exceed the model's "
            f"{loaded.max_model_len} tokens"
        )
        error.add_note("give shorter ones")
        raise error
    cores = {name: EngineCore(config, loaded=loaded) for name, config in configs.items()}
    source = PromptSource(loaded.tokenizer, loaded.vocab_size, settings.seed)
    (prompt,) = source.draw([settings.input_len], "kv-cache")
    for core in cores.values():
        _seconds_by_length(core, prompt, [WARMUP_TOKENS])
    runs = interleaved(list(cores), settings.repetitions)
    for done, (repetition, name) in enumerate(runs):
        lab.progress(f"generating, {name}", done, len(runs))
        for length, seconds in _seconds_by_length(cores[name], prompt, lengths).items():
            yield {
                "kv_manager": name,
                "num_prompt_tokens": settings.input_len,
                "num_output_tokens": length,
                "repetition": repetition,
                "duration_s": seconds,
                "output_throughput_tok_s": length / seconds,
            }


def _seconds_by_length(
    core: "EngineCore", prompt: Sequence[int], lengths: Sequence[int]
) -> dict[int, float]:
    """Seconds from submission to each output length."""
    from llmbench.engine.request import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=lengths[-1], ignore_eos=True, detokenize=False
    )
    (request,) = core.make_requests(prompt, params, "kv-cache")
    seconds = {}
    started = time.perf_counter()
    core.add_request(request)
    try:
        while core.has_unfinished:
            core.step()
            if request.num_output_tokens in lengths:
                seconds[request.num_output_tokens] = time.perf_counter() - started
    finally:
        core.abort(request.request_id)
    return seconds


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Compare the medians at each length, and the growth with length."""
    lengths = sorted({row["num_output_tokens"] for row in rows})
    seconds = {
        name: [median_of(rows, "duration_s", kv_manager=name, num_output_tokens=n) for n in lengths]
        for name in (WITH, WITHOUT)
    }
    table = [
        {
            "num_output_tokens": length,
            "cached_duration_s": cached,
            "uncached_duration_s": uncached,
            "cached_output_tok_s": length / cached,
            "uncached_output_tok_s": length / uncached,
            "speedup_ratio": uncached / cached,
        }
        for length, cached, uncached in zip(lengths, seconds[WITH], seconds[WITHOUT], strict=True)
    ]
    exponents = {name: growth_exponent(lengths, values) for name, values in seconds.items()}
    last = table[-1]
    finding = (
        f"without a KV cache {last['num_output_tokens']:,} tokens take "
        f"{time_text(last['uncached_duration_s'])} in place of "
        f"{time_text(last['cached_duration_s'])} "
        f"({three_digits(last['speedup_ratio'])} times as long)"
    )
    with_cache, without_cache = exponents[WITH], exponents[WITHOUT]
    if with_cache is not None and without_cache is not None:
        finding += (
            f", and time grows with the length to the power {without_cache:.2f}, "
            f"with the cache to the power {with_cache:.2f}"
        )
    return Conclusion(
        finding=finding,
        table=table,
        summary={
            "speedup_ratio": last["speedup_ratio"],
            "cached_growth_exponent": with_cache,
            "uncached_growth_exponent": without_cache,
        },
    )


def growth_exponent(lengths: Sequence[int], seconds: Sequence[float]) -> float | None:
    """Least-squares slope on logarithmic axes over the upper lengths; None with a single one."""
    points = [
        (math.log(length), math.log(time_s))
        for length, time_s in zip(lengths, seconds, strict=True)
        if 4 * length >= lengths[-1]
    ]
    if len(points) < 2:
        return None
    xs, ys = zip(*points, strict=True)
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    slope: float = sum((x - x_mean) * (y - y_mean) for x, y in points) / sum(
        (x - x_mean) ** 2 for x in xs
    )
    return slope


STUDY = Study(name="kv-cache", settings_type=KVCacheSettings, measure=measure, conclude=conclude)

"""What does a shared prefix save? Time to first token against the length of the prefix.

Two requests share a prefix (a system prompt, a document) and end in different suffixes. The second
comes while the first still generates. With a prefix cache it computes its suffix alone, whatever
the length of the prefix, and both hold the prefix's blocks together; without one it computes and
holds everything again. The first request finds nothing in either case: if its time is the same, the
cache costs nothing where it does not help.

Hits are whole blocks, so of a prefix of n tokens n // block_size blocks can be found.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from llmbench.engine.config import PrefixCacheName

if TYPE_CHECKING:
    from llmbench.engine.engine_core import EngineCore

CACHES: tuple[PrefixCacheName, ...] = ("none", "hash")
FIRST, SECOND = "first", "second"
ROOM_TOKENS = 64
"""What the first request may generate while the second computes its prompt, a token a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheSettings(ModelSettings):
    """Lengths of the shared prefix, and of what follows it."""

    prefix_lens: tuple[int, ...] = (0, 256, 512, 1024, 2048, 4096)
    suffix_len: int = 32
    max_num_batched_tokens: int = 512
    block_size: int = 16
    repetitions: int = 2

    def __post_init__(self) -> None:
        require_positive(self, "suffix_len", "max_num_batched_tokens", "block_size", "repetitions")
        if not self.prefix_lens or min(self.prefix_lens) < 0:
            raise BenchConfigError(
                f"prefix_lens must be one or more lengths from 0 on, not {self.prefix_lens}"
            )


def measure(settings: PrefixCacheSettings, lab: Lab) -> Iterator[Row]:
    """Yield a row for each prefix length, cache, request and repetition."""
    from llmbench.bench.studies.prompts import PromptSource
    from llmbench.engine.engine_core import EngineCore
    from llmbench.engine.models.loader import load_model

    lab.note(f"loading {settings.model}")
    loaded = load_model(settings.engine())
    longest = max(settings.prefix_lens) + settings.suffix_len
    num_steps = -(-longest // settings.max_num_batched_tokens) + ROOM_TOKENS
    if longest + num_steps > loaded.max_model_len:
        error = BenchConfigError(
            f"prefix_lens up to {max(settings.prefix_lens)} + suffix_len {settings.suffix_len} and "
            f"{num_steps} output tokens exceed the model's {loaded.max_model_len} tokens"
        )
        error.add_note("give shorter prefixes")
        raise error
    blocks_a_request = -(-(longest + num_steps) // settings.block_size)
    cores = {
        cache: EngineCore(
            settings.engine(
                prefix_cache=cache,
                block_size=settings.block_size,
                num_kv_blocks=2 * blocks_a_request,
                max_num_seqs=2,
                max_num_batched_tokens=settings.max_num_batched_tokens,
            ),
            loaded=loaded,
        )
        for cache in CACHES
    }
    lengths = sorted(set(settings.prefix_lens))
    source = PromptSource(loaded.tokenizer, loaded.vocab_size, settings.seed)
    for core in cores.values():
        chunk = min(settings.max_num_batched_tokens, max(settings.prefix_lens))
        prefix, *suffixes = source.draw([chunk, *[settings.suffix_len] * 2], "prefix-cache/warm-up")
        _visit(core, prefix, suffixes, num_steps)
    runs = [
        (length, repetition, cache)
        for length in lengths
        for repetition, cache in interleaved(CACHES, settings.repetitions)
    ]
    for done, (length, repetition, cache) in enumerate(runs):
        lab.progress(f"prefix of {length:,} tokens", done, len(runs))
        # Each repetition has texts of its own, and both caches get the same ones.
        prefix, *suffixes = source.draw(
            [length, settings.suffix_len, settings.suffix_len],
            f"prefix-cache/{length}/{repetition}",
        )
        for request, visit in _visit(cores[cache], prefix, suffixes, num_steps).items():
            yield {
                "prefix_cache": cache,
                "num_prefix_tokens": length,
                "request": request,
                "repetition": repetition,
                "ttft_s": visit.ttft_s,
                "num_prompt_tokens": visit.num_prompt_tokens,
                "num_cached_tokens": visit.num_cached_tokens,
                "kv_held_bytes": visit.kv_held_slots * loaded.kv_bytes_per_token,
            }


@dataclass(frozen=True, slots=True)
class _Visit:
    """One request up to its first token, and what all live requests hold then."""

    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    kv_held_slots: int


def _visit(
    core: "EngineCore", prefix: Sequence[int], suffixes: Sequence[Sequence[int]], max_tokens: int
) -> dict[str, _Visit]:
    """Let two requests come one after the other, the first one generating on."""
    from llmbench.engine.request import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    visits: dict[str, _Visit] = {}
    core.reset_prefix_cache()
    try:
        for name, suffix in zip((FIRST, SECOND), suffixes, strict=True):
            started = time.perf_counter()
            (request,) = core.make_requests([*prefix, *suffix], params, name)
            core.add_request(request)
            while not request.num_output_tokens:
                core.step()
            visits[name] = _Visit(
                time.perf_counter() - started,
                request.num_prompt_tokens,
                request.num_cached_tokens,
                core.kv.usage().num_reserved_slots,
            )
    finally:
        for name in (FIRST, SECOND):
            core.abort(name)
    return visits


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Compare the second requests at each length, and the first ones over all lengths."""
    table = []
    for length in sorted({row["num_prefix_tokens"] for row in rows}):
        second: dict[str, Any] = {"request": SECOND, "num_prefix_tokens": length}
        first: dict[str, Any] = {"request": FIRST, "num_prefix_tokens": length}
        without = median_of(rows, "ttft_s", prefix_cache="none", **second)
        cached = median_of(rows, "ttft_s", prefix_cache="hash", **second)
        missed = median_of(rows, "ttft_s", prefix_cache="hash", **first)
        table.append(
            {
                "num_prefix_tokens": length,
                "uncached_ttft_s": without,
                "cached_ttft_s": cached,
                "speedup_ratio": without / cached,
                "hit_share": median_of(rows, "num_cached_tokens", prefix_cache="hash", **second)
                / median_of(rows, "num_prompt_tokens", prefix_cache="hash", **second),
                "first_request_ratio": missed
                / median_of(rows, "ttft_s", prefix_cache="none", **first),
                "uncached_kv_bytes": median_of(
                    rows, "kv_held_bytes", prefix_cache="none", **second
                ),
                "cached_kv_bytes": median_of(rows, "kv_held_bytes", prefix_cache="hash", **second),
            }
        )
    longest = table[-1]
    memory_share = longest["cached_kv_bytes"] / longest["uncached_kv_bytes"]
    first_request_ratio = statistics.median(row["first_request_ratio"] for row in table)
    return Conclusion(
        finding=(
            f"behind a cached prefix of {longest['num_prefix_tokens']:,} tokens the first token "
            f"comes after {time_text(longest['cached_ttft_s'])} in place of "
            f"{time_text(longest['uncached_ttft_s'])} ({three_digits(longest['speedup_ratio'])} "
            f"times sooner), and two requests hold {memory_share:.0%} of the memory; where nothing "
            f"is found, the time is {first_request_ratio:.2f} times that without a cache"
        ),
        table=table,
        summary={
            "speedup_ratio": longest["speedup_ratio"],
            "memory_share": memory_share,
            "first_request_ratio": first_request_ratio,
        },
    )


STUDY = Study(
    name="prefix-cache",
    settings_type=PrefixCacheSettings,
    measure=measure,
    conclude=conclude,
)

"""How fast is the built-in engine against transformers' `generate`? The same prompts, in pairs.

Four loads: one stream; many requests at once, against `generate` with the batch that it is usually
given; a prompt alone, logits of its last token; and a window of a text whose every token is
scored, as perplexity needs it, against the plain loop over the model. The sides take turns (A B,
B A …), so a drift of the machine falls on both, and each ratio is of two neighbours in time. Beside
the ratios stand the time from a checkpoint's path to the first token in a fresh process, and the
engine's memory.
"""

import dataclasses
import statistics
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
    values_of,
)
from llmbench.engine.config import DType, EngineConfig

if TYPE_CHECKING:
    from llmbench.bench.studies.prompts import PromptSource
    from llmbench.bench.studies.sides import SideProcess

BUILT_IN, TRANSFORMERS = "built-in", "transformers"
SIDES = (BUILT_IN, TRANSFORMERS)
LOADS = ("one_stream", "batch", "prompt", "window")
WARMUP_TOKENS = 8
START_UP_PROMPT_LEN = 16
WINDOW_LEN = 2048
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class VsTransformersSettings(ModelSettings):
    """Lengths, batches and repetitions.

    Attributes:
        batch_size: Requests that come at once to the built-in engine.
        transformers_batch_size: Prompts that `generate` gets in one call.
        prompt_len: Tokens of the prompt that is computed alone.
        window_len: Tokens of the window that is scored; None takes 2,048, or all that the model
            reads if that is less.
        start_ups: Starts of a fresh process, with and without `compile`; 0 leaves them out.
    """

    dtype: DType = "bfloat16"
    num_threads: int | None = 2
    input_len: int = 128
    output_len: int = 128
    batch_size: int = 64
    transformers_batch_size: int = 8
    prompt_len: int = 512
    window_len: int | None = None
    repetitions: int = 3
    start_ups: int = 2

    def __post_init__(self) -> None:
        require_positive(
            self,
            "input_len",
            "output_len",
            "batch_size",
            "transformers_batch_size",
            "prompt_len",
            "repetitions",
        )
        if self.window_len is not None and self.window_len < 2:
            raise BenchConfigError(f"window_len must be at least 2, not {self.window_len}")

    @property
    def engine_config(self) -> EngineConfig:
        """The built-in engine, with a KV pool that the loads just fill."""
        block_size = 16
        batch_blocks = self.batch_size * -(-(self.input_len + self.output_len) // block_size)
        longest = max(self.prompt_len + 1, self.window_len or 0)
        prompt_blocks = -(-longest // block_size)
        return self.engine(
            policy="chunked",
            max_num_seqs=max(self.batch_size, 1),
            max_num_batched_tokens=max(512, self.prompt_len, self.batch_size),
            max_model_len=max(self.input_len + self.output_len, longest),
            num_kv_blocks=max(batch_blocks, prompt_blocks),
            block_size=block_size,
        )


def measure(settings: VsTransformersSettings, lab: Lab) -> Iterator[Row]:
    """Yield a row for each load, side and repetition, then for memory and starts."""
    from llmbench.bench.model_facts import read_model_facts
    from llmbench.bench.studies.prompts import PromptSource
    from llmbench.bench.studies.sides import BuiltIn, SideProcess, Transformers
    from llmbench.engine.models.source import resolve_folder

    is_dummy = settings.load_format == "dummy"
    folder = resolve_folder(settings.model, with_weights=not is_dummy)
    own = read_model_facts(folder, settings.engine()).max_model_len
    if settings.window_len is None:
        settings = dataclasses.replace(settings, window_len=min(WINDOW_LEN, own))
    elif settings.window_len > own:
        raise BenchConfigError(
            f"window_len is {settings.window_len:,}, {settings.model} reads at most {own:,} tokens"
        )
    config = settings.engine_config
    facts = read_model_facts(folder, config)
    prompts = PromptSource.of_folder(folder, facts.vocab_size, settings.seed)
    processes: dict[str, SideProcess] = {}
    try:
        lab.note(f"loading {settings.model} on both sides")
        processes[BUILT_IN] = SideProcess(BuiltIn(config), BUILT_IN)
        processes[TRANSFORMERS] = SideProcess(
            Transformers(folder, facts.dtype, settings.device, settings.num_threads, is_dummy),
            TRANSFORMERS,
        )
        for process in processes.values():
            process.wait_until_ready()
        for load in LOADS:
            yield from _measure_load(load, settings, lab, processes, prompts)
        for side, process in processes.items():
            yield {"measure": "memory", "side": side, **process.facts()}
    finally:
        for process in processes.values():
            process.stop()
    if settings.start_ups:
        yield from _measure_start_ups(settings, lab, prompts)


def _measure_load(
    load: str,
    settings: VsTransformersSettings,
    lab: Lab,
    processes: "dict[str, SideProcess]",
    prompts: "PromptSource",
) -> Iterator[Row]:
    """Time one load on both sides in turn; both have run it once, cut short, before."""
    input_len = settings.input_len
    if load == "prompt":
        input_len = settings.prompt_len
    elif load == "window":
        assert settings.window_len is not None
        input_len = settings.window_len
    sizes = {
        BUILT_IN: settings.batch_size if load == "batch" else 1,
        TRANSFORMERS: settings.transformers_batch_size if load == "batch" else 1,
    }

    def run(side: str, name: str, output_len: int) -> Row:
        """Time one run, and count its tokens."""
        drawn = prompts.draw([input_len] * max(sizes.values()), name)[: sizes[side]]
        process = processes[side]
        if load == "prompt":
            seconds, scored, generated = process.prefill(drawn[0]), {}, 1
        elif load == "window":
            seconds, nats = process.score(drawn[0])
            scored, generated = {"mean_token_nats": -nats / (input_len - 1)}, 0
        else:
            seconds, scored = process.generate(drawn, output_len), {}
            generated = sizes[side] * output_len
        num_tokens = input_len if load in ("prompt", "window") else generated
        return {
            "num_prompt_tokens": sizes[side] * input_len,
            "num_output_tokens": generated,
            "duration_s": seconds,
            "throughput_tok_s": num_tokens / seconds,
            **scored,
        }

    for side in SIDES:
        run(side, f"{load}/warm-up", min(WARMUP_TOKENS, settings.output_len))
    order = interleaved(SIDES, settings.repetitions)
    for done, (repetition, side) in enumerate(order):
        lab.progress(f"{load.replace('_', ' ')}, {side}", done, len(order))
        (idle,) = (process for name, process in processes.items() if name != side)
        idle_before_s = idle.cpu_s()
        measured = run(side, f"{load}/{repetition}", settings.output_len)
        yield {
            "measure": load,
            "side": side,
            "repetition": repetition,
            "num_requests": sizes[side],
            **measured,
            "idle_side_cpu_s": idle.cpu_s() - idle_before_s,
        }


def _measure_start_ups(
    settings: VsTransformersSettings, lab: Lab, prompts: "PromptSource"
) -> Iterator[Row]:
    """Time fresh processes; the first of each kind fills caches on disk and does not count."""
    from llmbench.bench.studies.start_up import time_start_up
    from llmbench.engine.errors import KernelBuildError
    from llmbench.engine.kernels.cpu_build import find_compiler

    (prompt,) = prompts.draw([START_UP_PROMPT_LEN], "start-up")
    for is_compiled in (False, True):
        if is_compiled:
            try:
                find_compiler()
            except KernelBuildError as error:
                yield {"measure": "start_up", "compile": True, "error": str(error)}
                return
        config = dataclasses.replace(settings.engine_config, compile=is_compiled)
        stage = f"fresh process{', compiled' if is_compiled else ''}"
        time_start_up(config, prompt)
        for repetition in range(settings.start_ups):
            lab.progress(stage, repetition, settings.start_ups)
            yield {
                "measure": "start_up",
                "side": BUILT_IN,
                "compile": is_compiled,
                "repetition": repetition,
                **time_start_up(config, prompt),
            }


def conclude(rows: Sequence[Row]) -> Conclusion:
    """Make a ratio of each pair, and of the pairs a median with its spread."""
    table: list[Row] = []
    ratios: dict[str, dict[str, Any]] = {}
    for load in LOADS:
        speeds = {
            side: values_of(rows, "throughput_tok_s", measure=load, side=side) for side in SIDES
        }
        ratios[load] = ratio_of_pairs(
            _by_repetition(rows, load, BUILT_IN), _by_repetition(rows, load, TRANSFORMERS)
        )
        table.append(
            {
                "load": load.replace("_", " "),
                "built_in_tok_s": statistics.median(speeds[BUILT_IN]),
                "transformers_tok_s": statistics.median(speeds[TRANSFORMERS]),
                "ratio": ratios[load]["value"],
                "low_ratio": ratios[load]["low"],
                "high_ratio": ratios[load]["high"],
            }
        )
    one, batch, prompt, window = (ratios[load]["value"] for load in LOADS)
    memory = next(row for row in rows if row["measure"] == "memory" and row["side"] == BUILT_IN)
    notes = [
        f"ratios: median and {ratios[LOADS[0]]['interval']}",
        _memory_note("engine process after all loads", memory),
    ]
    summary: dict[str, Any] = {f"{load}_ratio": ratios[load] for load in LOADS}
    summary["kernel"] = memory["kernel"]
    summary["peak_memory"] = _memory_facts(memory)
    summary["start_up"] = {}
    for is_compiled, name in ((False, "eager"), (True, "compiled")):
        starts = [
            row for row in rows if row["measure"] == "start_up" and row["compile"] is is_compiled
        ]
        times = values_of([row for row in starts if "error" not in row], "first_token_s")
        if times:
            summary["start_up"][name] = {
                "first_token_s": statistics.median(times),
                "low_s": min(times),
                "high_s": max(times),
                **_memory_facts(max(starts, key=lambda row: row["peak_resident_bytes"])),
            }
            notes.append(
                f"checkpoint to first token in a fresh process, {name}: "
                f"{statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})"
            )
        elif starts:
            notes.append(f"no compiled start: {starts[0]['error']}")
    loads = [row for row in rows if row["measure"] in LOADS]
    idle = max(row["idle_side_cpu_s"] / row["duration_s"] for row in loads)
    summary["idle_side_cpu_share"] = idle
    notes.append(f"the side that waited used at most {idle:.1%} of a core")
    nats = {
        side: [
            value
            for value in values_of(rows, "mean_token_nats", measure="window", side=side)
            if value is not None
        ]
        for side in SIDES
    }
    if all(nats.values()):
        found = {side: statistics.median(values) for side, values in nats.items()}
        summary["mean_token_nats"] = found
        figures = " and ".join(f"{value:.4f}" for value in found.values())
        notes.append(f"mean negative log-likelihood of the windows' tokens: {figures} nats")
    built_in = {
        load: median_of(rows, "num_requests", measure=load, side=BUILT_IN) for load in LOADS
    }
    size = median_of(rows, "num_requests", measure="batch", side=TRANSFORMERS)
    return Conclusion(
        finding=(
            f"the built-in engine generates {one:.2f} times as fast as transformers for one "
            f"stream, {batch:.2f} times with {built_in['batch']:.0f} requests at once (against a "
            f"batch of {size:.0f}), computes prompts {prompt:.2f} times as fast, and scores "
            f"every token of a window {window:.2f} times as fast"
        ),
        table=table,
        summary=summary,
        notes=tuple(notes),
    )


def _by_repetition(rows: Sequence[Row], load: str, side: str) -> dict[int, float]:
    return {
        row["repetition"]: row["throughput_tok_s"]
        for row in rows
        if row["measure"] == load and row["side"] == side
    }


def ratio_of_pairs(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, Any]:
    """Return median and spread of the ratios of pairs, by repetition.

    The spread is the bootstrap interval of the median where there are pairs enough, else the range.
    """
    from llmbench.bench.stats import CONFIDENCE, summarize

    pairs = summarize([ours[repetition] / theirs[repetition] for repetition in sorted(ours)])
    low, high = pairs.min, pairs.max
    if pairs.median_ci is not None:
        low, high = pairs.median_ci
        interval = f"{CONFIDENCE:.0%} bootstrap interval of {pairs.n} pairs"
    else:
        interval = f"range of {pairs.n} pairs" if pairs.n > 1 else "a single pair"
    return {"value": pairs.median, "low": low, "high": high, "interval": interval}


def _memory_facts(row: Row) -> dict[str, int]:
    names = ("peak_resident_bytes", "weight_bytes", "kv_bytes")
    facts: dict[str, int] = {name: row[name] for name in names}
    facts["other_bytes"] = row["peak_resident_bytes"] - row["weight_bytes"] - row["kv_bytes"]
    return facts


def _memory_note(what: str, row: Row) -> str:
    facts = {name: size / MIB for name, size in _memory_facts(row).items()}
    return (
        f"peak memory, {what}: {facts['peak_resident_bytes']:,.0f} MiB = weights "
        f"{facts['weight_bytes']:,.0f} + KV pool {facts['kv_bytes']:,.0f} + "
        f"{facts['other_bytes']:,.0f}"
    )


STUDY = Study(
    name="vs-transformers",
    settings_type=VsTransformersSettings,
    measure=measure,
    conclude=conclude,
)

"""The picture of each study, drawn from its results folder alone.

Which figure shows what a study found: lines along a ladder of lengths, the distribution of a
latency, memory over time, bars side by side. A study without an entry has its table only.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from llmbench.bench.client.events import EventLog
from llmbench.bench.metrics import request_timelines
from llmbench.reports.bars import bar_figure, bar_frame
from llmbench.reports.distribution import cumulative_distribution, distribution_frame
from llmbench.reports.figure import Caption
from llmbench.reports.lines import line_figure, line_frame
from llmbench.reports.memory import memory_figure, memory_frame
from llmbench.reports.memory_map import memory_map_figure, memory_map_frame

Row = dict[str, Any]
Drawn = tuple[Figure, pd.DataFrame]
Draw = Callable[[Path, list[Row], dict[str, Any], Caption], Drawn]

WITH_CACHE, WITHOUT_CACHE = "with cache", "without"


def kv_cache(folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption) -> Drawn:
    """Seconds and speed against output length, with the KV cache and without."""
    named = [{**row, "series": _cache_name(row["kv_manager"] == "uncached")} for row in rows]
    frame = line_frame(
        [
            *_medians(named, "num_output_tokens", "duration_s", "time (s)"),
            *_medians(named, "num_output_tokens", "output_throughput_tok_s", "output (tok/s)"),
        ]
    )
    figure = line_figure(
        frame, caption, x_label="output tokens", log_y=True, baseline=WITHOUT_CACHE
    )
    return figure, frame


def prefix_cache(
    folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption
) -> Drawn:
    """TTFT of the second request against the length of the prefix that it shares."""
    named = [
        {
            **row,
            "series": _cache_name(row["prefix_cache"] == "none"),
            "ttft_ms": row["ttft_s"] * 1e3,
            "held_mib": row["kv_held_bytes"] / 2**20,
        }
        for row in rows
        if row["request"] == "second"
    ]
    frame = line_frame(
        [
            *_medians(named, "num_prefix_tokens", "ttft_ms", "TTFT p50 (ms)"),
            *_medians(named, "num_prefix_tokens", "held_mib", "KV of both requests (MiB)"),
        ]
    )
    figure = line_figure(
        frame, caption, x_label="tokens of the shared prefix", baseline=WITHOUT_CACHE
    )
    return figure, frame


def batching(folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption) -> Drawn:
    """Distribution of the time between tokens, a curve a policy."""
    samples = {}
    for row in rows:
        timelines = request_timelines(
            EventLog.read_parquet(folder / f"events-{row['policy']}.parquet")
        )
        completed = (request for request in timelines if request.is_completed)
        samples[row["policy"]] = [gap for request in completed for gap in request.chunk_gaps_s]
    frame = distribution_frame(samples)
    return cumulative_distribution(frame, caption), frame


def paged_vs_reserved(
    folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption
) -> Drawn:
    """Memory of the pool over time, a panel a way of holding it."""
    frame = memory_frame(
        {row["variant"]: folder / f"steps-{row['variant']}.parquet" for row in rows},
        block_size=settings["block_size"],
    )
    num_blocks = settings["kv_tokens"] // settings["block_size"]
    bytes_per_slot = rows[0]["kv_pool_bytes"] / (num_blocks * settings["block_size"])
    return memory_figure(frame, caption, bytes_per_slot=bytes_per_slot), frame


def memory_map(folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption) -> Drawn:
    """What each block of the pool holds over time, a panel a way of holding it."""
    frame = memory_map_frame(
        {row["variant"]: folder / f"memory-{row['variant']}.npz" for row in rows}
    )
    return memory_map_figure(frame, caption), frame


def vs_transformers(
    folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption
) -> Drawn:
    """Speed of both sides, a panel a load."""
    speeds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for row in rows:
        if row.get("throughput_tok_s") is not None:
            key = (row["measure"], row["side"], row["num_requests"])
            speeds[key].append(row["throughput_tok_s"])
    frame = bar_frame(
        {
            "panel": f"{load.replace('_', ' ')} (tok/s)",
            "label": side,
            "value": statistics.median(values),
            "note": f"{num_requests} at once" if num_requests > 1 else None,
        }
        for (load, side, num_requests), values in speeds.items()
    )
    return bar_figure(frame, caption, baseline="transformers"), frame


def vs_lm_eval(folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption) -> Drawn:
    """Time of both sides, a panel a task."""
    frame = bar_frame(
        {
            "panel": f"{row['task']}, {row['num_items']} documents (s)",
            "label": side,
            "value": row[key],
            "note": note,
        }
        for row in rows
        for side, key, note in (
            ("llmbench", "llmbench_s", None),
            ("lm-eval", "lm_eval_s", f"batch {row['lm_eval_batch_size']}"),
        )
    )
    return bar_figure(frame, caption, baseline="lm-eval"), frame


def eval_invariance(
    folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption
) -> Drawn:
    """How far apart each way of running brings the answers, a panel a task."""
    frame = bar_frame(
        {
            "panel": f"{row['task']}, {row['num_items']} documents: other answers (%)",
            "label": row["variant"],
            "value": 100 * (1 - row["num_same_answers"] / row["num_answers"]),
            "note": f"at most {row['max_logprob_difference']:.1e} nats"
            if row["max_logprob_difference"]
            else None,
        }
        for row in rows
        if row["num_answers"]
    )
    return bar_figure(frame, caption, baseline="as it runs"), frame


def quantization_quality(
    folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption
) -> Drawn:
    """What each scheme costs and buys, a panel a quantity."""
    base, schemes = _split_base(rows)
    panels = {
        "perplexity": ("perplexity", 1.0),
        "KL from the base (nats)": ("kl_mean", 1.0),
        "weights (MB)": ("weight_bytes", 1e-6),
    }
    frame = bar_frame(
        {"panel": panel, "label": row["scheme"], "value": row[key] * factor}
        for panel, (key, factor) in panels.items()
        for row in (base, *schemes)
    )
    return bar_figure(frame, caption, baseline="base"), frame


def quantization_speed(
    folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption
) -> Drawn:
    """Speed of each scheme over the base's, against the number of requests at once."""
    sizes = {1: "one_stream"} | {size: f"batch_{size}" for size in settings["batch_sizes"]}
    base, schemes = _split_base(rows)
    frame = line_frame(
        {"panel": panel, "series": name, "x": size, "y": row[f"{stem}_{key}"]} | interval
        for panel, key in (("output (tok/s)", "tok_s"), ("times the base's speed", "ratio"))
        for row in (base, *schemes)
        for size, stem in sizes.items()
        for name in ["base" if row is base else f"{row['scheme']} {row['kind']}"]
        for interval in [
            {end: row.get(f"{stem}_{end}est_ratio") for end in ("low", "high")}
            if key == "ratio"
            else {}
        ]
    )
    figure = line_figure(
        frame,
        caption,
        x_label="requests at once",
        baseline="base",
        interval="lowest to highest of the repetitions",
    )
    return figure, frame


def step_cost(folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption) -> Drawn:
    """Time of a step's parts against the size of the batch."""
    frame = line_frame(
        {
            "panel": "time of a step (ms)",
            "series": part,
            "x": row["num_seqs"],
            "y": row[f"{part}_p50_s"] * 1e3,
        }
        for part in ("step", "schedule", "run", "update")
        for row in rows
    )
    return line_figure(frame, caption, x_label="sequences in a step"), frame


def load_generator(
    folder: Path, rows: list[Row], settings: dict[str, Any], caption: Caption
) -> Drawn:
    """How late requests are sent, against the rate."""
    frame = line_frame(
        {
            "panel": "sent after it was due (ms)",
            "series": name,
            "x": row["request_rate_req_s"],
            "y": None if value is None else value * 1e3,
            "note": "withheld: too few requests",
        }
        for name in ("p50", "p99", "max")
        for row in rows
        for value in (row[f"send_error_{name}_s"],)
    )
    return line_figure(frame, caption, x_label="requests per second", log_y=True), frame


@dataclass(frozen=True, slots=True)
class StudyFigure:
    """One picture of a study; `stem` names its files."""

    stem: str
    title: str
    draw: Draw


FIGURES: dict[str, tuple[StudyFigure, ...]] = {
    "kv-cache": (StudyFigure("kv-cache", "Generation with and without a KV cache", kv_cache),),
    "prefix-cache": (
        StudyFigure("prefix-cache", "Time to first token behind a shared prefix", prefix_cache),
    ),
    "batching": (StudyFigure("batching", "Time between tokens, by batching policy", batching),),
    "paged-vs-reserved": (
        StudyFigure("paged-vs-reserved", "KV memory over time", paged_vs_reserved),
        StudyFigure("memory-map", "Where the KV pool has its holes", memory_map),
    ),
    "vs-transformers": (
        StudyFigure("vs-transformers", "The built-in engine and transformers", vs_transformers),
    ),
    "vs-lm-eval": (
        StudyFigure("vs-lm-eval", "llmbench eval and lm-evaluation-harness", vs_lm_eval),
    ),
    "eval-invariance": (
        StudyFigure("eval-invariance", "Answers by way of running", eval_invariance),
    ),
    "quantization": (
        StudyFigure(
            "quantization-speed", "Speed of quantized models by batch size", quantization_speed
        ),
        StudyFigure(
            "quantization-quality", "What quantization costs and saves", quantization_quality
        ),
    ),
    "step-cost": (StudyFigure("step-cost", "What a step costs besides the model", step_cost),),
    "load-generator": (
        StudyFigure("load-generator", "Punctuality of the load generator", load_generator),
    ),
}
"""The pictures of each study, the most telling one first."""


def _split_base(rows: list[Row]) -> tuple[Row, list[Row]]:
    """The full-precision row of the quantization study, and the others."""
    (base,) = (row for row in rows if row["scheme"] == "base")
    return base, [row for row in rows if row is not base]


def _cache_name(is_without: bool) -> str:
    return WITHOUT_CACHE if is_without else WITH_CACHE


def _medians(rows: Iterable[Row], x: str, y: str, panel: str) -> list[dict[str, object]]:
    """One point for each series and x: the median of the repetitions."""
    values: dict[tuple[str, float], list[float]] = defaultdict(list)
    for row in rows:
        values[row["series"], row[x]].append(row[y])
    return [
        {"panel": panel, "series": series, "x": position, "y": statistics.median(found)}
        for (series, position), found in values.items()
    ]

"""What `llmbench quantize` prints: the plan of a dry run, and the result of a real one."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.bench.strict_json import strict
from llmbench.cli.output import Output
from llmbench.quant.consumers import Consumer
from llmbench.quant.plan import QuantPlan
from llmbench.reports.format import counted, number, percent, size

if TYPE_CHECKING:
    from llmbench.bench.accuracy.divergence import Quality
    from llmbench.bench.accuracy.golden_logits import GoldenLogits
    from llmbench.quant.pipeline import QuantResult

CALLED = {
    "libraries": "Python and its libraries",
    "outside_blocks": "embeddings and head",
    "block": "one block in float32",
    "activations": "calibration activations",
    "batch": "a batch of them inside the block",
    "statistics": "statistics of a layer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How far the result is from its base, and how that was measured."""

    quality: "Quality"
    protocol: str


def print_plan(plan: QuantPlan, readers: Sequence[Consumer], streams: Output) -> None:
    """Print what a run would do, cost and lead to."""
    from llmbench.reports.quant_report import consumer_table, plan_table, size_line
    from llmbench.reports.tables import render

    costs = plan.costs
    streams.document({**plan.to_json(), "consumers": [reader.to_json() for reader in readers]})
    streams.result(f"{render(plan_table(plan), sys.stdout)}\n")
    streams.result(f"format    {plan.format}: {plan.format_reason}")
    streams.result(f"size      {size_line(costs.bytes_before, costs.bytes_after)}")
    parts = ", ".join(
        f"{size(value)} {CALLED.get(name, name)}" for name, value in costs.memory_parts.items()
    )
    streams.result(f"memory    about {size(costs.memory_bytes)}: {parts}")
    if costs.free_disk_bytes is not None:
        streams.result(
            f"disk      {size(costs.disk_bytes)} while it runs, {size(costs.free_disk_bytes)} free"
        )
    streams.result(f"time      {duration(costs.seconds)}, an estimate")
    for note in plan.notes:
        streams.result(f"note      {note}")
    streams.result(f"\n{render(consumer_table(readers), sys.stdout)}")


def print_result(
    model: str,
    result: "QuantResult",
    plan: QuantPlan,
    readers: Sequence[Consumer],
    golden: "GoldenLogits",
    evaluation: Evaluation | None,
    streams: Output,
) -> None:
    """Print how a run came out, and what can be done with the checkpoint."""
    from llmbench.quant.output_folder import MANIFEST
    from llmbench.reports.quant_report import consumer_table, layer_table, phase_line, size_line
    from llmbench.reports.tables import render

    streams.document(result_record(model, result, plan, readers, golden, evaluation))
    streams.result(f"{render(layer_table(result.layers), sys.stdout)}\n")
    if result.coverage is not None:
        streams.result(f"tokens    {coverage_line(asdict(result.coverage))}")
        streams.result(f"          {result.calibration}")
    streams.result(f"size      {size_line(result.bytes_before, result.bytes_after)}")
    streams.result(f"time      {phase_line(result.seconds)}")
    streams.result(f"memory    {size(result.peak_rss_bytes)} at most")
    proof = result.verification
    streams.result(
        f"checked   read back from the files, {counted(proof.num_layers, 'layer')} and "
        f"{counted(proof.num_tensors, 'tensor')} are what was computed"
    )
    streams.result(
        f"engine    its logits of {golden.num_tokens} tokens differ by "
        f"{number(golden.relative_error, 2)} from those of the decoded weights in float32, by "
        f"{number(golden.served_relative_error, 2)} in {golden.served_dtype} "
        f"({golden.served_kernel}; relative, median)"
    )
    if result.num_resumed_blocks:
        streams.result(f"resumed   {result.num_resumed_blocks} blocks were there from before")
    if evaluation is not None:
        streams.result(f"quality   {quality_line(evaluation.quality)}")
        streams.result(f"          {evaluation.protocol}")
    streams.result(f"\n{render(consumer_table(readers), sys.stdout)}")
    streams.note(f"\ncheckpoint  {result.output}")
    streams.note(f"all layers  {result.output / MANIFEST}")
    streams.note("next:")
    for command in next_commands(model, result.output):
        streams.note(f"  {command}")


def result_record(
    model: str,
    result: "QuantResult",
    plan: QuantPlan,
    readers: Sequence[Consumer],
    golden: "GoldenLogits",
    evaluation: Evaluation | None,
) -> dict[str, Any]:
    """The result as plain JSON values."""
    return {
        "model": model,
        "output": str(result.output),
        "format": result.format,
        "config": plan.config.to_json(),
        "layers": {name: report.to_json() for name, report in result.layers.items()},
        "kept": plan.kept,
        "calibration": result.calibration,
        "coverage": None if result.coverage is None else asdict(result.coverage),
        "bytes_before": result.bytes_before,
        "bytes_after": result.bytes_after,
        "seconds": result.seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
        "num_resumed_blocks": result.num_resumed_blocks,
        "verification": strict(result.verification),
        "golden_logits": strict(golden),
        "quality": strict(None if evaluation is None else evaluation.quality),
        "quality_protocol": None if evaluation is None else evaluation.protocol,
        "consumers": [reader.to_json() for reader in readers],
    }


def coverage_line(coverage: Mapping[str, int]) -> str:
    """What became of every calibration token."""
    parts = [f"{coverage['num_tokens']:,} of {counted(coverage['num_samples'], 'sample')}"]
    if cut := coverage.get("num_truncated_tokens"):
        long = counted(coverage["num_truncated_samples"], "long sample")
        parts.append(f"{cut:,} more cut off {long}")
    if unused := coverage.get("num_unused_tokens"):
        parts.append(f"{unused:,} of the text not asked for")
    if empty := coverage.get("num_dropped_samples"):
        parts.append(f"{counted(empty, 'sample')} empty")
    return ", ".join(parts)


def quality_line(quality: "Quality") -> str:
    """Perplexity before and after, and how far the distributions are apart."""
    change = quality.perplexity / quality.base_perplexity - 1
    spread = "" if quality.kl_sem is None else f" ± {number(quality.kl_sem, 2)}"
    return (
        f"perplexity {number(quality.base_perplexity, 4)} → {number(quality.perplexity, 4)} "
        f"({change:+.1%}), KL divergence {number(quality.kl_mean)}{spread} nats a token, the same "
        f"likeliest token at {percent(quality.top1_agreement)} of {quality.num_tokens:,} positions"
    )


def next_commands(model: str, output: Path) -> list[str]:
    """Commands that a reader of the result will want."""
    return [
        f'llmbench generate {output} --prompt "Why is the sky blue?"',
        f"llmbench serve-bench {output} --max-concurrency 1,16",
        f"llmbench serve-bench {model} --max-concurrency 1,16",
    ]


def duration(seconds: float) -> str:
    """A length of time in the unit that people plan in."""
    if seconds < 90:
        return f"about {max(1, round(seconds)):,} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60):,} min"
    return f"about {seconds / 3600:,.1f} h"

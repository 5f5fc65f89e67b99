"""`llmbench quantize --backend`: the same command, carried out by another project's tool.

The peer gets the same calibration tokens as llmbench's own methods, and what it writes is opened
by llmbench's own reader, so that both results can be compared like with like.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.bench.strict_json import strict
from llmbench.cli.output import Output
from llmbench.cli.quantize_checks import with_flags
from llmbench.cli.quantize_output import Evaluation, next_commands, quality_line
from llmbench.engine.models.source import open_checkpoint
from llmbench.quant.config import Format, QuantConfig
from llmbench.quant.consumers import Consumer, consumers
from llmbench.quant.errors import ConfigError
from llmbench.quant.plan import check_shapes
from llmbench.reports.format import counted, size

if TYPE_CHECKING:
    from llmbench.quant.calibration import CalibrationSet
    from llmbench.quant.peer_backends import PeerResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOutput:
    """What a peer wrote, as llmbench's reader finds it."""

    format: Format
    num_layers: int
    bytes_before: int
    bytes_after: int
    readers: Sequence[Consumer]


def check_peer(folder: Path, backend: str, config: QuantConfig, python: Path | None) -> Path:
    """The peer's interpreter; refuses what the peer cannot do or would stumble over later."""
    from llmbench.quant.peer_backends import find_peer

    try:
        check_shapes(open_checkpoint(folder), config)
        return find_peer(backend, config, python)
    except ConfigError as refusal:
        raise with_flags(refusal) from refusal


def run_with_peer(
    folder: Path,
    output: Path,
    backend: str,
    config: QuantConfig,
    calibration: "CalibrationSet | None",
    interpreter: Path,
    streams: Output,
) -> "tuple[PeerResult, PeerOutput]":
    """Quantize by the peer, and open what it wrote."""
    from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
    from llmbench.quant.linear_layers import LinearLayer
    from llmbench.quant.peer_backends import run_peer

    streams.note(f"{backend} runs under {interpreter}; it shows no progress")
    result = run_peer(
        backend,
        base=folder,
        output=output,
        config=config,
        samples=() if calibration is None else calibration.samples,
        python=interpreter,
    )
    written = open_checkpoint(output)
    quantized = QuantizedCheckpoint.of(written)
    assert quantized is not None, f"{backend} wrote a checkpoint that is not quantized"
    targets = []
    for name, scheme in quantized.layers.items():
        out_features, in_features = quantized.shape(name)
        layer = LinearLayer(name=name, out_features=out_features, in_features=in_features, block="")
        targets.append((layer, scheme))
    return result, PeerOutput(
        format=quantized.format,
        num_layers=len(targets),
        bytes_before=open_checkpoint(folder).num_bytes,
        bytes_after=written.num_bytes,
        readers=consumers(quantized.format, targets, desc_act=config.desc_act),
    )


def print_peer_result(
    model: str,
    output: Path,
    backend: str,
    config: QuantConfig,
    result: "PeerResult",
    written: PeerOutput,
    evaluation: Evaluation | None,
    streams: Output,
) -> None:
    """Print how a peer's run came out."""
    import sys

    from llmbench.reports.quant_report import consumer_table, size_line
    from llmbench.reports.tables import render

    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    document: dict[str, Any] = {
        "model": model,
        "output": str(output),
        "backend": backend,
        "versions": dict(result.versions),
        "format": written.format,
        "config": config.to_json(),
        "num_layers": written.num_layers,
        "bytes_before": written.bytes_before,
        "bytes_after": written.bytes_after,
        "seconds": {backend: result.seconds},
        "peak_rss_bytes": result.peak_rss_bytes,
        "quality": strict(None if evaluation is None else evaluation.quality),
        "quality_protocol": None if evaluation is None else evaluation.protocol,
        "consumers": [reader.to_json() for reader in written.readers],
    }
    streams.document(document)
    streams.result(f"by        {versions}")
    streams.result(f"format    {written.format}, {counted(written.num_layers, 'layer')}")
    streams.result(f"size      {size_line(written.bytes_before, written.bytes_after)}")
    streams.result(f"time      {result.seconds:,.1f} s")
    streams.result(f"memory    {size(result.peak_rss_bytes)} at most")
    if evaluation is not None:
        streams.result(f"quality   {quality_line(evaluation.quality)}")
        streams.result(f"          {evaluation.protocol}")
    streams.result(f"\n{render(consumer_table(written.readers), sys.stdout)}")
    streams.note(f"\ncheckpoint  {output}")
    streams.note("next:")
    for command in next_commands(model, output):
        streams.note(f"  {command}")

"""`llmbench convert`: a quantized checkpoint in another file format, with the same numbers."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from llmbench.cli.engine_options import Model, parse_size
from llmbench.cli.models import require_model
from llmbench.cli.options import (
    OUTPUT,
    Debug,
    Json,
    Quiet,
    SectionedCommand,
    Verbose,
    examples,
    option,
)
from llmbench.cli.output import Output
from llmbench.cli.progress import Progress
from llmbench.engine.models.source import resolve_folder
from llmbench.quant.config import Format
from llmbench.quant.safetensors_writer import MAX_SHARD_BYTES
from llmbench.reports.format import counted, size

CONVERSION = "Conversion"
STAGES = {"write": "writing", "prove": "comparing"}


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(
        "convert",
        cls=SectionedCommand,
        epilog=examples(
            "llmbench convert ./smollm2-gptq --format compressed-tensors -o smollm2-ct",
            "llmbench convert ./my-model-awq --format gptq_v2 -o my-model-gptq",
            "llmbench convert ./my-model-w4a8 --format gptq --weights-only -o my-model-gptq",
        ),
    )(convert_command)


def convert_command(
    model: Model,
    format: Annotated[
        Format, option(CONVERSION, "--format", help="File format of the new checkpoint.")
    ],
    output: Annotated[
        Path, option(OUTPUT, "--output", "-o", help="Folder of the new checkpoint; must not exist.")
    ],
    weights_only: Annotated[
        bool,
        option(
            CONVERSION,
            "--weights-only",
            help="Leave out that activations are rounded to int8, for formats that cannot say it.",
        ),
    ] = False,
    max_shard_bytes: Annotated[
        int | None,
        option(
            CONVERSION,
            "--max-shard-size",
            help="Most bytes of a weights file, such as 5GB, the default.",
            parser=parse_size,
            metavar="SIZE",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Write a quantized checkpoint in another file format, with the same numbers.

    Codes, scales and zero-points move without rounding, or the conversion is refused. The result
    is read back, and every dequantized weight compared, before it gets its name.
    """
    streams = Output(as_json=json, quiet=quiet, verbose=verbose)
    require_model(model, "auto")
    from llmbench.quant.convert import convert

    with Progress(streams) as progress:
        done = convert(
            resolve_folder(model),
            format,
            output.expanduser(),
            weights_only=weights_only,
            max_shard_bytes=MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes,
            on_progress=lambda stage, count, total: progress.update(STAGES[stage], count, total),
        )
    for note in done.notes:
        streams.note(note)
    streams.note(
        f"{done.source_format} to {done.target_format}, {size(done.bytes_before)} to "
        f"{size(done.bytes_after)}: {counted(done.num_layers, 'quantized layer')} dequantized "
        f"equal, {counted(done.num_tensors, 'other tensor')} equal byte for byte"
    )
    streams.result(str(done.output))
    streams.document({**asdict(done), "output": str(done.output)})

"""Options that mean and read the same in every command.

A command's signature takes these aliases, so that its help, completion and types are real; their
defaults come from the configuration dataclasses, which is the only place where defaults live.
`config_from` turns the parsed parameters back into such a dataclass by name: flag, parameter and
field are one word, spelt with `-` in the flag.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from llmbench.engine.config import (
    DType,
    EngineConfig,
    KVManagerName,
    LoadFormat,
    ModelBackend,
    Policy,
    PrefixCacheName,
    Reservation,
)

ConfigT = TypeVar("ConfigT")

SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


class SectionedCommand(TyperCommand):
    """A command whose help lists its options by section, in the order of its signature."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one definition list for each section (`rich_help_panel` of the option)."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                name = getattr(parameter, "rich_help_panel", None) or default
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)


def examples(*commands: str) -> str:
    """Epilog of a help text: real commands, one a line."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


def parse_size(text: str) -> int:
    """Bytes of `2GiB`, `512MB` or a bare number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in SIZE_UNITS:
        raise typer.BadParameter(f"expected a size such as 2GiB or 512MiB, found `{text}`")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


def unknown_name(message: str, parameter: str, close: Sequence[str]) -> typer.BadParameter:
    """A usage error for a name that does not exist, with the names that resemble it."""
    error = typer.BadParameter(message, param_hint=parameter)
    if close:
        error.add_note(f"did you mean {' or '.join(f'`{name}`' for name in close)}?")
    return error


def config_from(kind: type[ConfigT], parameters: Mapping[str, Any], **more: Any) -> ConfigT:
    """Build the config `kind` of the parameters that carry its fields' names, and of `more`."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: parameters[name] for name in names & parameters.keys()}, **more)


def default_of(kind: type, field: str) -> Any:
    """Default of a dataclass field."""
    return next(f.default for f in dataclasses.fields(kind) if f.name == field)


def complete_model(incomplete: str) -> list[str]:
    """Catalogued model names that start with what was typed."""
    from llmbench.engine.models.catalog import CATALOG

    return [name for name in CATALOG if name.startswith(incomplete)]


def _option(panel: str, *flags: str, help: str, **more: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


MODEL, SCHEDULING, CACHE, OUTPUT = "Model", "Scheduling", "KV cache", "Output"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Checkpoint folder, name from `llmbench models list`, or Hugging Face id.",
        autocompletion=complete_model,
    ),
]
Tokenizer = Annotated[
    str | None, _option(MODEL, "--tokenizer", help="Tokenizer of another checkpoint.")
]
DTypeOption = Annotated[DType, _option(MODEL, "--dtype", help="Type of weights and KV cache.")]
LoadFormatOption = Annotated[
    LoadFormat,
    _option(MODEL, "--load-format", help="`dummy` draws random weights from the config alone."),
]
ModelBackendOption = Annotated[
    ModelBackend,
    _option(MODEL, "--model-backend", help="Own decoder, transformers' code, or what fits."),
]
TrustRemoteCode = Annotated[
    bool, _option(MODEL, "--trust-remote-code", help="Run Python code that comes with the model.")
]
MaxModelLen = Annotated[
    int | None,
    _option(MODEL, "--max-model-len", help="Longest prompt and output together, tokens."),
]
NumThreads = Annotated[int | None, _option(MODEL, "--num-threads", help="CPU threads of torch.")]
Compile = Annotated[
    bool, _option(MODEL, "--compile", help="Compile fused CPU kernels at first use; cached.")
]
PolicyOption = Annotated[
    Policy, _option(SCHEDULING, "--policy", help="How a step's token budget is dealt out.")
]
MaxNumSeqs = Annotated[int, _option(SCHEDULING, "--max-num-seqs", help="Most sequences in a step.")]
MaxNumBatchedTokens = Annotated[
    int, _option(SCHEDULING, "--max-num-batched-tokens", help="Most tokens in a step.")
]
KVManagerOption = Annotated[
    KVManagerName,
    _option(CACHE, "--kv-manager", help="Blocks, reserved stretches, or no cache at all."),
]
ReservationOption = Annotated[
    Reservation,
    _option(CACHE, "--reservation", help="What the contiguous manager reserves up to."),
]
PrefixCacheOption = Annotated[
    PrefixCacheName, _option(CACHE, "--prefix-cache", help="Reuse of the KV of equal prefixes.")
]
BlockSize = Annotated[int, _option(CACHE, "--block-size", help="Tokens in a KV block.")]
KVCacheMemory = Annotated[
    int | None,
    _option(
        CACHE,
        "--kv-cache-memory",
        help="Size of the KV pool, such as 2GiB.",
        parser=parse_size,
        metavar="SIZE",
    ),
]
NumKVBlocks = Annotated[
    int | None, _option(CACHE, "--num-kv-blocks", help="The same, as a number of blocks.")
]
MemoryUtilization = Annotated[
    float,
    _option(CACHE, "--memory-utilization", help="Share of free memory to use if no size is given."),
]
Seed = Annotated[
    int, typer.Option("--seed", help="Makes prompts, arrivals and sampled tokens repeatable.")
]
OutputFolder = Annotated[
    Path | None,
    _option(OUTPUT, "--output", "-o", help="Results folder; an existing one is resumed."),
]
Json = Annotated[bool, _option(OUTPUT, "--json", help="Print the result as one JSON document.")]
Quiet = Annotated[bool, _option(OUTPUT, "--quiet", "-q", help="Print the result and nothing else.")]
Verbose = Annotated[bool, _option(OUTPUT, "--verbose", "-v", help="Print what is going on inside.")]
Debug = Annotated[bool, _option(OUTPUT, "--debug", help="Show the traceback of an error.")]


def engine_default(field: str) -> Any:
    """Default of an engine setting."""
    return default_of(EngineConfig, field)

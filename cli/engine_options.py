"""Options of the built-in engine: the fields of EngineConfig, flag by flag."""

import re
from typing import Annotated

import typer

from llmbench.cli.options import defaults_of, option
from llmbench.engine.config import (
    Device,
    DType,
    EngineConfig,
    KVCacheDType,
    KVManagerName,
    LoadFormat,
    ModelBackend,
    Policy,
    PrefixCacheName,
    Reservation,
)

ENGINE = defaults_of(EngineConfig)
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


def parse_size(text: str) -> int:
    """Bytes of `2GiB`, `512MB` or a bare number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in SIZE_UNITS:
        raise typer.BadParameter(f"expected a size such as 2GiB or 512MiB, found `{text}`")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


def complete_model(incomplete: str) -> list[str]:
    """Catalogued model names that start with what was typed."""
    from llmbench.engine.models.catalog import CATALOG

    return [name for name in CATALOG if name.startswith(incomplete)]


MODEL, SCHEDULING, CACHE = "Model", "Scheduling", "KV cache"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Checkpoint folder, name from `llmbench models list`, or Hugging Face id.",
        autocompletion=complete_model,
    ),
]
Tokenizer = Annotated[
    str | None, option(MODEL, "--tokenizer", help="Tokenizer of another checkpoint.")
]
DTypeOption = Annotated[DType, option(MODEL, "--dtype", help="Type of weights and KV cache.")]
DeviceOption = Annotated[Device, option(MODEL, "--device", help="Where the model runs.")]
LoadFormatOption = Annotated[
    LoadFormat,
    option(MODEL, "--load-format", help="`dummy` draws random weights from the config alone."),
]
ModelBackendOption = Annotated[
    ModelBackend,
    option(MODEL, "--model-backend", help="Own decoder, transformers' code, or what fits."),
]
TrustRemoteCode = Annotated[
    bool, option(MODEL, "--trust-remote-code", help="Run Python code that comes with the model.")
]
MaxModelLen = Annotated[
    int | None,
    option(MODEL, "--max-model-len", help="Longest prompt and output together, tokens."),
]
NumThreads = Annotated[int | None, option(MODEL, "--num-threads", help="CPU threads of torch.")]
Compile = Annotated[
    bool | None,
    option(
        MODEL,
        "--compile/--no-compile",
        help="Fused CPU kernels, compiled at first use and cached; by default where a C++ "
        "compiler is at hand.",
    ),
]
PolicyOption = Annotated[
    Policy, option(SCHEDULING, "--policy", help="How a step's token budget is dealt out.")
]
MaxNumSeqs = Annotated[int, option(SCHEDULING, "--max-num-seqs", help="Most sequences in a step.")]
MaxNumBatchedTokens = Annotated[
    int, option(SCHEDULING, "--max-num-batched-tokens", help="Most tokens in a step.")
]
KVManagerOption = Annotated[
    KVManagerName,
    option(CACHE, "--kv-manager", help="Blocks, reserved stretches, or no cache at all."),
]
ReservationOption = Annotated[
    Reservation,
    option(CACHE, "--reservation", help="What the contiguous manager reserves up to."),
]
PrefixCacheOption = Annotated[
    PrefixCacheName, option(CACHE, "--prefix-cache", help="Reuse of the KV of equal prefixes.")
]
KVCacheDTypeOption = Annotated[
    KVCacheDType,
    option(CACHE, "--kv-cache-dtype", help="Keys and values as computed, or in 8 bits."),
]
BlockSize = Annotated[int, option(CACHE, "--block-size", help="Tokens in a KV block.")]
KVCacheMemory = Annotated[
    int | None,
    option(
        CACHE,
        "--kv-cache-memory",
        help="Size of the KV pool, such as 2GiB.",
        parser=parse_size,
        metavar="SIZE",
    ),
]
NumKVBlocks = Annotated[
    int | None, option(CACHE, "--num-kv-blocks", help="The same, as a number of blocks.")
]
MemoryUtilization = Annotated[
    float,
    option(CACHE, "--memory-utilization", help="Share of free memory to use if no size is given."),
]

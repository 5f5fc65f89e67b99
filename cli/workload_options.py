"""Options of the workload and of the load, under the names that `vllm bench serve` gave them."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, TypeVar

import typer

from llmbench.bench.workloads.workload import DatasetName, LengthDistribution, WorkloadConfig
from llmbench.cli.options import defaults_of, option

WORKLOAD = defaults_of(WorkloadConfig)
DATASET, LOAD = "Workload", "Load"

NumberT = TypeVar("NumberT", int, float)


def parse_rate(text: str) -> float:
    """A positive number, or `inf`."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:  # written so that NaN fails
        raise typer.BadParameter(f"expected a positive number or inf, found `{text}`")
    return rate


def parse_rates(text: str) -> str:
    """Check a list of rates as early as other values; `rates_of` reads it."""
    for item in text.split(","):
        parse_rate(item)
    return text


def rates_of(text: str) -> tuple[float, ...]:
    """Rates of `1,2,4,inf`."""
    return tuple(parse_rate(item) for item in text.split(","))


def parse_concurrencies(text: str) -> str:
    """Check a list of concurrencies as early as other values; `concurrencies_of` reads it."""
    concurrencies_of(text)
    return text


def concurrencies_of(text: str) -> tuple[int | None, ...]:
    """Concurrencies of `1,4,none`; None is no cap."""
    caps: list[int | None] = []
    for item in (part.strip() for part in text.split(",")):
        if item != "none" and not (item.isdigit() and int(item) > 0):
            raise typer.BadParameter(f"expected positive numbers or none, found `{item}`")
        caps.append(None if item == "none" else int(item))
    return tuple(caps)


def join_goodput(arguments: Sequence[str]) -> list[str]:
    """Let `--goodput ttft:200 tpot:50` be one value, as it is in vLLM."""
    joined: list[str] = []
    for argument in arguments:
        is_more = bool(re.fullmatch(r"[A-Za-z0-9_]+:[^/\\]*", argument))
        if is_more and len(joined) >= 2 and joined[-2] == "--goodput":
            joined[-1] = f"{joined[-1]} {argument}"
        else:
            joined.append(argument)
    return joined


DatasetNameOption = Annotated[
    DatasetName, option(DATASET, "--dataset-name", help="Where prompts come from.")
]
DatasetPath = Annotated[
    str | None,
    option(DATASET, "--dataset-path", help="File of a sharegpt, custom or sonnet dataset."),
]
NumPrompts = Annotated[int, option(DATASET, "--num-prompts", help="Requests in each cell.")]
RandomInputLen = Annotated[
    int, option(DATASET, "--random-input-len", help="Tokens of a random prompt.")
]
RandomOutputLen = Annotated[
    int, option(DATASET, "--random-output-len", help="Tokens to generate for it.")
]
RandomRangeRatio = Annotated[
    float, option(DATASET, "--random-range-ratio", help="Spread of random lengths, relative.")
]
RandomLengthDistribution = Annotated[
    LengthDistribution,
    option(DATASET, "--random-length-distribution", help="Law of random lengths."),
]
RandomPrefixLen = Annotated[
    int, option(DATASET, "--random-prefix-len", help="Tokens that open every random prompt.")
]
ShareGPTOutputLen = Annotated[
    int | None,
    option(DATASET, "--sharegpt-output-len", help="Tokens to generate; as in the data if absent."),
]
PrefixRepetitionPrefixLen = Annotated[
    int, option(DATASET, "--prefix-repetition-prefix-len", help="Tokens of a shared prefix.")
]
PrefixRepetitionSuffixLen = Annotated[
    int, option(DATASET, "--prefix-repetition-suffix-len", help="Tokens after it.")
]
PrefixRepetitionNumPrefixes = Annotated[
    int, option(DATASET, "--prefix-repetition-num-prefixes", help="Different prefixes.")
]
PrefixRepetitionOutputLen = Annotated[
    int, option(DATASET, "--prefix-repetition-output-len", help="Tokens to generate.")
]
CustomOutputLen = Annotated[
    int, option(DATASET, "--custom-output-len", help="For a row that does not say.")
]
SonnetInputLen = Annotated[
    int, option(DATASET, "--sonnet-input-len", help="Most tokens of a sonnet prompt.")
]
SonnetOutputLen = Annotated[
    int, option(DATASET, "--sonnet-output-len", help="Tokens to generate for it.")
]
SonnetPrefixLen = Annotated[
    int, option(DATASET, "--sonnet-prefix-len", help="Tokens that all of them share.")
]
DisableShuffle = Annotated[
    bool, option(DATASET, "--disable-shuffle", help="Keep the order of the file.")
]
NoOversample = Annotated[
    bool, option(DATASET, "--no-oversample", help="Refuse a file with too few usable rows.")
]
IgnoreEOS = Annotated[
    bool | None,
    option(
        DATASET,
        "--ignore-eos/--no-ignore-eos",
        help="Generate to the full length; by default for made-up prompts only.",
        show_default=False,
    ),
]
RequestRate = Annotated[
    str,
    option(
        LOAD,
        "--request-rate",
        help="Requests per second; inf sends all at once. A list is a sweep.",
        parser=parse_rates,
        metavar="RATE[,…]",
    ),
]
MaxConcurrency = Annotated[
    str,
    option(
        LOAD,
        "--max-concurrency",
        help="Most requests in flight. A list is a sweep.",
        parser=parse_concurrencies,
        metavar="N[,…]",
    ),
]
Burstiness = Annotated[
    float, option(LOAD, "--burstiness", help="1 is Poisson, below 1 burstier, inf constant.")
]
NumWarmups = Annotated[
    int, option(LOAD, "--num-warmups", help="Requests before each cell, not measured.")
]
TimeLimit = Annotated[
    float | None, option(LOAD, "--time-limit", help="Longest time of a cell, seconds.")
]
GoodputOption = Annotated[
    str | None,
    option(
        LOAD,
        "--goodput",
        help="Objectives in ms, such as ttft:200 tpot:50 e2el:2000.",
        metavar="NAME:MS …",
    ),
]

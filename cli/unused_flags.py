"""Flags that were given and would have no effect, refused: a sweep that ignored one would be
taken for an answer to a question that was never asked.

Only flags on the command line count; a default is nobody's wish.
"""

import typer

from llmbench.bench.workloads.workload import FILE_DATASETS
from llmbench.cli.options import SettingsError

DATASET_PREFIXES = ("random_", "sharegpt_", "prefix_repetition_", "custom_", "sonnet_")
FILE_FLAGS = ("disable_shuffle", "no_oversample")


def refuse_unused_flags(ctx: typer.Context) -> None:
    """Raise SettingsError for the first flag that the others leave without effect."""
    for parameter in ctx.command.params:
        name = parameter.name
        if name is None or not was_given(ctx, name):
            continue
        reason = _reason(name, ctx)
        if reason:
            raise SettingsError(f"{parameter.opts[0]} has no effect {reason}")


def _reason(name: str, ctx: typer.Context) -> str:
    values = ctx.params
    dataset = values.get("dataset_name")
    for prefix in DATASET_PREFIXES:
        if name.startswith(prefix) and prefix != f"{dataset}_":
            return f"with --dataset-name {dataset}"
    if name in FILE_FLAGS and dataset not in FILE_DATASETS:
        return f"with --dataset-name {dataset}, which reads no file"
    manager = values.get("kv_manager")
    if name == "reservation" and manager != "contiguous":
        return f"with --kv-manager {manager}"
    if name == "prefix_cache" and values[name] != "none" and manager != "paged":
        return f"with --kv-manager {manager}"
    if name == "burstiness" and set(values["request_rate"].split(",")) == {"inf"}:
        return "with --request-rate inf"
    return ""


def was_given(ctx: typer.Context, name: str) -> bool:
    """Whether the option of this name stood on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"

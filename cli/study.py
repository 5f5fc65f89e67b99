"""`llmbench study NAME`: a ready experiment that reproduces one published comparison.

Every study is a settings dataclass, so its options are made from the fields of that class: a flag,
a type and a default each. What a flag means is said once here, for all studies. The help opens with
the question that the study's module asks.
"""

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from llmbench.bench.studies.registry import STUDIES
from llmbench.bench.studies.study import Study, StudyResult
from llmbench.cli import engine_options as e
from llmbench.cli.models import require_model
from llmbench.cli.options import (
    OUTPUT,
    Debug,
    Json,
    Quiet,
    SectionedCommand,
    Seed,
    Verbose,
    config_from,
    examples,
    option,
)
from llmbench.cli.output import Output
from llmbench.cli.progress import Progress

EXAMPLES: dict[str, tuple[str, ...]] = {
    "kv-cache": ("--output-lens 16,64,256", "--input-len 128 --repetitions 5"),
    "paged-vs-reserved": ("", "--kv-tokens 8192 --num-prompts 128"),
    "batching": ("", "--policies prefill_first,chunked --request-rate 3"),
    "prefix-cache": ("", "--prefix-lens 0,1024,4096 --suffix-len 64"),
    "quantization": (
        "--calibration train.txt --text test.txt",
        "--calibration train.txt --text test.txt --schemes gptq,smoothquant --limit-windows 20",
    ),
    "vs-transformers": ("--json", "--compile --repetitions 7"),
    "vs-lm-eval": (
        "--data-dir data",
        "--data-dir data --tasks winogrande --limit 100 --dtype float32 --json",
    ),
    "eval-invariance": (
        "--data-dir data",
        "--data-dir data --tasks mmlu --limit 2 --dtype float32",
    ),
    "step-cost": ("", "--num-seqs 1,64,256"),
    "load-generator": ("", "--request-rates 2000,4000 --json"),
}
"""Flags that make an example of each study."""

HELP = {
    "block_size": "Tokens in a KV block.",
    "batch_size": "Requests at once in the built-in engine.",
    "batch_sizes": "Requests at once, beside one stream; the last is the batch of the table.",
    "data_dir": "Folder of local data sets.",
    "calibration": "Text, JSON Lines or hub dataset to calibrate with.",
    "checkpoints": "Folder of the quantized checkpoints; those in it are used again.",
    "duration_s": "Seconds of load at each rate.",
    "gsm8k_limit": "Documents of GSM8K, whose answers are long.",
    "harness_batch_sizes": "Batch sizes of lm-eval, rising; the fastest is taken for each task.",
    "include": "Task file of your own, or folder of them.",
    "input_len": "Tokens of a prompt.",
    "input_lens": "Fewest and most tokens of a prompt.",
    "kv_tokens": "Tokens that the KV pool holds.",
    "group_size": "Input channels that share a scale, in schemes with groups.",
    "limit": "Documents of each task that has no limit of its own.",
    "limit_windows": "Windows of the text to read; 0 reads all.",
    "long_every": "One prompt in this many is a long one.",
    "long_input_len": "Tokens of a long prompt.",
    "max_model_len": "Longest sequence, which a reservation may be for.",
    "max_num_batched_tokens": "Most tokens in a step.",
    "max_num_seqs": "Most sequences in a step.",
    "max_seq_length": "Longest calibration sample, tokens.",
    "max_tokens": "Tokens that a request asks for, one of these.",
    "mean_output_len": "Mean tokens of an answer, drawn log-normally.",
    "mmlu_limit": "Documents of each of MMLU's subjects.",
    "num_calibration_samples": "Calibration samples.",
    "num_prompts": "Requests.",
    "num_seqs": "Sequences in a step.",
    "num_steps": "Steps that are timed.",
    "num_warmup_steps": "Steps before those.",
    "output_len": "Tokens to generate.",
    "output_lens": "Tokens to generate; time is read at each.",
    "peer_python": "Interpreter of lm-eval's environment.",
    "policies": "Batching policies to compare.",
    "prefix_lens": "Tokens that both requests share.",
    "probe_items": "Documents on which the fastest batch size is sought.",
    "prompt_len": "Tokens of the prompt that is computed alone.",
    "repetitions": "Times that each side is measured, in turn.",
    "request_rate": "Requests per second.",
    "request_rates": "Requests per second.",
    "schemes": "Schemes to compare with the base.",
    "short_input_len": "Tokens of the other prompts, on average.",
    "start_ups": "Starts of a fresh process to time; 0 leaves them out.",
    "suffix_len": "Tokens that follow them.",
    "tasks": "Tasks and groups, as `llmbench eval --list-tasks` names them.",
    "text": "Text file for perplexity and divergence.",
    "time_limit_s": "Longest time of a policy, seconds.",
    "transformers_batch_size": "Prompts in a call of transformers.",
    "vocab_size": "Tokens to choose from in each row.",
    "window": "Tokens of a window of the text.",
    "window_len": "Tokens of the window that is scored whole; 2048, or what the model reads.",
}

SHARED: dict[str, Any] = {
    "model": e.Model,
    "dtype": e.DTypeOption,
    "device": e.DeviceOption,
    "load_format": e.LoadFormatOption,
    "num_threads": e.NumThreads,
    "compile": e.Compile,
    "seed": Seed,
}
"""Fields that mean what they mean in every command."""

NewFolder = Annotated[
    Path | None, option(OUTPUT, "--output", "-o", help="Results folder, a new one.")
]
OUTPUT_PARAMETERS: dict[str, tuple[Any, Any]] = {
    "output": (NewFolder, None),
    "json": (Json, False),
    "quiet": (Quiet, False),
    "verbose": (Verbose, False),
    "debug": (Debug, False),
}

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog=examples("llmbench study kv-cache", "llmbench study batching ./my-model --json"),
)


def register(parent: typer.Typer) -> None:
    """Add the command group to the program."""
    for name, study in STUDIES.items():
        # The docstring of a study's module tells its story, a question first.
        story = inspect.cleandoc(sys.modules[study.measure.__module__].__doc__ or "")
        app.command(
            name,
            cls=SectionedCommand,
            help=story,
            short_help=f"{story.partition('?')[0]}?",
            epilog=examples(
                *(f"llmbench study {name} {flags}".rstrip() for flags in EXAMPLES[name])
            ),
        )(study_command(study))
    parent.add_typer(app, name="study", help="Run a ready comparison, and say what it found.")


def study_command(study: Study[Any]) -> Callable[..., None]:
    """A command function with a parameter for each field of the study's settings."""
    hints = typing.get_type_hints(study.settings_type)
    annotations: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    for field in dataclasses.fields(study.settings_type):
        hint: Any = hints[field.name]
        default: Any = field.default
        if field.name in SHARED:
            annotations[field.name] = SHARED[field.name]
        elif get_origin(hint) is tuple:
            lists[field.name] = hint
            annotations[field.name] = _list_option(field.name, hint)
            default = ",".join(_spelled(item) for item in default)
        else:
            help_text = HELP.get(field.name, "")
            annotations[field.name] = Annotated[
                hint, option("Study", _flag(field.name), help=help_text)
            ]
        defaults[field.name] = default
    # A study's own options first: they are what its reader has come for.
    annotations = dict(sorted(annotations.items(), key=lambda item: item[0] in SHARED))
    for name, (annotation, default) in OUTPUT_PARAMETERS.items():
        annotations[name], defaults[name] = annotation, default

    def command(ctx: typer.Context, **_: Any) -> None:
        tuples = {name: parse_list(ctx.params[name], hint) for name, hint in lists.items()}
        settings = config_from(study.settings_type, ctx, **tuples)
        if "model" in ctx.params:
            require_model(ctx.params["model"], ctx.params["load_format"])
        _run(study, settings, ctx.params)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("ctx", keyword, annotation=typer.Context)]
    parameters += [
        inspect.Parameter(name, keyword, annotation=annotation, default=defaults[name])
        for name, annotation in annotations.items()
    ]
    command.__annotations__ = {"ctx": typer.Context, **annotations, "return": None}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def parse_list(text: str, hint: Any) -> tuple[Any, ...]:
    """Values of `1,2,4` in the type of the tuple's items."""
    item_type = get_args(hint)[0]
    items = [item.strip() for item in text.split(",")]
    try:
        values = tuple(items if get_args(item_type) else map(item_type, items))
    except ValueError:
        raise typer.BadParameter(
            f"expected {item_type.__name__}s with commas, found `{text}`"
        ) from None
    if Ellipsis not in get_args(hint) and len(values) != len(get_args(hint)):
        raise typer.BadParameter(f"expected {len(get_args(hint))} values, found `{text}`")
    return values


def _list_option(name: str, hint: Any) -> Any:
    def check(text: str) -> str:
        parse_list(text, hint)
        return text

    item = "NAME" if get_args(get_args(hint)[0]) else "N"
    is_open = Ellipsis in get_args(hint)
    metavar = f"{item}[,…]" if is_open else ",".join(item for _ in get_args(hint))
    help_text = HELP.get(name, "")
    return Annotated[
        str, option("Study", _flag(name), help=help_text, parser=check, metavar=metavar)
    ]


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_s').replace('_', '-')}"


def _spelled(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _run(study: Study[Any], settings: Any, parameters: dict[str, Any]) -> None:
    from llmbench.bench.studies.study import run_study

    streams = Output(
        as_json=parameters["json"], quiet=parameters["quiet"], verbose=parameters["verbose"]
    )
    folder: Path = parameters["output"] or default_folder(study.name)
    num_rows = 0

    def count(row: dict[str, Any]) -> None:
        nonlocal num_rows
        num_rows += 1

    with Progress(streams) as progress:
        try:
            result = run_study(
                study,
                settings,
                folder,
                on_progress=progress.update,
                on_note=progress.note,
                on_row=count,
            )
        except KeyboardInterrupt:
            if num_rows:
                progress.note(f"the rows measured so far, {num_rows}, are in {folder}")
            raise
    _report(result, streams)


def default_folder(name: str) -> Path:
    """A new folder each time: a study is measured in one go and never resumed."""
    return Path("results") / f"study-{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _report(result: StudyResult, streams: Output) -> None:
    from llmbench.reports.study_report import report_table, write_study_report
    from llmbench.reports.tables import render

    table, finding = report_table(result.folder)
    streams.result(render(table, sys.stdout))
    streams.result(f"\n{finding[:1].upper()}{finding[1:]}.")
    written = write_study_report(result.folder)
    streams.document({**result.to_record(), "files": [str(path) for path in written]})
    streams.note("")
    for path in written:
        if path.suffix == ".png":
            streams.note(f"plot     {path}")
    streams.note(f"results  {result.folder}")

"""What `llmbench eval` refuses from the command line alone, before a file of a model is read.

A flag that the others leave without effect is refused: an evaluation that ignored one would be
taken for an answer to a question that was never asked.
"""

import difflib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from llmbench.bench.accuracy.eval_config import PERPLEXITY
from llmbench.bench.accuracy.text_source import WIKITEXT2_NAMES
from llmbench.cli.eval_options import limits_of
from llmbench.cli.options import SettingsError
from llmbench.cli.unused_flags import was_given
from llmbench.engine.config import EngineConfig

TEXT_FLAGS = ("protocol", "window", "stride", "joiner")
BASELINE_FLAGS = ("baseline_args", "cache_limit", "divergence")
NOT_LM_EVAL = (
    "dry_run",
    "baseline",
    *BASELINE_FLAGS,
    "samples",
    "samples_file",
    "text",
    *TEXT_FLAGS,
    "shard",
    "on_overflow",
    "max_gen_toks",
    "base_url",
    "format",
)
"""What the harness itself cannot be asked for."""


def check_flags(ctx: typer.Context) -> None:
    """Raise SettingsError for the first flags that cannot hold together."""
    values = ctx.params
    if values["tasks"] is None:
        error = SettingsError("expected names of tasks (--tasks)")
        error.add_note("`llmbench eval --list-tasks` lists them; --tasks open-llm-v1 takes six")
        raise error
    if values["base_url"] is not None:
        _check_server(ctx)
    elif values["model"] is None:
        error = SettingsError("expected a model to evaluate (MODEL)")
        error.add_note("such as `llmbench eval smollm2-135m --tasks arc_easy --limit 20`")
        raise error
    if values["backend"] == "lm-eval":
        _check_harness(ctx)
    if was_given(ctx, "chat_template") and not values["apply_chat_template"]:
        raise SettingsError("--chat-template has no effect without --apply-chat-template")
    _refuse_idle(ctx, TEXT_FLAGS, "text", "--text")
    _refuse_idle(ctx, BASELINE_FLAGS, "baseline", "--baseline")
    if was_given(ctx, "stride") and values["protocol"] != "strided":
        raise SettingsError(f"--stride has no effect with --protocol {values['protocol']}")
    _check_perplexity(values)
    _check_paths(values)


def check_output(output: Path) -> None:
    """Refuse an output that is in the way or cannot be written."""
    if output.exists() and not output.is_dir():
        raise SettingsError(f"{output} is a file, expected a folder (--output)")
    if output.is_dir() and any(output.iterdir()) and not (output / "manifest.json").exists():
        error = SettingsError(f"{output} holds other things than an evaluation (--output)")
        error.add_note("name a new folder, or that of an earlier run to go on with it")
        raise error
    place = output.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        raise SettingsError(f"no right to write in {place} (--output)")


def check_engine_settings(given: Mapping[str, Any]) -> None:
    """Refuse settings of `--baseline-args` that the engine does not have."""
    known = {field.name for field in fields(EngineConfig)} - {"model"}
    for name in given:
        if name not in known:
            error = SettingsError(f"the engine has no setting `{name}` (--baseline-args)")
            close = difflib.get_close_matches(name, known, n=2)
            if close:
                error.add_note(f"did you mean {' or '.join(f'`{each}`' for each in close)}?")
            raise error


def missing(path: Path, flag: str, what: str) -> SettingsError:
    """The refusal of a path that is not there, with the names beside it that resemble it."""
    error = SettingsError(f"no {what} {path} ({flag})")
    beside = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, beside, n=2)
    if close:
        error.add_note(f"did you mean {' or '.join(f'`{path.parent / name}`' for name in close)}?")
    return error


def _check_server(ctx: typer.Context) -> None:
    values = ctx.params
    if values["tokenizer"] is None:
        error = SettingsError("--base-url needs the tokenizer of the served model (--tokenizer)")
        error.add_note("prompts become token ids here: name its checkpoint folder or hub id")
        raise error
    for name in ("samples", "samples_file"):
        if was_given(ctx, name):
            raise SettingsError(
                f"--{name.replace('_', '-')} needs the tokens of answers, which servers do not "
                "send: it cannot be given with --base-url"
            )
    engine = {field.name for field in fields(EngineConfig)} - {"model", "tokenizer", "seed"}
    is_needed = values["baseline"] is not None  # which runs on the engine
    for parameter in ctx.command.params:
        if parameter.name in engine and was_given(ctx, parameter.name) and not is_needed:
            raise SettingsError(
                f"{parameter.opts[0]} has no effect with --base-url: it is for our own engine"
            )


def _check_harness(ctx: typer.Context) -> None:
    values = ctx.params
    flags = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
    for name in NOT_LM_EVAL:
        if was_given(ctx, name):
            raise SettingsError(f"{flags[name]} is not for --backend lm-eval")
    if isinstance(limits_of(values["limit"]), Mapping):
        raise SettingsError("--backend lm-eval takes one number for all tasks (--limit)")
    if PERPLEXITY in values["tasks"].split(","):
        raise SettingsError(f"lm-eval has no task {PERPLEXITY}; ours needs --backend engine")
    if importlib.util.find_spec("lm_eval") is None:
        error = SettingsError("--backend lm-eval needs lm-evaluation-harness, which is missing")
        error.add_note("pip install 'llmbench[lm-eval]'")
        raise error


def _check_paths(values: Mapping[str, Any]) -> None:
    data_dir: Path | None = values["data_dir"]
    if data_dir is not None and not data_dir.expanduser().is_dir():
        raise missing(data_dir, "--data-dir", "folder")
    for path in values["include"] or ():
        if not path.exists():
            raise missing(path, "--include", "task file or folder")
    samples: Path | None = values["samples_file"]
    if samples is not None and not samples.is_file():
        raise missing(samples, "--samples-file", "file")
    text: str | None = values["text"]
    if text is not None and text not in WIKITEXT2_NAMES and not Path(text).expanduser().is_file():
        error = missing(Path(text), "--text", "file")
        error.add_note("a UTF-8 text, JSON Lines with `text` or `page`, or the name wikitext2")
        raise error


def _check_perplexity(values: Mapping[str, Any]) -> None:
    """Say in the words of the command line what EvalConfig would say."""
    has_task = PERPLEXITY in values["tasks"].split(",")
    if has_task and values["text"] is None:
        error = SettingsError("the task perplexity needs a text (--text)")
        error.add_note("--text FILE, or --text wikitext2 with --data-dir or the hub")
        raise error
    if values["text"] is not None and not has_task:
        error = SettingsError("--text is read by the task perplexity alone, which is not named")
        error.add_note(f"--tasks {values['tasks']},{PERPLEXITY}")
        raise error


def _refuse_idle(ctx: typer.Context, names: tuple[str, ...], needs: str, flag: str) -> None:
    """Refuse flags that mean something only beside another one."""
    if ctx.params[needs] is not None:
        return
    flags = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
    for name in names:
        if was_given(ctx, name):
            raise SettingsError(f"{flags[name]} has no effect without {flag}")

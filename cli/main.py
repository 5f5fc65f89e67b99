"""The `llmbench` command: its sub-commands, and the boundary where errors become exit codes.

Exit codes: 0 done · 1 done, but a gate failed · 2 wrong usage or settings · 3 could not be done ·
4 no verdict · 130 interrupted. Python's own code for an uncaught exception is 1, which would read
as a failed gate, so `main` lets no exception pass.

Command modules import nothing heavy at the top; torch and its like load inside the functions, so
that help and typing errors answer at once.
"""

import importlib.metadata
import platform
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from llmbench.bench.errors import BenchConfigError
from llmbench.cli import convert, doctor, eval, generate, models, quantize, serve_bench, study
from llmbench.cli.options import KNOWN_ERRORS, SettingsError, examples
from llmbench.cli.output import print_error, reset_logging
from llmbench.cli.workload_options import join_goodput
from llmbench.engine.errors import ConfigError
from llmbench.quant.errors import ConfigError as QuantConfigError

DONE, USAGE, FAILED, INTERRUPTED = 0, 2, 3, 130
USAGE_ERRORS = (SettingsError, ConfigError, QuantConfigError, BenchConfigError)
REPORTED_VERSIONS = ("llmbench", "torch", "transformers", "typer")

app = typer.Typer(
    name="llmbench",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        "llmbench models pull smollm2-135m",
        "llmbench quantize smollm2-135m --method rtn --group-size 64 -o smollm2-w4",
        "llmbench serve-bench smollm2-135m --random-input-len 128 --max-concurrency 1,4,16",
    ),
)
generate.register(app)
quantize.register(app)
convert.register(app)
eval.register(app)
serve_bench.register(app)
study.register(app)
models.register(app)
doctor.register(app)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Decide how a language model is served: make it smaller, measure its latency and memory."""
    if version:
        print(importlib.metadata.version("llmbench"))
        raise typer.Exit(DONE)
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code; `arguments` are the process's own if None."""
    arguments = join_goodput(sys.argv[1:] if arguments is None else arguments)
    try:
        code = typer.main.get_command(app).main(
            arguments, prog_name="llmbench", standalone_mode=False
        )
    except (SettingsError, *KNOWN_ERRORS) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        print_error(str(error), getattr(error, "__notes__", ()))
        return USAGE if isinstance(error, USAGE_ERRORS) else FAILED
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except Exception as error:
        if hasattr(error, "format_message"):  # A usage error, of the parser that typer brings.
            return _usage_error(error)
        return _bug(error)
    finally:
        reset_logging()
    if code == INTERRUPTED:
        return _interrupted()
    return code if isinstance(code, int) else DONE


def _usage_error(error: Exception) -> int:
    message: str = error.format_message()  # type: ignore[attr-defined]
    message = message.replace("Value error, ", "")  # what pydantic puts before a parser's words
    if message.startswith("Usage:"):  # A group without a command.
        print(message, file=sys.stderr)
        return USAGE
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "llmbench"
    notes = getattr(error, "__notes__", None)
    print_error(message, notes or [f"`{path} --help` lists what it takes"])
    return USAGE


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _bug(error: Exception) -> int:
    traceback.print_exception(error)
    print(f"\nPython {platform.python_version()} on {platform.platform()}", file=sys.stderr)
    for package in REPORTED_VERSIONS:
        print(f"{package} {_version(package)}", file=sys.stderr)
    print_error(
        f"this is a fault in llmbench: {type(error).__name__}: {error}",
        ["please report it with all of the above and the output of `llmbench doctor --json`"],
    )
    return FAILED


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"

"""Options that mean and read the same in every command.

A command's signature takes these aliases, so that its help, completion and types are real; their
defaults come from the configuration dataclasses, which is the only place where defaults live.
`config_from` turns the parsed parameters back into such a dataclass by name: flag, parameter and
field are one word, spelt with `-` in the flag.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from llmbench.bench.errors import BenchError
from llmbench.engine.errors import EngineError
from llmbench.quant.errors import QuantError
from llmbench.reports.errors import ReportError

ConfigT = TypeVar("ConfigT")

KNOWN_ERRORS = (QuantError, EngineError, BenchError, ReportError)
"""What the folders raise on purpose: an error line and hints, no traceback."""


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
    lines = "\n".join(commands).splitlines()
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def unknown_name(message: str, parameter: str, close: Sequence[str]) -> typer.BadParameter:
    """A usage error for a name that does not exist, with the names that resemble it."""
    error = typer.BadParameter(message, param_hint=parameter)
    if close:
        error.add_note(f"did you mean {' or '.join(f'`{name}`' for name in close)}?")
    return error


class SettingsError(Exception):
    """A name that does not exist or flags that cannot hold together; exit code 2."""


def config_from(kind: type[ConfigT], ctx: typer.Context, **more: Any) -> ConfigT:
    """Build the config `kind` of the parsed parameters that carry its fields' names, and `more`.

    What the config refuses is the user's to change, so it becomes a SettingsError.
    """
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {name: ctx.params[name] for name in names & ctx.params.keys()}
    try:
        return kind(**{**values, **more})
    except KNOWN_ERRORS as refusal:
        flags = {p.name: p.opts[0] for p in ctx.command.params if p.name in names}

        def as_flag(word: re.Match[str]) -> str:
            # `model` and `stop` are plain words too, except as the subject of the sentence.
            is_name = "_" in word[0] or word.start() == 0
            return flags.get(word[0], word[0]) if is_name else word[0]

        message = re.sub(r"\w+", as_flag, str(refusal))
        raise as_settings_error(refusal, message) from refusal


def as_settings_error(refusal: Exception, message: str | None = None) -> SettingsError:
    """The same refusal, as one that the user's flags are to blame for."""
    error = SettingsError(message or str(refusal))
    for note in getattr(refusal, "__notes__", ()):
        error.add_note(note)
    return error


def defaults_of(kind: type) -> SimpleNamespace:
    """Defaults of a dataclass's fields, by name."""
    return SimpleNamespace(
        **{
            field.name: field.default
            for field in dataclasses.fields(kind)
            if field.default is not dataclasses.MISSING
        }
    )


def option(panel: str, *flags: str, help: str, **more: Any) -> Any:
    """An option that the help lists under the heading `panel`."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


OUTPUT = "Output"

Seed = Annotated[
    int, typer.Option("--seed", help="Makes prompts, arrivals and sampled tokens repeatable.")
]
OutputFolder = Annotated[
    Path | None,
    option(OUTPUT, "--output", "-o", help="Results folder; an existing one is resumed."),
]
Json = Annotated[bool, option(OUTPUT, "--json", help="Print the result as one JSON document.")]
Quiet = Annotated[bool, option(OUTPUT, "--quiet", "-q", help="Print the result and nothing else.")]
Verbose = Annotated[bool, option(OUTPUT, "--verbose", "-v", help="Print what is going on inside.")]
Debug = Annotated[bool, option(OUTPUT, "--debug", help="Show the traceback of an error.")]

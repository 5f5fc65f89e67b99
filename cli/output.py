"""Where text goes: the result to stdout, everything else to stderr.

Whoever pipes the output of a command gets the result and nothing besides: with `--json` one JSON
document, with `--quiet` no progress and no notes on the side. Meaning is never carried by colour
alone, so that a log file reads as well as a terminal; Rich honours NO_COLOR, FORCE_COLOR and
TERM=dumb.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

import typer

ERROR, WARNING, HINT = "red", "yellow", "cyan"
LOGGER = logging.getLogger("llmbench")


@dataclass(frozen=True, slots=True)
class Output:
    """The streams of one command, as its `--json`, `--quiet` and `--verbose` flags want them."""

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        level = logging.INFO if self.verbose else logging.WARNING
        LOGGER.setLevel(logging.ERROR if self.quiet else level)
        LOGGER.handlers = [_MessageHandler()]

    def result(self, text: str) -> None:
        """Print a part of the result; silent under `--json`, where `document` is the result."""
        if not self.as_json:
            _write_stdout(f"{text}\n")

    def piece(self, text: str) -> None:
        """Print a piece of the result without ending the line; silent under `--json`."""
        if not self.as_json:
            _write_stdout(text)

    def document(self, value: Mapping[str, object] | Sequence[object]) -> None:
        """Print the result as strict JSON under `--json`; nothing otherwise."""
        if self.as_json:
            text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
            _write_stdout(f"{text}\n")

    def note(self, text: str) -> None:
        """Print a line that is not the result, unless `--quiet`."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def warning(self, text: str) -> None:
        """Print a line that the reader should not miss, unless `--quiet`."""
        if not self.quiet:
            print_labelled("warning", text, WARNING)


def reset_logging() -> None:
    """Leave the process's logging as it was before the first `Output`."""
    LOGGER.setLevel(logging.NOTSET)
    LOGGER.handlers = []


class _MessageHandler(logging.Handler):
    """Log records in the form of the command line's own messages."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.ERROR:
            print_labelled("error", message, ERROR)
        elif record.levelno >= logging.WARNING:
            print_labelled("warning", message, WARNING)
        else:
            print(message, file=sys.stderr, flush=True)


def print_labelled(label: str, text: str, color: str) -> None:
    """Print `label: text` on stderr, the label coloured where colour is wanted."""
    if has_color(sys.stderr):
        label = typer.style(label, fg=color, bold=True)
    print(f"{label}: {text}", file=sys.stderr, flush=True)


def print_error(message: str, notes: Sequence[str] = ()) -> None:
    """Print an error and its ways out: one `error:` line, an empty line, `hint:` lines."""
    print_labelled("error", as_clause(message), ERROR)
    if notes:
        print(file=sys.stderr)
    for note in notes:
        print_labelled("hint", note, HINT)


def as_clause(message: str) -> str:
    """Bring a message into the form of an error line: lower case, no full stop at its end."""
    first = message[:1]
    # `CUDA …` and `I/O …` keep their capitals.
    if first.isupper() and message[1:2].islower():
        message = first.lower() + message[1:]
    return message[:-1] if message.endswith(".") and message.count(". ") == 0 else message


def has_color(stream: TextIO) -> bool:
    """Whether `stream` wants colour: a terminal, unless NO_COLOR or TERM=dumb, or FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _write_stdout(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has what it wanted (`… | head`). Python would complain once more on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None

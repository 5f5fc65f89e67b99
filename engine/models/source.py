"""Where a model's files are: a folder, a catalogued name, or an id of the Hugging Face hub.

Imports no torch, so that a command can refuse a wrong name or a broken checkpoint at once.
"""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmbench.engine.errors import CheckpointError
from llmbench.engine.models import catalog
from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.errors import QuantError

HUB_ID = re.compile(r"(?![.~])[\w.-]+/[\w.-]+")
CONFIG_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py"]
WEIGHT_FILES = ["*.safetensors"]
# The same weights a second time, in their authors' own layout.
IGNORED_FILES = ["consolidated*", "original/*", "onnx/*", "openvino/*"]
CONNECT_TIMEOUT_S = 5
"""Longest wait for the hub's first answer: bad input is to be named within seconds."""


def resolve_folder(model: str, *, with_weights: bool = True) -> Path:
    """The folder of a model; fetches it where `model` is a hub id that is not cached.

    Raises:
        CheckpointError: there is no such model, or it cannot be fetched.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model in catalog.CATALOG:
        if not catalog.is_pulled(model):
            error = CheckpointError(f"model {model} has not been fetched")
            error.add_note(f"run `llmbench models pull {model}`")
            raise error
        return catalog.local_path(model)
    if not HUB_ID.fullmatch(model):
        raise _unknown(model, path)
    return _from_hub(model, with_weights)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check a folder's files against one another; reads headers only.

    Raises:
        CheckpointError: names the file or tensor that is missing or broken.
    """
    with engine_errors():
        return Checkpoint.open(folder)


@contextmanager
def engine_errors() -> Iterator[None]:
    """Errors about files become the engine's, so that its callers know one tree."""
    try:
        yield
    except QuantError as error:
        raised = CheckpointError(str(error))
        for note in getattr(error, "__notes__", ()):
            raised.add_note(note)
        raise raised from error


def _unknown(model: str, path: Path) -> CheckpointError:
    error = CheckpointError(f"{model} is neither a folder nor a model that llmbench knows")
    beside = path.parent
    names = sorted(entry.name for entry in beside.iterdir()) if beside.is_dir() else []
    close = [str(beside / name) for name in difflib.get_close_matches(path.name, names, n=2)]
    close += catalog.close_names(model)
    if close:
        error.add_note(f"did you mean {' or '.join(f'`{name}`' for name in close)}?")
    error.add_note(
        "give a folder, a name from `llmbench models list`, or a hub id such as "
        "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    return error


def _from_hub(model: str, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = snapshot_download(
            model,
            allow_patterns=CONFIG_FILES + (WEIGHT_FILES if with_weights else []),
            ignore_patterns=IGNORED_FILES,
            etag_timeout=CONNECT_TIMEOUT_S,
        )
    except GatedRepoError as error:
        failure = CheckpointError(f"{model} asks for its terms to be accepted on the hub first")
        failure.add_note("accept them there, then log in with `hf auth login`")
        raise failure from error
    except RepositoryNotFoundError as error:
        failure = CheckpointError(f"{model} is no folder here and no public model of the hub")
        close = catalog.close_names(model)
        failure.add_note(
            f"did you mean `{close[0]}`?" if close else "private models need `hf auth login`"
        )
        raise failure from error
    # A refused connection, a proxy's page, a full disk: the hub's client raises many kinds.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        failure = CheckpointError(
            f"{model} is no folder here and could not be fetched from the hub: {reason}"
        )
        failure.add_note(
            "without a network, give the folder of a checkpoint, or pull the demo model where "
            "there is one: `llmbench models pull smollm2-135m`"
        )
        raise failure from error
    return Path(folder)

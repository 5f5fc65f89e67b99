"""A checkpoint's config through transformers' config classes, which know each family's defaults."""

from pathlib import Path
from typing import Any

from llmbench.engine.errors import CheckpointError, UnsupportedModelError
from llmbench.quant.checkpoint import CONFIG, read_config

LENGTH_SETTINGS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "n_ctx",
)
"""What families call the longest sequence, the usual name first."""


def load_hf_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Read config.json into the class of its `model_type`.

    Raises:
        CheckpointError: it is absent, broken or contradicts itself.
        UnsupportedModelError: transformers knows no such model.
    """
    raw = read_config(folder)
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{folder / CONFIG} has no model_type")
    if model_type not in CONFIG_MAPPING and not trust_remote_code:
        error = UnsupportedModelError(f"transformers knows no model of type {model_type!r}")
        if "auto_map" in raw:
            error.add_note("it brings its own code: --trust-remote-code runs it, if you trust it")
        raise error
    try:
        return AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    # Validation raises ValueError, TypeError, KeyError, or the hub library's own kinds.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder / CONFIG} is no valid {model_type} config: {reason}"
        ) from error


def model_length_limits(config: Any) -> tuple[int, int] | None:
    """(length that the config states, longest that its rotary scaling reaches), in tokens.

    `config` is the language model's own. None where it states no length.
    """
    stated = next(
        (value for name in LENGTH_SETTINGS if type(value := getattr(config, name, None)) is int),
        None,
    )
    if stated is None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor") or 1.0
    longest = stated
    if rope.get("rope_type") == "yarn":
        longest = int(rope["original_max_position_embeddings"] * factor)
    elif rope.get("rope_type") in ("linear", "dynamic"):
        longest = int(stated * factor)
    return stated, max(stated, longest)

"""A quantized checkpoint of any known format, ours or a peer's, read as `QuantizedWeight`s.

`quantization_config` in config.json names the format; old files keep it in a file of its own.
The tensors themselves say which layers are quantized, since the lists in configs are written
against module names of the tool that made them. Each layer's tensors are held against the
settings when the checkpoint is opened: a shape, type or name that does not fit is named before
any weight is read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import Format, Scheme
from llmbench.quant.errors import CheckpointError, FormatError
from llmbench.quant.formats.format import StoredLayer
from llmbench.quant.formats.registry import FORMATS

if TYPE_CHECKING:
    from llmbench.quant.quantized_weight import QuantizedWeight

SIDECARS = ("quantize_config.json", "quant_config.json")
"""Where AutoGPTQ and AutoAWQ keep the settings if config.json has none."""
CODE_TENSORS = (".qweight", ".weight_packed", ".SCB", ".B")
"""Ends of the names of tensors that only quantized layers have."""
GPTQ_VERSIONS: dict[str, Format] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
METHODS: dict[str, Format] = {
    "awq": "awq",
    "qqq": "qqq",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
}


class QuantizedCheckpoint:
    """The quantized layers of a checkpoint; each weight is read when asked for.

    Attributes:
        format: The format of the file.
        layers: Scheme of each quantized layer by module name, in the order of the files.
        consumed: Names of the tensors that make the quantized weights. All others, biases among
            them, are ordinary tensors of the checkpoint.
    """

    def __init__(
        self, checkpoint: Checkpoint, file_format: Format, stored: Mapping[str, StoredLayer]
    ) -> None:
        self.checkpoint = checkpoint
        self.format = file_format
        self._stored = dict(stored)
        self.layers: dict[str, Scheme] = {name: layer.scheme for name, layer in stored.items()}
        self.consumed: set[str] = {name for layer in stored.values() for name in layer.tensors}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "QuantizedCheckpoint | None":
        """The checkpoint's quantized layers, checked by their headers; None if it has none.

        Raises:
            FormatError: a method or a setting that is not supported, by name.
            CheckpointError: a tensor that is missing or of another type or shape.
        """
        settings = quantization_settings(checkpoint)
        if settings is None:
            return None
        file_format = format_of(settings)
        stored = FORMATS[file_format].stored_layers(checkpoint, settings)
        if not stored:
            raise CheckpointError(
                f"{checkpoint.folder} is {file_format} by its quantization_config, but none of "
                "its tensors is a layer of that format"
            )
        found = cls(checkpoint, file_format, stored)
        found._refuse_loose_codes()
        return found

    def shape(self, name: str) -> tuple[int, int]:
        """(out, in) features of a quantized layer."""
        return self._layer(name).shape

    def tensors(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that make a quantized layer's weight."""
        return self._layer(name).tensors

    def weight(self, name: str) -> "QuantizedWeight":
        """Read a quantized layer's weight.

        Raises:
            FormatError: zero-points or scales that contradict the settings.
        """
        return self._layer(name).read(True)

    def parameters(self, name: str) -> "QuantizedWeight":
        """Read a layer's scales, zeros and order of groups; the codes have no values (meta)."""
        return self._layer(name).read(False)

    def _refuse_loose_codes(self) -> None:
        """Refuse integers that a reader would take for weights: their scales are lost."""
        for name in self.checkpoint.names:
            is_weight = name.endswith(".weight") and name not in self.consumed
            if is_weight and self.checkpoint.dtype(name) == "int8":
                error = CheckpointError(
                    f"{name} is int8 and has no scales in {self.format}'s terms"
                )
                error.add_note("a part of the checkpoint is missing: fetch it again")
                raise error

    def _layer(self, name: str) -> StoredLayer:
        try:
            return self._stored[name]
        except KeyError:
            raise CheckpointError(
                f"{self.checkpoint.folder} has no quantized layer {name}"
            ) from None


def quantization_settings(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The checkpoint's `quantization_config`, wherever it keeps it; None if it has none.

    Raises:
        FormatError: the tensors are quantized and nothing says how.
    """
    config = checkpoint.config
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if holder.get(key):
                return _object(f"{key} of config.json", holder[key])
    codes = next((name for name in checkpoint.names if name.endswith(CODE_TENSORS)), None)
    if codes is None:
        return None
    for file_name in SIDECARS:
        path = checkpoint.folder / file_name
        if path.is_file():
            return _object(str(path), _read_json(path))
    error = FormatError(
        f"{checkpoint.folder} has the quantized tensor {codes}, but neither config.json nor "
        f"{' nor '.join(SIDECARS)} says how it is quantized"
    )
    error.add_note("fetch the checkpoint again: a configuration file is missing")
    raise error


def format_of(settings: Mapping[str, Any]) -> Format:
    """The format that a `quantization_config` names.

    Raises:
        FormatError: it is none that is read.
    """
    method = settings.get("quant_method") or settings.get("method")
    if method is None:
        # AutoGPTQ's and AutoAWQ's own files come without.
        method = "awq" if "w_bit" in settings else "gptq" if "bits" in settings else None
    if method is None and settings.get("load_in_8bit"):
        method = "bitsandbytes"
    name = str(method).lower().replace("_", "-")
    if name == "gptq":
        version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
        if settings.get("is_marlin_format"):
            version = "marlin"
        if str(version).lower() not in GPTQ_VERSIONS:
            _refuse(f"gptq files with the checkpoint_format {version!r} are not read")
        return GPTQ_VERSIONS[str(version).lower()]
    if name not in METHODS:
        _refuse(f"checkpoints with the quant_method {method!r} are not read")
    return METHODS[name]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _refuse(message: str) -> NoReturn:
    error = FormatError(message)
    error.add_note(
        "read are gptq (checkpoint_format gptq and gptq_v2), awq (gemm), qqq, compressed-tensors "
        "(pack-quantized and int-quantized integers) and bitsandbytes (8 bits)"
    )
    raise error


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is a JSON {type(value).__name__}, not an object")
    return value

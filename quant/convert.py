"""From one file format of quantized weights to another, with the same numbers or not at all.

Formats differ in which codes, scales and zero-points they can hold, so a conversion is checked
first: by headers, then by scales, zeros and order of groups of every layer. What passed is
written layer by layer into a folder beside the output, reopened by our reader and by the
independent one (verify.py), and gets its name only when every dequantized weight and every other
tensor is equal to the source's. Nothing is ever rounded: a scale that the target's type cannot
hold ends the conversion.

Activations that the source rounds to int8 are a part of it. `weights_only` leaves them out, for
formats that hold weights alone and engines that round activations by a setting of their own.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbench.quant.checkpoint import CONFIG, Checkpoint
from llmbench.quant.config import Format, Scheme
from llmbench.quant.errors import ConfigError, FormatError, QuantError, VerificationError
from llmbench.quant.formats.bnb import Bitsandbytes
from llmbench.quant.formats.format import FLOATS, Schemes, WeightFormat, exact
from llmbench.quant.formats.quantized_checkpoint import QuantizedCheckpoint
from llmbench.quant.formats.registry import FORMATS
from llmbench.quant.json_files import write_json
from llmbench.quant.linear_layers import find_linears
from llmbench.quant.safetensors_writer import (
    MAX_SHARD_BYTES,
    TensorSpec,
    spec_of,
    write_checkpoint,
)

if TYPE_CHECKING:
    import torch

    from llmbench.quant.quantized_weight import QuantizedWeight

logger = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""Called with `write` or `prove`, tensors done, and tensors in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that is done and proved.

    Attributes:
        num_layers: Quantized layers, all equal after dequantization.
        num_tensors: Other tensors, all equal byte for byte.
        notes: What readers of the file should know.
    """

    source_format: Format
    target_format: Format
    output: Path
    num_layers: int
    num_tensors: int
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...] = ()


def convert(
    source: Path,
    target: Format,
    output: Path,
    *,
    weights_only: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: OnProgress | None = None,
) -> Conversion:
    """Write the quantized checkpoint `source` in another format to the new folder `output`.

    Raises:
        ConfigError: the output exists, or there is nothing to convert.
        FormatError: the target cannot hold a layer; says which and why.
        VerificationError: the written file reads back as other numbers; nothing is left of it.
    """
    if output.exists() or output.is_symlink():
        error = ConfigError(f"the output {output} exists")
        error.add_note("name a new folder, or delete this one first")
        raise error
    quantized = _open(source)
    carried = _Carried(quantized, target, weights_only=weights_only)
    tensors = _TargetTensors(carried, on_progress or (lambda stage, done, total: None))
    with _folder_beside(output) as staged:
        write_checkpoint(staged, tensors.specs, tensors.get, max_shard_bytes=max_shard_bytes)
        _write_other_files(staged, carried, tensors)
        _prove(staged, carried, tensors)
    return Conversion(
        source_format=quantized.format,
        target_format=target,
        output=output,
        num_layers=len(quantized.layers),
        num_tensors=len(tensors.plain),
        bytes_before=quantized.checkpoint.num_bytes,
        bytes_after=sum(spec.num_bytes for spec in tensors.specs),
        notes=carried.notes,
    )


def _open(source: Path) -> QuantizedCheckpoint:
    quantized = QuantizedCheckpoint.of(Checkpoint.open(source))
    if quantized is None:
        error = ConfigError(f"{source} is not quantized: there is nothing to convert")
        error.add_note("`llmbench quantize` makes a quantized checkpoint of it, in any format")
        raise error
    return quantized


class _Carried:
    """A source's weights as the target will hold them, after every check short of the codes.

    Attributes:
        schemes: Of every linear layer of the model, None for those in full precision.
    """

    def __init__(
        self, quantized: QuantizedCheckpoint, target: Format, *, weights_only: bool
    ) -> None:
        if target == quantized.format:
            raise ConfigError(f"{quantized.checkpoint.folder} is in the format {target} already")
        self.quantized = quantized
        self.weights_only = weights_only
        self.target: WeightFormat = FORMATS[target]
        self._is_symmetric = False
        self._scale_dtype: torch.dtype | None = None
        self.notes: tuple[str, ...] = ()
        self.schemes = self._schemes()
        self._refuse(desc_act=False)  # By headers alone, before torch is imported.
        self.desc_act = self._survey()
        self.schemes = self._schemes()
        self._refuse(desc_act=self.desc_act)

    def weight(self, name: str, *, with_codes: bool = True) -> "QuantizedWeight":
        """A layer's weight with the source's numbers and the target's types.

        Raises:
            FormatError: the target cannot hold it.
        """
        read = self.quantized.weight if with_codes else self.quantized.parameters
        weight = read(name)
        if self.weights_only:
            weight = replace(weight, activations="none", outlier_threshold=None)
        if self._is_symmetric:
            weight = replace(weight, zeros=None)
        if self._scale_dtype is not None:
            weight = replace(weight, scales=exact(name, weight.scales, self._scale_dtype))
        return weight

    def _schemes(self) -> Schemes:
        others = {layer.name: None for layer in find_linears(self.quantized.checkpoint)}
        found: dict[str, Scheme | None] = {"lm_head": None, **others}
        for name, scheme in self.quantized.layers.items():
            found[name] = replace(
                scheme,
                sym=scheme.sym or self._is_symmetric,
                activations="none" if self.weights_only else scheme.activations,
            )
        return found

    def _refuse(self, *, desc_act: bool) -> None:
        for name in self.quantized.layers:
            scheme = self.schemes[name]
            assert scheme is not None
            reason = self.target.refusal(
                scheme, *self.quantized.shape(name), desc_act=desc_act, weights_exist=True
            )
            if reason is not None:
                error = FormatError(f"{reason} ({name})")
                if scheme.activations != "none" and not self.weights_only:
                    error.add_note("--weights-only leaves the rounding of activations out")
                raise error
        self.target.quantization_config(self.schemes, None, desc_act=desc_act)

    def _survey(self) -> bool:
        """Look at the parameters of all layers at once; whether groups are out of order."""
        is_symmetric, desc_act, fits = True, False, True
        thresholds: set[float | None] = set()
        wanted = self.target.scale_dtype(_model_dtype(self.quantized))
        kept: set[str] = set()
        for name in self.quantized.layers:
            weight = self.quantized.parameters(name)
            zeros = weight.zeros
            if zeros is not None and bool((zeros != weight.middle).any()):
                is_symmetric = False
            desc_act = desc_act or weight.g_idx is not None
            thresholds.add(None if self.weights_only else weight.outlier_threshold)
            kept.add(str(weight.scales.dtype).removeprefix("torch."))
            try:
                exact(name, weight.scales, wanted)
            except FormatError:
                fits = False
        self._is_symmetric = is_symmetric
        self._scale_dtype = wanted if fits else None
        if isinstance(self.target, Bitsandbytes) and len(thresholds) == 1:
            self.target = Bitsandbytes(thresholds.pop() or 0.0)
        if not fits and self.target.name == "compressed-tensors":
            held, model = " and ".join(sorted(kept)), str(wanted).removeprefix("torch.")
            self.notes = (
                f"scales stay {held}: {model}, the model's type, cannot hold them all; a reader "
                f"that casts them to {model} rounds them, as it does those of the source",
            )
        return desc_act


def _model_dtype(quantized: QuantizedCheckpoint) -> "torch.dtype":
    """The type that config.json names, else that of the first tensor of floats."""
    import torch

    config = quantized.checkpoint.config
    text = config.get("text_config")
    holders = (config, text if isinstance(text, dict) else {})
    named = [holder.get(key) for holder in holders for key in ("dtype", "torch_dtype")]
    stored = [
        quantized.checkpoint.dtype(name)
        for name in quantized.checkpoint.names
        if name not in quantized.consumed
    ]
    for name in (*named, *stored):
        name = str(name).removeprefix("torch.")
        if name in FLOATS:
            found: torch.dtype = getattr(torch, name)
            return found
    return torch.float16


class _TargetTensors:
    """The tensors of the target's file, each made when its bytes are due.

    Attributes:
        specs: Of all tensors, in the order in which they are written.
        plain: Names of those that are no part of a quantized layer.
        digests: Of the tensors written so far.
        dequantized: Of the weights written so far.
    """

    def __init__(self, carried: _Carried, on_progress: OnProgress) -> None:
        self._carried = carried
        self.on_progress = on_progress
        self._layer_of: dict[str, str] = {}
        self._made: tuple[str, Mapping[str, torch.Tensor]] = ("", {})
        self.plain: list[str] = []
        self.digests: dict[str, str] = {}
        self.dequantized: dict[str, str] = {}
        self.specs = list(self._all_specs())

    def get(self, name: str) -> "torch.Tensor":
        """A tensor of the target; those of one layer are made together."""
        from llmbench.quant.digests import tensor_digest, weight_digest

        layer = self._layer_of.get(name)
        if layer is None:
            tensor = self._carried.quantized.checkpoint.get(name)
        else:
            if self._made[0] != layer:
                weight = self._carried.weight(layer)
                self._made = (layer, self._carried.target.tensors(layer, weight))
                self.dequantized[layer] = weight_digest(weight)
            tensor = self._made[1][name]
        self.digests[name] = tensor_digest(tensor)
        self.on_progress("write", len(self.digests), len(self.specs))
        return tensor

    def _all_specs(self) -> Iterator[TensorSpec]:
        quantized = self._carried.quantized
        checkpoint = quantized.checkpoint
        layer_of = {
            tensor: layer for layer in quantized.layers for tensor in quantized.tensors(layer)
        }
        seen: set[str] = set()
        for name in checkpoint.names:
            layer = layer_of.get(name)
            if layer is None:
                self.plain.append(name)
                yield TensorSpec(name, checkpoint.dtype(name), checkpoint.shape(name))
            elif layer not in seen:
                seen.add(layer)
                # Codes without values: shapes and types come out right, and no weight is read.
                weight = self._carried.weight(layer, with_codes=False)
                for part, tensor in self._carried.target.tensors(layer, weight).items():
                    self._layer_of[part] = layer
                    yield spec_of(part, tensor)


@contextmanager
def _folder_beside(output: Path) -> Iterator[Path]:
    """A new folder that becomes `output` if all goes well, and is gone otherwise."""
    staged = output.with_name(f".{output.name}.partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staged, ignore_errors=True)  # Of a run that was killed.
        staged.mkdir()
    except OSError as error:
        raise QuantError(f"cannot write to {output.parent}: {error.strerror or error}") from error
    try:
        yield staged
        staged.rename(output)
    except OSError as error:
        raise QuantError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _write_other_files(staged: Path, carried: _Carried, tensors: _TargetTensors) -> None:
    """Config, manifest and all that the source has besides weights; config.json comes last."""
    from llmbench.quant.output_folder import MANIFEST, SCHEMA_VERSION, copy_other_files

    checkpoint = carried.quantized.checkpoint
    copy_other_files(checkpoint.folder, staged)
    arguments: Any = {"desc_act": carried.desc_act}
    for name, content in carried.target.sidecars(carried.schemes, None, **arguments).items():
        write_json(staged / name, content)
    path = checkpoint.folder / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    manifest = {"schema_version": SCHEMA_VERSION, "base_digest": None} | manifest
    converted_from = {"format": carried.quantized.format, "digest": checkpoint.digest}
    write_json(
        staged / MANIFEST,
        manifest
        | {
            "format": carried.target.name,
            "converted_from": converted_from,
            "bytes_after": sum(spec.num_bytes for spec in tensors.specs),
            "schemes": {
                name: None if scheme is None else asdict(scheme)
                for name, scheme in carried.schemes.items()
            },
            "dequantized": tensors.dequantized,
            "tensors": tensors.digests,
        },
    )
    config = {key: value for key, value in checkpoint.config.items() if key != "compression_config"}
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    config["quantization_config"] = carried.target.quantization_config(
        carried.schemes, None, **arguments
    )
    write_json(staged / CONFIG, config)


def _prove(staged: Path, carried: _Carried, tensors: _TargetTensors) -> None:
    """Reopen what was written and hold every number against the source."""
    from llmbench.quant.digests import tensor_digest, weight_digest
    from llmbench.quant.verify import verify_checkpoint

    source = carried.quantized
    written = QuantizedCheckpoint.of(Checkpoint.open(staged))
    if written is None or written.format != carried.target.name:
        raise VerificationError(f"{staged} does not read back as {carried.target.name}")
    if set(written.layers) != set(source.layers):
        raise VerificationError(f"{staged} reads back with other quantized layers")
    if set(written.checkpoint.names) != {spec.name for spec in tensors.specs}:
        raise VerificationError(f"{staged} reads back with other tensors")
    total = len(source.layers) + len(tensors.plain)
    for done, name in enumerate(source.layers, start=1):
        expected, found = source.weight(name), written.weight(name)
        if weight_digest(expected) != weight_digest(found):
            raise VerificationError(f"{name} reads back as other numbers than the source has")
        activations = "none" if carried.weights_only else expected.activations
        threshold = None if carried.weights_only else expected.outlier_threshold
        if (found.activations, found.outlier_threshold) != (activations, threshold):
            raise VerificationError(f"{name} reads back with other activations than the source has")
        tensors.on_progress("prove", done, total)
    for done, name in enumerate(tensors.plain, start=len(source.layers) + 1):
        if tensor_digest(source.checkpoint.get(name)) != tensor_digest(
            written.checkpoint.get(name)
        ):
            raise VerificationError(f"{name} reads back as another tensor than the source has")
        tensors.on_progress("prove", done, total)
    verify_checkpoint(staged)

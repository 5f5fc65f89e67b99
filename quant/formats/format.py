"""What a checkpoint format of quantized weights is, and what all of them share.

A format replaces a linear layer's `<name>.weight` by several tensors and says in config.json how
to read them. All carry the same object, a `QuantizedWeight`; they differ in which of its codes,
scales and zero-points they can hold and in how these are laid out. A format never changes a
number: what does not fit exactly is refused.

Refusals and the check of a file's headers need no torch, so that an impossible run or a broken
file is named before anything heavy is imported. Modules here import torch where they use it.

Shapes: `N` out features · `C` in features · `G` groups of a row.
"""

import importlib.metadata
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import PER_CHANNEL, Format, QuantConfig, Scheme
from llmbench.quant.errors import CheckpointError, FormatError

if TYPE_CHECKING:
    import torch

    from llmbench.quant.quantized_weight import QuantizedWeight

FLOATS = ("float16", "bfloat16", "float32")
Schemes = Mapping[str, Scheme | None]
"""Scheme of every linear layer of a model by module name, None for those in full precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """A quantized layer of a checkpoint, checked by its headers and not yet read.

    Attributes:
        shape: [N, C] of the weight that the tensors stand for.
        tensors: Names of the tensors that make the weight; a bias is not among them.
        read: Reads the weight. Without codes they have a shape and no values: enough to look at
            scales, zeros and the order of groups.
    """

    scheme: Scheme
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    read: Callable[[bool], "QuantizedWeight"]


class WeightFormat(Protocol):
    """A way to lay out quantized weights in a checkpoint."""

    @property
    def name(self) -> Format:
        """As `--format` spells it."""

    def refusal(
        self,
        scheme: Scheme,
        out_features: int,
        in_features: int,
        *,
        desc_act: bool = False,
        weights_exist: bool = False,
    ) -> str | None:
        """Why the format cannot hold such a layer; None if it can.

        `weights_exist`: zero-points need not be feared, since `check` will look at them.
        """

    def scale_dtype(self, model_dtype: "torch.dtype") -> "torch.dtype":
        """The type in which scales are stored beside a model of this type."""

    def check(self, name: str, weight: "QuantizedWeight") -> None:
        """Refuse scales, zeros or an order of groups that the format cannot hold exactly.

        Raises:
            FormatError: names the layer and the value.
        """

    def tensors(self, name: str, weight: "QuantizedWeight") -> dict[str, "torch.Tensor"]:
        """The tensors, by full name, that stand in place of `<name>.weight`.

        Raises:
            FormatError: as `check`, and for codes that do not fit.
        """

    def quantization_config(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, Any]:
        """The object under `quantization_config` in config.json.

        `run` is the run that made the weights, if one did; `desc_act`, or the run's, says that
        the groups of some layer are out of order.

        Raises:
            FormatError: the file cannot say that layers differ as these do.
        """

    def sidecars(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Further JSON files that readers look for, by file name."""

    def stored_layers(
        self, checkpoint: Checkpoint, settings: Mapping[str, Any]
    ) -> dict[str, StoredLayer]:
        """The quantized layers of a checkpoint with this `quantization_config`, by module name.

        Raises:
            FormatError: settings that are not supported, by name.
            CheckpointError: a tensor that is missing or of another type or shape.
        """


def word_count(num_codes: int, bits: int) -> int:
    """Words of a packed line, as `packing.num_words` and without torch."""
    return -(-num_codes * bits // 32)


def group_count(in_features: int, group_size: int) -> int:
    """Groups of a row; a last one that is not full counts."""
    return 1 if group_size == PER_CHANNEL else -(-in_features // group_size)


def group_refusal(scheme: Scheme, in_features: int) -> str | None:
    """Why groups of this size do not divide a row."""
    if scheme.group_size == PER_CHANNEL or in_features % scheme.group_size == 0:
        return None
    return f"group_size {scheme.group_size} does not divide in_features {in_features}"


def modules_with(checkpoint: Checkpoint, suffix: str) -> list[str]:
    """Names of the modules that have a tensor of this name, in the order of the files."""
    end = f".{suffix}"
    return [name.removesuffix(end) for name in checkpoint.names if name.endswith(end)]


def require(
    checkpoint: Checkpoint,
    name: str,
    dtypes: Collection[str],
    *shapes: tuple[int, ...],
    because: str,
) -> None:
    """Refuse a tensor that is absent or of none of the types and shapes expected.

    `because` says where the expectation comes from.
    """
    expected = f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
    if name not in checkpoint:
        raise _mismatch(f"{checkpoint.folder} lacks {name}, expected {expected} ({because})")
    if checkpoint.dtype(name) not in dtypes or checkpoint.shape(name) not in shapes:
        found = f"{checkpoint.dtype(name)} {list(checkpoint.shape(name))}"
        raise _mismatch(f"{name} is {found}, expected {expected} ({because})")


def refuse_orphans(
    checkpoint: Checkpoint, modules: Collection[str], main: str, suffixes: Iterable[str]
) -> None:
    """Refuse a scale or zero-point whose layer has no codes: the file is not whole."""
    known = set(modules)
    for suffix in suffixes:
        for module in modules_with(checkpoint, suffix):
            if module not in known:
                raise _mismatch(
                    f"{checkpoint.folder} has {module}.{suffix}, but no {module}.{main}"
                )


def check_scales(name: str, weight: "QuantizedWeight") -> None:
    """Refuse scales that are not finite and positive: a reader would compute NaN or zeros."""
    import torch

    for tensor in (weight.scales, weight.channel_scales):
        if tensor is not None and not bool((torch.isfinite(tensor) & (tensor > 0)).all()):
            worst = tensor[~(torch.isfinite(tensor) & (tensor > 0))][0].item()
            raise FormatError(f"{name} has a scale of {worst}, expected finite and above 0")


def exact(name: str, values: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
    """The same numbers in another type.

    Raises:
        FormatError: the type has no such number.
    """
    import torch

    cast = values.to(dtype)
    if not torch.equal(cast.double(), values.double()):
        lost = values[cast.double() != values.double()][0].item()
        held, wanted = (str(kind).removeprefix("torch.") for kind in (values.dtype, dtype))
        error = FormatError(f"{name} has a scale of {lost!r} in {held} that {wanted} cannot hold")
        error.add_note("rounding it would change the weights: quantize into this format instead")
        raise error
    return cast


def refuse_two_levels(name: str, weight: "QuantizedWeight", format_name: str) -> None:
    """Refuse QQQ's per-group weights, whose dequantized values round once more."""
    if weight.channel_scales is not None:
        raise FormatError(
            f"{name} has QQQ's two levels of scales, for which {format_name} has no place"
        )


def refuse_outliers(name: str, weight: "QuantizedWeight", format_name: str) -> None:
    """Refuse LLM.int8's outlier columns where a file cannot ask for them."""
    if weight.outlier_threshold is not None:
        raise FormatError(
            f"{name} keeps input channels of {weight.outlier_threshold} and above out of the "
            f"integer product, which {format_name} cannot say"
        )


def refuse_order(name: str, weight: "QuantizedWeight", format_name: str) -> None:
    """Refuse groups that are out of order where a file has no `g_idx`."""
    if weight.g_idx is not None:
        raise FormatError(f"{name} has groups out of order (g_idx), which {format_name} has not")


def no_codes(shape: tuple[int, int]) -> "torch.Tensor":
    """[N, C] uint8 that has a shape and no values, on torch's meta device."""
    import torch

    return torch.empty(shape, dtype=torch.uint8, device="meta")


def integer(settings: Mapping[str, Any], *keys: str) -> int:
    """The first of these keys that the settings have, a whole number.

    Raises:
        FormatError: none is there, or it is something else.
    """
    for key in keys:
        value = settings.get(key)
        if value is not None:
            if type(value) is not int:
                raise FormatError(f"quantization_config has {key} {value!r}, expected a number")
            return value
    raise FormatError(f"quantization_config lacks {' or '.join(keys)}")


def flag(settings: Mapping[str, Any], key: str, default: bool) -> bool:
    """A setting that is true or false, `default` where it is absent.

    Raises:
        FormatError: it is something else.
    """
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise FormatError(f"quantization_config has {key} {value!r}, expected true or false")
    return value


def is_match(pattern: str, name: str) -> bool:
    """Whether a file's regular expression matches a module's name from its start.

    Raises:
        FormatError: it is no regular expression.
    """
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise FormatError(
            f"quantization_config has {pattern!r}, no regular expression: {error}"
        ) from None


def scheme_from(**values: Any) -> Scheme:
    """The scheme that a file claims.

    Raises:
        FormatError: bits or a group size that are not supported.
    """
    from llmbench.quant.errors import ConfigError

    try:
        return Scheme(**values)
    except ConfigError as error:
        raise FormatError(f"quantization_config cannot be read: {error}") from None


def quantized_schemes(schemes: Schemes) -> dict[str, Scheme]:
    """The layers that are quantized."""
    return {name: scheme for name, scheme in schemes.items() if scheme is not None}


def most_common(schemes: Schemes) -> Scheme:
    """The scheme that most quantized layers have, the first of several."""
    found = list(quantized_schemes(schemes).values())
    if not found:
        raise FormatError("no layer is quantized: there is nothing that a format could hold")
    return max(found, key=found.count)


def only_scheme(schemes: Schemes, format_name: str) -> Scheme:
    """The one scheme of all quantized layers.

    Raises:
        FormatError: they have several, and the format has one a file.
    """
    common = most_common(schemes)
    for name, scheme in quantized_schemes(schemes).items():
        if scheme != common:
            raise FormatError(
                f"{format_name} has one scheme a file: {name} is {scheme}, others are {common}"
            )
    return common


def patterns(chosen: Collection[str], everything: Collection[str]) -> list[str]:
    """Regular expressions, to be matched against whole names, for exactly these modules.

    One expression for all blocks where all of them agree, such as
    `model\\.layers\\.\\d+\\.mlp\\.down_proj`; else the names one by one.
    """
    wanted = set(chosen)
    by_template: dict[str, list[str]] = {}
    for name in everything:
        by_template.setdefault(_template(name), []).append(name)
    found: dict[str, None] = {}
    for name in chosen:
        template = _template(name)
        is_whole = all(member in wanted for member in by_template[template])
        found[template if is_whole else re.escape(name)] = None
    return list(found)


def _template(name: str) -> str:
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))


def tool_version() -> str:
    """Name and version of what wrote a file, as GPTQModel's `meta.quantizer` spells it."""
    return f"llmbench:{importlib.metadata.version('llmbench')}"


def _mismatch(message: str) -> CheckpointError:
    error = CheckpointError(message)
    error.add_note(
        "the weights and the quantization_config are of different saves, or a part is lost"
    )
    return error

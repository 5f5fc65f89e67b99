"""compressed-tensors: the file of llm-compressor, in two containers.

`pack-quantized`: `weight_packed` int32 [N, words] holds code rows as one dense stream along the
input, `weight_scale` [N, G] the scales, `weight_shape` int64 [2] the size, and for asymmetric
weights `weight_zero_point` int32 [words, G] the zero-points, packed along the output.
`int-quantized`: `weight` is int8 [N, C] with `weight_scale` and an int8 `weight_zero_point`.
Codes are signed in the file's terms; with its offset of 2 ** (bits - 1) they are ours.

Four-bit weights with int8 activations are written packed, and each group of the config says so:
readers that infer the container from the scheme take int-quantized, a byte a weight. W8A8 alone
is written int-quantized, the container for which its kernels look.

Sources: compressed-tensors, src/compressed_tensors/compressors/pack_quantized and
naive_quantized, compressors/format.py.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import PER_CHANNEL, Format, QuantConfig, Scheme
from llmbench.quant.errors import FormatError
from llmbench.quant.formats import format as shared
from llmbench.quant.formats.config_groups import (
    INT,
    PACKED,
    TOKEN_INT8,
    ConfigGroup,
    config_groups,
    group_of,
    refuse_unsupported,
)
from llmbench.quant.formats.format import Schemes, StoredLayer

if TYPE_CHECKING:
    import torch

    from llmbench.quant.quantized_weight import QuantizedWeight


class CompressedTensors:
    """Both containers; the scheme of a layer decides."""

    name: Format = "compressed-tensors"

    def refusal(
        self,
        scheme: Scheme,
        out_features: int,
        in_features: int,
        *,
        desc_act: bool = False,
        weights_exist: bool = False,
    ) -> str | None:
        """Why the format cannot hold such a layer; None if it can."""
        if desc_act:
            return "compressed-tensors has given up groups out of order (desc_act)"
        return shared.group_refusal(scheme, in_features)

    def scale_dtype(self, model_dtype: "torch.dtype") -> "torch.dtype":
        """The model's own."""
        return model_dtype

    def check(self, name: str, weight: "QuantizedWeight") -> None:
        """Refuse groups out of order; scales are held in any type."""
        shared.refuse_two_levels(name, weight, self.name)
        shared.refuse_outliers(name, weight, self.name)
        shared.refuse_order(name, weight, self.name)
        shared.check_scales(name, weight)

    def tensors(self, name: str, weight: "QuantizedWeight") -> dict[str, "torch.Tensor"]:
        """`weight_packed` or `weight`, with scales and what else the container has."""
        import torch

        from llmbench.quant.packing import pack

        self.check(name, weight)
        if _container(weight.scheme) == INT:
            found = {
                f"{name}.weight": _signed(weight.codes, weight.middle),
                f"{name}.weight_scale": weight.scales,
            }
            if weight.zeros is not None:
                found[f"{name}.weight_zero_point"] = _signed(weight.zeros, weight.middle)
            return found
        found = {
            f"{name}.weight_packed": pack(weight.codes, weight.bits),
            f"{name}.weight_scale": weight.scales,
            f"{name}.weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
        }
        if weight.zeros is not None:
            zeros = pack(weight.zeros.t(), weight.bits).t().contiguous()
            found[f"{name}.weight_zero_point"] = zeros
        return found

    def quantization_config(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, Any]:
        """One config group a scheme; skipped layers are listed under `ignore`."""
        quantized = shared.quantized_schemes(schemes)
        shared.most_common(schemes)  # Refuses a file without quantized layers.
        kinds = list(dict.fromkeys(quantized.values()))
        groups = {}
        for index, scheme in enumerate(kinds):
            members = [name for name, other in quantized.items() if other == scheme]
            regular = [f"re:^{pattern}$" for pattern in shared.patterns(members, schemes)]
            groups[f"group_{index}"] = {
                "targets": ["Linear"] if len(kinds) == 1 else regular,
                "weights": _weight_settings(scheme, run),
                "input_activations": dict(TOKEN_INT8) if scheme.activations == "int8" else None,
                "output_activations": None,
                "format": _container(scheme),
            }
        containers = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": containers.pop() if len(containers) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [name for name, scheme in schemes.items() if scheme is None],
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def sidecars(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, dict[str, Any]]:
        """None."""
        return {}

    def stored_layers(
        self, checkpoint: Checkpoint, settings: Mapping[str, Any]
    ) -> dict[str, StoredLayer]:
        """Layers with a `weight_packed`, or with an int8 `weight` and its `weight_scale`."""
        refuse_unsupported(settings)
        groups = config_groups(settings)
        packed = shared.modules_with(checkpoint, "weight_packed")
        plain = [
            module
            for module in shared.modules_with(checkpoint, "weight_scale")
            if module not in set(packed) and f"{module}.weight" in checkpoint
        ]
        modules = sorted({*packed, *plain}, key=_position(checkpoint))
        parts = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
        shared.refuse_orphans(checkpoint, modules, "weight_packed", parts)
        is_packed = set(packed)
        layers = {}
        for module in modules:
            group = group_of(module, groups)
            build = _packed_layer if module in is_packed else _int_layer
            layers[module] = build(checkpoint, module, group)
        return layers


def _weight_settings(scheme: Scheme, run: QuantConfig | None) -> dict[str, Any]:
    is_channel = scheme.group_size == PER_CHANNEL
    is_reordered = run is not None and run.method in ("gptq", "qqq") and run.act_order
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.sym,
        "strategy": "channel" if is_channel else "group",
        "group_size": None if is_channel else scheme.group_size,
        "dynamic": False,
        "actorder": "static" if is_reordered and not is_channel else None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _container(scheme: Scheme) -> str:
    return INT if scheme.bits == 8 and scheme.activations == "int8" else PACKED


def _signed(codes: "torch.Tensor", middle: int) -> "torch.Tensor":
    import torch

    return (codes.to(torch.int16) - middle).to(torch.int8)


def _position(checkpoint: Checkpoint) -> Any:
    """Order of modules by their scales in the files."""
    places = {name: place for place, name in enumerate(checkpoint.names)}
    return lambda module: places.get(f"{module}.weight_scale", 0)


def _scale_shapes(n: int, g: int, is_per_tensor: bool) -> list[tuple[int, ...]]:
    if is_per_tensor:
        return [(1,), (), (1, 1)]
    return [(n, 1), (n,)] if g == 1 else [(n, g)]


def _packed_layer(checkpoint: Checkpoint, module: str, group: ConfigGroup) -> StoredLayer:
    scheme = group.scheme
    because = f"{group.name}: {scheme.bits} bits, group_size {scheme.group_size}"
    shared.require(checkpoint, f"{module}.weight_shape", ("int64",), (2,), because=because)
    shape = checkpoint.shape(f"{module}.weight_packed")
    n = shape[0] if len(shape) == 2 else 0
    c = _in_features(checkpoint, module, scheme)
    g = shared.group_count(c, scheme.group_size)
    words = (n, shared.word_count(c, scheme.bits))
    shared.require(checkpoint, f"{module}.weight_packed", ("int32",), words, because=because)
    shapes = _scale_shapes(n, g, group.is_per_tensor)
    shared.require(checkpoint, f"{module}.weight_scale", shared.FLOATS, *shapes, because=because)
    names = [f"{module}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape")]
    zeros = f"{module}.weight_zero_point"
    if not scheme.sym or zeros in checkpoint:
        # Early writers left zero-points unpacked.
        packed, plain = (shared.word_count(n, scheme.bits), g), shapes
        is_packed = zeros not in checkpoint or checkpoint.dtype(zeros) == "int32"
        expected = [packed] if is_packed else plain
        shared.require(checkpoint, zeros, ("int32", "int8"), *expected, because=because)
        names.append(zeros)
    if f"{module}.weight_g_idx" in checkpoint:
        shared.require(
            checkpoint, f"{module}.weight_g_idx", ("int32", "int64"), (c,), because=because
        )
        names.append(f"{module}.weight_g_idx")
    return StoredLayer(
        scheme=scheme,
        shape=(n, c),
        tensors=tuple(names),
        read=partial(_read, checkpoint, module, group, (n, c)),
    )


def _in_features(checkpoint: Checkpoint, module: str, scheme: Scheme) -> int:
    """C by the groups of the scales; a scale a row leaves it to the stored shape."""
    scales = checkpoint.shape(f"{module}.weight_scale")
    if scheme.group_size != PER_CHANNEL and len(scales) == 2 and scales[1] > 1:
        return scales[1] * scheme.group_size
    rows, columns = checkpoint.integers(f"{module}.weight_shape")
    stored = checkpoint.shape(f"{module}.weight_packed")
    if rows != stored[0] or shared.word_count(columns, scheme.bits) != stored[-1]:
        raise FormatError(
            f"{module}.weight_shape is [{rows}, {columns}], which {scheme.bits}-bit "
            f"weight_packed {list(stored)} does not hold"
        )
    return columns


def _int_layer(checkpoint: Checkpoint, module: str, group: ConfigGroup) -> StoredLayer:
    scheme = group.scheme
    because = f"{group.name}: {scheme.bits} bits, group_size {scheme.group_size}"
    shape = checkpoint.shape(f"{module}.weight")
    n, c = shape if len(shape) == 2 else (0, 0)
    g = shared.group_count(c, scheme.group_size)
    shapes = _scale_shapes(n, g, group.is_per_tensor)
    shared.require(checkpoint, f"{module}.weight", ("int8",), (n, c), because=because)
    shared.require(checkpoint, f"{module}.weight_scale", shared.FLOATS, *shapes, because=because)
    names = [f"{module}.weight", f"{module}.weight_scale"]
    zeros = f"{module}.weight_zero_point"
    if not scheme.sym or zeros in checkpoint:
        shared.require(checkpoint, zeros, ("int8",), *shapes, because=because)
        names.append(zeros)
    return StoredLayer(
        scheme=scheme,
        shape=(n, c),
        tensors=tuple(names),
        read=partial(_read, checkpoint, module, group, (n, c)),
    )


def _read(
    checkpoint: Checkpoint, module: str, group: ConfigGroup, shape: tuple[int, int], codes: bool
) -> "QuantizedWeight":
    from llmbench.quant.quantized_weight import QuantizedWeight

    scheme, (n, c) = group.scheme, shape
    g = shared.group_count(c, scheme.group_size)
    scales = checkpoint.get(f"{module}.weight_scale").reshape(1 if group.is_per_tensor else n, g)
    weight = QuantizedWeight(
        bits=scheme.bits,
        group_size=scheme.group_size,
        codes=_codes(checkpoint, module, scheme, shape) if codes else shared.no_codes(shape),
        scales=scales.expand(n, g).contiguous(),
        zeros=_zeros(checkpoint, module, scheme, n, g),
        g_idx=_group_order(checkpoint, module, scheme, c),
        activations=scheme.activations,
    )
    shared.check_scales(module, weight)
    return weight


def _codes(
    checkpoint: Checkpoint, module: str, scheme: Scheme, shape: tuple[int, int]
) -> "torch.Tensor":
    from llmbench.quant.packing import unpack

    if f"{module}.weight_packed" not in checkpoint:
        return _unsigned(f"{module}.weight", checkpoint.get(f"{module}.weight"), scheme)
    if tuple(checkpoint.integers(f"{module}.weight_shape")) != shape:
        raise FormatError(f"{module}.weight_shape differs from its scales, which say {list(shape)}")
    return unpack(checkpoint.get(f"{module}.weight_packed"), scheme.bits, shape[1])


def _zeros(
    checkpoint: Checkpoint, module: str, scheme: Scheme, n: int, g: int
) -> "torch.Tensor | None":
    """[N, G] uint8; a symmetric weight's, where a file has them, must be the middle."""
    import torch

    from llmbench.quant.packing import unpack

    name = f"{module}.weight_zero_point"
    if name not in checkpoint:
        return None
    stored = checkpoint.get(name)
    if stored.dtype == torch.int32:
        zeros = unpack(stored.t(), scheme.bits, n).t().contiguous()
    else:
        zeros = _unsigned(name, stored, scheme).reshape(-1, g).expand(n, g).contiguous()
    if not scheme.sym:
        return zeros
    if bool((zeros != 1 << (scheme.bits - 1)).any()):
        raise FormatError(f"quantization_config says symmetric, but {name} is not 0 throughout")
    return None


def _unsigned(name: str, values: "torch.Tensor", scheme: Scheme) -> "torch.Tensor":
    """Signed integers with the offset that makes them codes."""
    import torch

    codes = values.to(torch.int16) + (1 << (scheme.bits - 1))
    if bool(((codes < 0) | (codes >= 1 << scheme.bits)).any()):
        raise FormatError(
            f"{name} holds {int(values.min())} to {int(values.max())}, beyond {scheme.bits} bits"
        )
    return codes.to(torch.uint8)


def _group_order(
    checkpoint: Checkpoint, module: str, scheme: Scheme, in_features: int
) -> "torch.Tensor | None":
    """[C] int32 of files with `actorder: group`; None where groups are in order."""
    import torch

    name = f"{module}.weight_g_idx"
    if name not in checkpoint:
        return None
    g_idx = checkpoint.get(name).to(torch.int32)
    if bool((g_idx == -1).any()):  # The writer's word for "never set".
        return None
    g = shared.group_count(in_features, scheme.group_size)
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= g:
        raise FormatError(f"{name} holds {int(g_idx.max())}, expected 0 to {g - 1}")
    size = in_features if scheme.group_size == PER_CHANNEL else scheme.group_size
    in_order = torch.arange(in_features, dtype=torch.int32) // size
    return None if torch.equal(g_idx, in_order) else g_idx

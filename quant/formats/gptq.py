"""GPTQ's file: codes packed along the input, zero-points packed along the output.

`qweight` int32 [C * bits / 32, N] holds 32 / bits input channels of one output a word, `qzeros`
int32 [G, N * bits / 32] the zero-points, `scales` float16 [G, N], and `g_idx` int32 [C] the group
of each input channel, which is out of order under `desc_act` alone.

There are two versions. `gptq` stores zero-point - 1, `gptq_v2` the zero-point itself; a wrong
label shifts every weight by one step. A zero-point of 0 wraps to the highest code in version 1,
and most readers do not wrap it back, so it is read and never written. A symmetric weight has the
same zero-point everywhere, which tells the two versions apart: GPTQModel 5 and later wrote
version 2's zeros under version 1's name, and such a file is read by its zeros.

Sources: AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py; GPTQModel,
gptqmodel/nn_modules/qlinear/__init__.py (pack_block) and gptqmodel/quantization/config.py.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from llmbench.quant.checkpoint import Checkpoint
from llmbench.quant.config import PER_CHANNEL, Format, QuantConfig, Scheme
from llmbench.quant.errors import FormatError
from llmbench.quant.formats import format as shared
from llmbench.quant.formats.format import Schemes, StoredLayer

if TYPE_CHECKING:
    import torch

    from llmbench.quant.quantized_weight import QuantizedWeight

logger = logging.getLogger(__name__)

GROUP_SIZES = (PER_CHANNEL, 16, 32, 64, 128, 256, 512, 1024)
"""What GPTQModel takes (gptqmodel/quantization/config.py)."""
MULTIPLE = 32
"""Both widths of a layer in every kernel that reads these files."""
FUSED_NAMES = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
}
"""vLLM looks up overrides by the name of the fused layer, GPTQModel by the single ones."""


@dataclass(frozen=True, slots=True)
class GPTQ:
    """GPTQ's layout in one of its versions."""

    version: int = 1

    @property
    def name(self) -> Format:
        """The value of `checkpoint_format`, too."""
        return "gptq" if self.version == 1 else "gptq_v2"

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
        if scheme.activations != "none":
            return f"{self.name} files cannot say that activations are rounded to int8"
        if scheme.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            return f"{self.name} readers take groups of {sizes}, not {scheme.group_size}"
        for what, size in (("out_features", out_features), ("in_features", in_features)):
            if size % MULTIPLE:
                return f"{self.name} readers need {what} to be a multiple of 32, not {size}"
        if self.version == 1 and not scheme.sym and not weights_exist:
            return "gptq files cannot hold a zero-point of 0, which asymmetric groups may have"
        return shared.group_refusal(scheme, in_features)

    def scale_dtype(self, model_dtype: "torch.dtype") -> "torch.dtype":
        """float16 in every file."""
        import torch

        return torch.float16

    def check(self, name: str, weight: "QuantizedWeight") -> None:
        """Refuse what is not exact in float16, and a zero-point of 0 in version 1."""
        shared.refuse_two_levels(name, weight, self.name)
        shared.refuse_outliers(name, weight, self.name)
        shared.check_scales(name, weight)
        shared.exact(name, weight.scales, self.scale_dtype(weight.scales.dtype))
        if self.version == 1 and weight.zeros is not None and bool((weight.zeros == 0).any()):
            error = FormatError(f"{name} has a zero-point of 0, which gptq files cannot hold")
            error.add_note("gptq_v2 and compressed-tensors can")
            raise error

    def tensors(self, name: str, weight: "QuantizedWeight") -> dict[str, "torch.Tensor"]:
        """`qweight`, `qzeros`, `scales` and `g_idx`."""
        import torch

        from llmbench.quant.packing import pack

        self.check(name, weight)
        zeros = weight.zeros
        if zeros is None:
            zeros = torch.full(weight.scales.shape, weight.middle, dtype=torch.uint8)
        if self.version == 1:
            zeros = zeros - 1
        return {
            f"{name}.qweight": pack(weight.codes, weight.bits).t().contiguous(),
            f"{name}.qzeros": pack(zeros.t(), weight.bits),
            f"{name}.scales": weight.scales.to(torch.float16).t().contiguous(),
            f"{name}.g_idx": weight.group_of_channel().to(torch.int32),
        }

    def quantization_config(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, Any]:
        """As GPTQModel writes it; layers that differ are listed under `dynamic`."""
        common = shared.most_common(schemes)
        head = next((name for name in schemes if "." not in name), "lm_head")
        settings: dict[str, Any] = {
            "quant_method": "gptq",
            "checkpoint_format": self.name,
            "bits": common.bits,
            "group_size": common.group_size,
            "desc_act": desc_act or (run is not None and run.desc_act),
            "sym": common.sym,
            "lm_head": schemes.get(head) is not None,
            "pack_dtype": "int32",
        }
        dynamic = _dynamic(schemes, common)
        if dynamic:
            settings["dynamic"] = dynamic
        settings["meta"] = {"quantizer": [shared.tool_version()]}
        if run is not None:
            settings["meta"] |= {
                "damp_percent": run.damp_percent,
                "static_groups": run.act_order and not run.desc_act,
                "true_sequential": run.true_sequential,
            }
        return settings

    def sidecars(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, dict[str, Any]]:
        """`quantize_config.json`, which AutoGPTQ reads in place of config.json."""
        settings = self.quantization_config(schemes, run, desc_act=desc_act)
        facts = {key: value for key, value in settings["meta"].items() if key != "quantizer"}
        return {"quantize_config.json": settings | facts}

    def stored_layers(
        self, checkpoint: Checkpoint, settings: Mapping[str, Any]
    ) -> dict[str, StoredLayer]:
        """Layers with a `qweight`; the settings of each are held against its tensors."""
        modules = shared.modules_with(checkpoint, "qweight")
        shared.refuse_orphans(checkpoint, modules, "qweight", ("qzeros", "g_idx"))
        tag = _Tag(self.version)
        sym = shared.flag(settings, "sym", True)
        if settings.get("sym") is None and modules:
            sym = _is_symmetric(checkpoint, modules[0], shared.integer(settings, "bits"))
            logger.warning("quantization_config lacks sym: taken as %s from %s", sym, modules[0])
        common = {key: shared.integer(settings, key) for key in ("bits", "group_size")}
        dynamic = settings.get("dynamic") or {}
        if not isinstance(dynamic, Mapping):
            raise FormatError(f"quantization_config has dynamic {dynamic!r}, expected an object")
        layers = {}
        for module in modules:
            own = _override(dynamic, module)
            scheme = shared.scheme_from(
                bits=shared.integer({**common, **own}, "bits"),
                group_size=shared.integer({**common, **own}, "group_size"),
                sym=shared.flag(own, "sym", sym),
            )
            layers[module] = _layer(checkpoint, module, scheme, tag)
        return layers


@dataclass(slots=True)
class _Tag:
    """The version that a file claims, and whether its contradiction has been reported."""

    version: int
    has_warned: bool = False

    def contradicted(self, name: str, found: int) -> None:
        if not self.has_warned:
            self.has_warned = True
            claimed = "gptq" if self.version == 1 else "gptq_v2"
            logger.warning(
                "%s holds %s's zero-points under the label %s: they are read as what they are",
                name,
                "gptq" if found == 1 else "gptq_v2",
                claimed,
            )


def _layer(checkpoint: Checkpoint, module: str, scheme: Scheme, tag: _Tag) -> StoredLayer:
    because = f"quantization_config: bits {scheme.bits}, group_size {scheme.group_size}"
    shape = checkpoint.shape(f"{module}.qweight")
    rows, n = shape if len(shape) == 2 else (0, 0)
    c = rows * 32 // scheme.bits
    shared.require(
        checkpoint,
        f"{module}.qweight",
        ("int32",),
        (shared.word_count(c, scheme.bits), n),
        because=because,
    )
    g = shared.group_count(c, scheme.group_size)
    words = (g, shared.word_count(n, scheme.bits))
    shared.require(checkpoint, f"{module}.scales", shared.FLOATS, (g, n), because=because)
    shared.require(checkpoint, f"{module}.qzeros", ("int32",), words, because=because)
    names = [f"{module}.qweight", f"{module}.qzeros", f"{module}.scales"]
    if f"{module}.g_idx" in checkpoint:
        shared.require(
            checkpoint, f"{module}.g_idx", ("int32", "int64"), (c,), because="one group a channel"
        )
        names.append(f"{module}.g_idx")
    return StoredLayer(
        scheme=scheme,
        shape=(n, c),
        tensors=tuple(names),
        read=partial(_read, checkpoint, module, scheme, (n, c), tag),
    )


def _read(
    checkpoint: Checkpoint,
    module: str,
    scheme: Scheme,
    shape: tuple[int, int],
    tag: _Tag,
    codes: bool,
) -> "QuantizedWeight":
    from llmbench.quant.packing import unpack
    from llmbench.quant.quantized_weight import QuantizedWeight

    n, c = shape
    stored = unpack(checkpoint.get(f"{module}.qzeros"), scheme.bits, n)  # [G, N]
    weight = QuantizedWeight(
        bits=scheme.bits,
        group_size=scheme.group_size,
        codes=(
            unpack(checkpoint.get(f"{module}.qweight").t(), scheme.bits, c)
            if codes
            else shared.no_codes(shape)
        ),
        scales=checkpoint.get(f"{module}.scales").t().contiguous(),
        zeros=_zeros(module, scheme, stored, tag),
        g_idx=_group_order(checkpoint, module, scheme, c),
    )
    shared.check_scales(module, weight)
    return weight


def _zeros(module: str, scheme: Scheme, stored: "torch.Tensor", tag: _Tag) -> "torch.Tensor | None":
    """[N, G] zero-points of stored ones [G, N]; None for a symmetric weight."""
    mask = (1 << scheme.bits) - 1
    if not scheme.sym:
        zeros = stored if tag.version == 2 else (stored + 1) & mask
        return zeros.t().contiguous()
    middle = 1 << (scheme.bits - 1)
    low, high = int(stored.min()), int(stored.max())
    if low != high or low not in (middle - 1, middle):
        error = FormatError(
            f"quantization_config says sym, but {module}.qzeros holds {low} to {high}, expected "
            f"{middle - 1} (gptq) or {middle} (gptq_v2) alone"
        )
        error.add_note("set sym to false in quantization_config if these zero-points are meant")
        raise error
    found = 1 if low == middle - 1 else 2
    if found != tag.version:
        tag.contradicted(module, found)
    return None


def _group_order(
    checkpoint: Checkpoint, module: str, scheme: Scheme, in_features: int
) -> "torch.Tensor | None":
    """[C] int32; None where groups are in order, or the file says nothing."""
    import torch

    if f"{module}.g_idx" not in checkpoint:
        return None
    g_idx = checkpoint.get(f"{module}.g_idx").to(torch.int32)
    g = shared.group_count(in_features, scheme.group_size)
    if in_features and (int(g_idx.min()) < 0 or int(g_idx.max()) >= g):
        raise FormatError(
            f"{module}.g_idx holds {int(g_idx.min())} to {int(g_idx.max())}, expected 0 to {g - 1}"
        )
    size = in_features if scheme.group_size == PER_CHANNEL else scheme.group_size
    in_order = torch.arange(in_features, dtype=torch.int32) // max(size, 1)
    return None if torch.equal(g_idx, in_order) else g_idx


def _is_symmetric(checkpoint: Checkpoint, module: str, bits: int) -> bool:
    """Whether the zero-points of a layer are those of a symmetric one in either version."""
    from llmbench.quant.packing import unpack

    words = checkpoint.get(f"{module}.qzeros")
    stored = unpack(words, bits, words.shape[-1] * 32 // bits)
    low, high = int(stored.min()), int(stored.max())
    return low == high and low in ((1 << (bits - 1)) - 1, 1 << (bits - 1))


def _override(dynamic: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The settings of the first pattern that matches, as GPTQModel looks them up."""
    for pattern, own in dynamic.items():
        is_skip = pattern.startswith("-:")
        if shared.is_match(pattern.removeprefix("-:").removeprefix("+:"), module):
            return {} if is_skip or not isinstance(own, Mapping) else own
    return {}


def _dynamic(schemes: Schemes, common: Scheme) -> dict[str, dict[str, Any]]:
    """Patterns of the layers that differ from `common`: `+:` with settings, `-:` to skip."""
    inner = {name: scheme for name, scheme in schemes.items() if "." in name or scheme is not None}
    named = inner | _fused_names(inner)
    found: dict[str, dict[str, Any]] = {}
    for scheme in dict.fromkeys(named.values()):
        if scheme == common:
            continue
        members = [name for name, other in named.items() if other == scheme]
        for pattern in shared.patterns(members, named):
            if scheme is None:
                found[f"-:^{pattern}$"] = {}
            else:
                found[f"+:^{pattern}$"] = {
                    "bits": scheme.bits,
                    "group_size": scheme.group_size,
                    "sym": scheme.sym,
                }
    return found


def _fused_names(schemes: Schemes) -> dict[str, Scheme | None]:
    """Names of fused layers with the scheme that all their parts share."""
    fused: dict[str, Scheme | None] = {}
    for name in schemes:
        parent, _, last = name.rpartition(".")
        for parts, whole in FUSED_NAMES.items():
            members = [f"{parent}.{part}" for part in parts]
            if last != parts[0] or not all(member in schemes for member in members):
                continue
            if len({schemes[member] for member in members}) == 1:
                fused[f"{parent}.{whole}"] = schemes[name]
    return fused

"""AWQ's `gemm` file: codes and zero-points packed along the output, in a shuffled order.

`qweight` int32 [C, N / 8] and `qzeros` int32 [G, N / 8] hold eight neighbouring outputs a word;
nibble i of a word is output 0, 2, 4, 6, 1, 3, 5, 7 of the eight, an order that suited the first
kernel's conversion to half precision. `scales` is float16 [G, N]; zero-points are stored as they
are. The file knows 4 bits, groups in order and one group size.

The other layouts of the same name (`gemv`, `gemv_fast`, llm-awq's own) pack other dimensions and
are refused by name.

Sources: AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

from collections.abc import Mapping
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

BITS = 4
LANES = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of the eight that lies in each nibble of a word, lowest first."""
INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQ:
    """AutoAWQ's gemm layout."""

    name: Format = "awq"

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
            return "awq files cannot say that activations are rounded to int8"
        if scheme.bits != BITS:
            return f"awq files hold 4 bits, not {scheme.bits}"
        if scheme.group_size == PER_CHANNEL:
            return "awq readers fail at group_size -1: give a size"
        if desc_act:
            return "awq files have no place for groups out of order (desc_act)"
        if out_features % LANES:
            return f"awq files need out_features to be a multiple of 8, not {out_features}"
        return shared.group_refusal(scheme, in_features)

    def scale_dtype(self, model_dtype: "torch.dtype") -> "torch.dtype":
        """float16 in every file."""
        import torch

        return torch.float16

    def check(self, name: str, weight: "QuantizedWeight") -> None:
        """Refuse scales that are not exact in float16, and groups out of order."""
        shared.refuse_two_levels(name, weight, self.name)
        shared.refuse_outliers(name, weight, self.name)
        shared.refuse_order(name, weight, self.name)
        shared.check_scales(name, weight)
        shared.exact(name, weight.scales, self.scale_dtype(weight.scales.dtype))

    def tensors(self, name: str, weight: "QuantizedWeight") -> dict[str, "torch.Tensor"]:
        """`qweight`, `qzeros` and `scales`; a symmetric weight's zero-points are all 8."""
        import torch

        self.check(name, weight)
        if weight.bits != BITS:
            raise FormatError(f"{name} has {weight.bits} bits, awq files hold 4")
        zeros = weight.zeros
        if zeros is None:
            zeros = torch.full(weight.scales.shape, weight.middle, dtype=torch.uint8)
        return {
            f"{name}.qweight": _pack(weight.codes.t()),
            f"{name}.qzeros": _pack(zeros.t()),
            f"{name}.scales": weight.scales.to(torch.float16).t().contiguous(),
        }

    def quantization_config(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, Any]:
        """As AutoAWQ writes it. Zero-points are always there, which every reader takes."""
        scheme = shared.only_scheme(schemes, self.name)
        skipped = [name for name, other in schemes.items() if other is None]
        # Readers leave the head alone of themselves; null makes them infer the rest.
        has_skipped_block_layers = any("." in name for name in skipped)
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": BITS,
            "group_size": scheme.group_size,
            "zero_point": True,
            "modules_to_not_convert": skipped if has_skipped_block_layers else None,
        }

    def sidecars(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, dict[str, Any]]:
        """None."""
        return {}

    def stored_layers(
        self, checkpoint: Checkpoint, settings: Mapping[str, Any]
    ) -> dict[str, StoredLayer]:
        """Layers with a `qweight`."""
        layout = settings.get("version") or settings.get("format") or "gemm"
        if settings.get("backend") == "llm-awq":
            layout = "llm-awq"
        if str(layout).lower() != "gemm":
            error = FormatError(f"awq files of the layout {layout!r} are not read, only 'gemm'")
            error.add_note("AutoAWQ saves the same weights as gemm with version='GEMM'")
            raise error
        bits = shared.integer(settings, "bits", "w_bit")
        if bits != BITS:
            raise FormatError(f"quantization_config has {bits} bits, awq's gemm layout holds 4")
        scheme = shared.scheme_from(
            bits=BITS, group_size=shared.integer(settings, "group_size", "q_group_size"), sym=False
        )
        modules = shared.modules_with(checkpoint, "qweight")
        shared.refuse_orphans(checkpoint, modules, "qweight", ("qzeros",))
        return {module: _layer(checkpoint, module, scheme) for module in modules}


def _layer(checkpoint: Checkpoint, module: str, scheme: Scheme) -> StoredLayer:
    because = f"awq gemm, group_size {scheme.group_size}"
    shape = checkpoint.shape(f"{module}.qweight")
    c, words = shape if len(shape) == 2 else (0, 0)
    n, g = words * LANES, shared.group_count(c, scheme.group_size)
    shared.require(checkpoint, f"{module}.qweight", ("int32",), (c, words), because=because)
    shared.require(checkpoint, f"{module}.qzeros", ("int32",), (g, words), because=because)
    shared.require(checkpoint, f"{module}.scales", shared.FLOATS, (g, n), because=because)
    return StoredLayer(
        scheme=scheme,
        shape=(n, c),
        tensors=(f"{module}.qweight", f"{module}.qzeros", f"{module}.scales"),
        read=partial(_read, checkpoint, module, scheme, (n, c)),
    )


def _read(
    checkpoint: Checkpoint, module: str, scheme: Scheme, shape: tuple[int, int], codes: bool
) -> "QuantizedWeight":
    from llmbench.quant.quantized_weight import QuantizedWeight

    weight = QuantizedWeight(
        bits=BITS,
        group_size=scheme.group_size,
        codes=(
            _unpack(checkpoint.get(f"{module}.qweight")).t().contiguous()
            if codes
            else shared.no_codes(shape)
        ),
        scales=checkpoint.get(f"{module}.scales").t().contiguous(),
        zeros=_unpack(checkpoint.get(f"{module}.qzeros")).t().contiguous(),
    )
    shared.check_scales(module, weight)
    return weight


def _pack(lines: "torch.Tensor") -> "torch.Tensor":
    """Lines [G, N] of codes to words [G, N / 8], each eight in AWQ's order."""
    from llmbench.quant.packing import pack

    rows, n = lines.shape
    eights = lines.reshape(rows, n // LANES, LANES)[:, :, list(ORDER)]
    return pack(eights.reshape(rows, n), BITS)


def _unpack(words: "torch.Tensor") -> "torch.Tensor":
    """Words [G, N / 8] to codes [G, N] uint8."""
    from llmbench.quant.packing import unpack

    rows, count = words.shape
    codes = unpack(words, BITS, count * LANES).reshape(rows, count, LANES)
    return codes[:, :, list(INVERSE)].reshape(rows, count * LANES)

"""bitsandbytes' 8-bit file: LLM.int8 as transformers saves it.

`weight` int8 [N, C] row-major, `SCB` float32 [N] the largest value of each row, `weight_format`
uint8, 0 for row-major. A weight is code * SCB / 127. The product takes input channels with a
value of `llm_int8_threshold` or more out of the integers (Dettmers et al. 2022, section 3.2); a
threshold of 0 takes none.

In our terms the scale is SCB / 127, rounded to float32. Going back, several SCB give the same
scale, and some scales have none. Rows of 16-bit weights have a largest value of few digits, so
the roundest candidate is the one that was saved.

Sources: bitsandbytes, bitsandbytes/nn/modules.py (Linear8bitLt, _save_to_state_dict);
transformers, BitsAndBytesConfig.
"""

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

MIDDLE = 128
MAX_CODE = 127
DEFAULT_THRESHOLD = 6.0
"""Dettmers et al. 2022, section 3.2; transformers' default."""
ROW_MAJOR = 0
NEIGHBOURS = 2
"""Units in the last place around 127 * scale within which every SCB of a scale lies."""


@dataclass(frozen=True, slots=True)
class Bitsandbytes:
    """bitsandbytes' int8 layout, with the outlier threshold that a file is written with."""

    threshold: float = DEFAULT_THRESHOLD

    @property
    def name(self) -> Format:
        """As `--format` spells it."""
        return "bitsandbytes"

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
        if scheme.bits != 8 or not scheme.sym or scheme.group_size != PER_CHANNEL:
            return "bitsandbytes files hold symmetric weights of 8 bits, a scale a row"
        if scheme.activations != "int8":
            return "bitsandbytes files are for int8 activations"
        if desc_act:
            return "bitsandbytes files have no groups (desc_act)"
        return None

    def scale_dtype(self, model_dtype: "torch.dtype") -> "torch.dtype":
        """float32."""
        import torch

        return torch.float32

    def check(self, name: str, weight: "QuantizedWeight") -> None:
        """Refuse a scale that is no float32 / 127, and another threshold than the file's."""
        import torch

        shared.refuse_two_levels(name, weight, self.name)
        shared.refuse_order(name, weight, self.name)
        shared.check_scales(name, weight)
        if (weight.outlier_threshold or 0.0) != self.threshold:
            raise FormatError(
                f"{name} has an outlier threshold of {weight.outlier_threshold or 0.0}, the file "
                f"one of {self.threshold}"
            )
        scales = shared.exact(name, weight.scales, torch.float32)[:, 0]
        lost = row_maxima(scales) / MAX_CODE != scales
        if bool(lost.any()):
            raise FormatError(
                f"{name} has a scale of {scales[lost][0].item()!r}, which no row maximum / 127 is"
            )

    def tensors(self, name: str, weight: "QuantizedWeight") -> dict[str, "torch.Tensor"]:
        """`weight`, `SCB` and `weight_format`."""
        import torch

        self.check(name, weight)
        if (reason := self.refusal(weight.scheme, *weight.codes.shape)) is not None:
            raise FormatError(f"{reason} ({name})")
        return {
            f"{name}.weight": (weight.codes.to(torch.int16) - MIDDLE).to(torch.int8),
            f"{name}.SCB": row_maxima(weight.scales[:, 0].float()),
            f"{name}.weight_format": torch.tensor(ROW_MAJOR, dtype=torch.uint8),
        }

    def quantization_config(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, Any]:
        """As transformers writes it."""
        shared.only_scheme(schemes, self.name)
        return {
            "quant_method": "bitsandbytes",
            "load_in_8bit": True,
            "load_in_4bit": False,
            "llm_int8_threshold": self.threshold,
            "llm_int8_skip_modules": [name for name, scheme in schemes.items() if scheme is None],
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
        }

    def sidecars(
        self, schemes: Schemes, run: QuantConfig | None, *, desc_act: bool = False
    ) -> dict[str, dict[str, Any]]:
        """None."""
        return {}

    def stored_layers(
        self, checkpoint: Checkpoint, settings: Mapping[str, Any]
    ) -> dict[str, StoredLayer]:
        """Layers with an `SCB`."""
        if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
            error = FormatError("bitsandbytes files of 4 bits (nf4, fp4) are not read, only 8 bits")
            error.add_note("load the original model in transformers and quantize that")
            raise error
        threshold = settings.get("llm_int8_threshold", DEFAULT_THRESHOLD)
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or threshold < 0:
            raise FormatError(f"llm_int8_threshold is {threshold!r}, expected a number from 0")
        modules = shared.modules_with(checkpoint, "SCB")
        shared.refuse_orphans(checkpoint, modules, "SCB", ("weight_format",))
        return {module: _layer(checkpoint, module, float(threshold)) for module in modules}


def _layer(checkpoint: Checkpoint, module: str, threshold: float) -> StoredLayer:
    because = "bitsandbytes int8"
    shape = checkpoint.shape(f"{module}.weight") if f"{module}.weight" in checkpoint else ()
    n, c = shape if len(shape) == 2 else (0, 0)
    shared.require(checkpoint, f"{module}.weight", ("int8",), (n, c), because=because)
    shared.require(checkpoint, f"{module}.SCB", ("float32",), (n,), because=because)
    names = [f"{module}.weight", f"{module}.SCB"]
    if f"{module}.weight_format" in checkpoint:
        shared.require(checkpoint, f"{module}.weight_format", ("uint8",), (), (1,), because=because)
        names.append(f"{module}.weight_format")
    return StoredLayer(
        scheme=Scheme(bits=8, group_size=PER_CHANNEL, sym=True, activations="int8"),
        shape=(n, c),
        tensors=tuple(names),
        read=partial(_read, checkpoint, module, (n, c), threshold),
    )


def _read(
    checkpoint: Checkpoint, module: str, shape: tuple[int, int], threshold: float, codes: bool
) -> "QuantizedWeight":
    import torch

    from llmbench.quant.quantized_weight import QuantizedWeight

    layout = f"{module}.weight_format"
    if layout in checkpoint and int(checkpoint.get(layout)) != ROW_MAJOR:
        raise FormatError(f"{layout} is {int(checkpoint.get(layout))}, expected 0 (row-major)")
    values = shared.no_codes(shape)
    if codes:
        values = (checkpoint.get(f"{module}.weight").to(torch.int16) + MIDDLE).to(torch.uint8)
    weight = QuantizedWeight(
        bits=8,
        group_size=PER_CHANNEL,
        codes=values,
        scales=checkpoint.get(f"{module}.SCB")[:, None] / MAX_CODE,
        activations="int8",
        outlier_threshold=threshold or None,
    )
    shared.check_scales(module, weight)
    return weight


def row_maxima(scales: "torch.Tensor") -> "torch.Tensor":
    """The SCB [N] of scales [N] float32: the roundest whose 127th part is the scale.

    Where there is none, the nearest; `check` finds those.
    """
    import torch

    nearest = (scales * MAX_CODE).view(torch.int32)
    best = nearest.clone()
    best_zeros = torch.full_like(nearest, -1)
    for offset in range(-NEIGHBOURS, NEIGHBOURS + 1):
        bits = nearest + offset
        fits = bits.view(torch.float32) / MAX_CODE == scales
        lowest = bits & -bits  # The last digit that is set: the higher, the rounder.
        is_better = fits & (lowest > best_zeros)
        best = torch.where(is_better, bits, best)
        best_zeros = torch.where(is_better, lowest, best_zeros)
    return best.view(torch.float32)

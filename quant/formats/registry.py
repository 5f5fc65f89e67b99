"""The formats by name, and which of them a run writes if nobody says.

The choice follows who can load the file: GPTQ's first version is read everywhere while weights
are symmetric; asymmetric weights go into compressed-tensors, which vLLM reads and GPTQ's second
version it does not; what no kernel of the method's own format takes goes into compressed-tensors
too, and the reason says so.
"""

from collections.abc import Sequence

from llmbench.quant.config import Format, Method, Scheme
from llmbench.quant.formats.awq import AWQ
from llmbench.quant.formats.bnb import Bitsandbytes
from llmbench.quant.formats.compressed_tensors import CompressedTensors
from llmbench.quant.formats.format import WeightFormat
from llmbench.quant.formats.gptq import GPTQ
from llmbench.quant.formats.qqq import QQQ
from llmbench.quant.linear_layers import LinearLayer

Target = tuple[LinearLayer, Scheme]

FORMATS: dict[Format, WeightFormat] = {
    "gptq": GPTQ(1),
    "gptq_v2": GPTQ(2),
    "awq": AWQ(),
    "qqq": QQQ(),
    "compressed-tensors": CompressedTensors(),
    "bitsandbytes": Bitsandbytes(),
}

ONE_SCHEME: tuple[Format, ...] = ("awq", "qqq", "bitsandbytes")
"""Formats whose config has one scheme for all layers that are quantized."""

PREFERRED: dict[Method, tuple[Format, ...]] = {
    "rtn": ("gptq", "compressed-tensors", "gptq_v2"),
    "gptq": ("gptq", "compressed-tensors", "gptq_v2"),
    "awq": ("awq", "compressed-tensors"),
    "qqq": ("qqq", "compressed-tensors"),
    "smoothquant": ("compressed-tensors",),
    "int8": ("bitsandbytes",),
}

REASONS: dict[Format, str] = {
    "gptq": "the file that most programs read",
    "gptq_v2": "GPTQModel reads it",
    "awq": "the file that most programs read",
    "qqq": "the method's own file, read by QQQ and GPTQModel",
    "compressed-tensors": "compressed-tensors holds every layer",
    "bitsandbytes": "transformers reads LLM.int8 weights in this file",
}


def default_format(
    method: Method, targets: Sequence[Target], *, desc_act: bool = False
) -> tuple[Format, str]:
    """The format for a run that quantizes these layers, and why this one.

    The method's first format is given where none fits; what stands against it is then for the
    caller to find (`objection`).
    """
    choices = PREFERRED[method]
    passed_over = ""
    for name in choices:
        reason = objection(name, targets, desc_act=desc_act)
        if reason is None:
            return name, f"{passed_over}{REASONS[name]}"
        passed_over = passed_over or f"{reason}; "
    return choices[0], passed_over.removesuffix("; ")


def objection(name: Format, targets: Sequence[Target], *, desc_act: bool = False) -> str | None:
    """Why a file of this format cannot hold all these layers; None if it can."""
    for layer, scheme in targets:
        reason = FORMATS[name].refusal(
            scheme, layer.out_features, layer.in_features, desc_act=desc_act
        )
        if reason is not None:
            return f"{reason} ({layer.name})"
    if name in ONE_SCHEME and len({scheme for _, scheme in targets}) > 1:
        first, scheme = targets[0]
        other = next(layer for layer, its_own in targets if its_own != scheme)
        return (
            f"{name} files have one scheme for all layers, and {first.name} and {other.name} differ"
        )
    return None

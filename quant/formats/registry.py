"""The formats by name, and which of them a run writes if nobody says.

The choice follows who can load the file: GPTQ's first version is read everywhere while weights
are symmetric; asymmetric weights go into compressed-tensors, which vLLM reads and GPTQ's second
version it does not; what no kernel of the method's own format takes goes into compressed-tensors
too, and the reason says so.
"""

from collections.abc import Sequence

from llmbench.quant.config import Format, Method, QuantConfig, Scheme
from llmbench.quant.formats.awq import AWQ
from llmbench.quant.formats.bnb import Bitsandbytes
from llmbench.quant.formats.compressed_tensors import CompressedTensors
from llmbench.quant.formats.format import WeightFormat
from llmbench.quant.formats.gptq import GPTQ
from llmbench.quant.formats.qqq import QQQ

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
    "gptq": "symmetric GPTQ files load in vLLM, SGLang, transformers and GPTQModel",
    "gptq_v2": "GPTQModel reads it",
    "awq": "AWQ files load in vLLM, SGLang, transformers and GPTQModel",
    "qqq": "the method's own file, read by QQQ and GPTQModel",
    "compressed-tensors": "compressed-tensors files load in vLLM, SGLang and transformers",
    "bitsandbytes": "transformers reads LLM.int8 weights in this file",
}


def default_format(config: QuantConfig, shapes: Sequence[tuple[int, int]]) -> tuple[Format, str]:
    """The format for a run over layers of these (out, in) features, and why this one.

    The last of the method's formats is given where none fits; what stands against it is then
    for the caller to find (`WeightFormat.refusal`).
    """
    passed_over = ""
    choices = PREFERRED[config.method]
    for name in choices:
        reason = _objection(name, config, shapes)
        if reason is None:
            return name, f"{passed_over}{REASONS[name]}"
        passed_over = passed_over or f"{reason}; "
    return choices[-1], passed_over.removesuffix("; ")


def _objection(name: Format, config: QuantConfig, shapes: Sequence[tuple[int, int]]) -> str | None:
    schemes = _schemes(config)
    if len(schemes) > 1 and name in ONE_SCHEME:
        return f"{name} files have one scheme for all layers"
    for scheme in schemes:
        for out_features, in_features in shapes:
            reason = FORMATS[name].refusal(
                scheme, out_features, in_features, desc_act=config.desc_act
            )
            # Another scheme's group size need not divide the layers that it is not for.
            if reason is not None and (scheme == config.scheme or "group_size" not in reason):
                return reason
    return None


def _schemes(config: QuantConfig) -> list[Scheme]:
    """The run's scheme and those of its overrides."""
    own = [item.apply(config.scheme) for item in config.overrides if not item.skip]
    return list(dict.fromkeys([config.scheme, *own]))

"""What every quantization method is to the pipeline, and which class carries out which method."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from llmbench.quant.block import Block
from llmbench.quant.block_calibration import BlockCalibration
from llmbench.quant.config import QuantConfig, Scheme
from llmbench.quant.layer_report import LayerResult


class BlockMethod(Protocol):
    """Quantizes the linear layers of one block after another."""

    def quantize_block(
        self, block: Block, calibration: BlockCalibration | None, schemes: Mapping[str, Scheme]
    ) -> dict[str, LayerResult]:
        """Quantize the layers that `schemes` names.

        Each one's weight in the block becomes what its codes stand for, so that later layers
        see the quantized block. Other tensors of the block may change too (folded scales); the
        pipeline saves whatever the block holds afterwards. `calibration` is None for methods
        that look at no tokens.
        """


def make_method(
    config: QuantConfig, scale_dtype: torch.dtype, hf_text_config: Any, *, is_two_level: bool
) -> BlockMethod:
    """The method that a run asks for; `is_two_level` for QQQ's own file format."""
    if config.method == "rtn":
        from llmbench.quant.rtn import RTN

        return RTN(config, scale_dtype)
    if config.method == "gptq":
        from llmbench.quant.gptq import GPTQ

        return GPTQ(config, scale_dtype)
    if config.method == "awq":
        from llmbench.quant.awq import AWQ

        return AWQ(config, scale_dtype, hf_text_config)
    if config.method == "qqq":
        from llmbench.quant.qqq import QQQ

        return QQQ(config, scale_dtype, hf_text_config, is_two_level)
    if config.method == "smoothquant":
        from llmbench.quant.smoothquant import SmoothQuant

        return SmoothQuant(config, scale_dtype, hf_text_config)
    from llmbench.quant.llm_int8 import LLMInt8

    return LLMInt8(config)


def make_head_method(config: QuantConfig, scale_dtype: torch.dtype) -> BlockMethod:
    """What quantizes the output head, which has no neighbour to fold scales into."""
    if config.method in ("gptq", "qqq"):
        from llmbench.quant.gptq import GPTQ

        return GPTQ(config, scale_dtype)
    if config.method == "int8":
        from llmbench.quant.llm_int8 import LLMInt8

        return LLMInt8(config)
    from llmbench.quant.rtn import RTN

    return RTN(config, scale_dtype)

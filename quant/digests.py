"""Fingerprints of tensors, by which a saved checkpoint is held against what was quantized."""

import hashlib
from typing import TYPE_CHECKING

from llmbench.quant.quantized_weight import QuantizedWeight
from llmbench.quant.safetensors_writer import tensor_bytes

if TYPE_CHECKING:
    import torch


def tensor_digest(tensor: "torch.Tensor") -> str:
    """A sha256 of a tensor's bytes, row-major and little-endian."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def weight_digest(weight: QuantizedWeight) -> str:
    """A sha256 of the float32 numbers [N, C] that the codes stand for."""
    return tensor_digest(weight.dequantize())

"""TorchOps as fused C++ kernels on CPU (cpu_kernels.cpp), called through ctypes.

Each method checks what it hands over, since a wrong shape would read memory that is not there,
and passes addresses. A call costs about as much as one torch operation and replaces several.
Results equal reference.py's up to rounding. Attention is batch-invariant to the bit: see
cpu_attention.h.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmbench.engine.batch import ForwardBatch
from llmbench.engine.device import zeros
from llmbench.engine.kernels.cpu_build import load_library
from llmbench.engine.kernels.cpu_linear import ACTIVATION_CODES, CpuLinear, can_pack
from llmbench.engine.kernels.cpu_quantized_linear import CpuQuantizedLinear, unsupported_weight
from llmbench.engine.kernels.reference import ActivatedLinear, TorchOps
from llmbench.engine.layers.linear import Linear
from llmbench.engine.layers.torch_quantized_linear import fast_quantized_linear
from llmbench.engine.models.architecture import Activation, DecoderArchitecture
from llmbench.quant.quantized_weight import QuantizedWeight

# MAX_HEAD_DIM and GROUP in cpu_cache.h.
_MAX_HEAD_DIM = 512
_GROUP = 16

_int, _float, _pointer = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _RopeShape(ctypes.Structure):
    _fields_ = (
        ("tokens", _int),
        ("num_heads", _int),
        ("num_kv_heads", _int),
        ("head_dim", _int),
        ("rotary_dim", _int),
        ("norm_together", _int),
        ("eps", _float),
    )


class _AttentionBatch(ctypes.Structure):
    _fields_ = (
        ("num_seqs", _int),
        ("block_size", _int),
        ("table_width", _int),
        ("query_start_loc", _pointer),
        ("seq_lens", _pointer),
        ("block_table", _pointer),
    )


class _AttentionShape(ctypes.Structure):
    _fields_ = (
        ("num_heads", _int),
        ("num_kv_heads", _int),
        ("head_dim", _int),
        ("query_stride", _int),
        ("window", _int),
        ("scale", _float),
        ("softcap", _float),
    )


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (*[_pointer] * 3, _int, _int, _float, _int),
    "layer_norm": (*[_pointer] * 4, _int, _int, _float, _int),
    "act": (_pointer, _pointer, *[_int] * 5),
    "rope_and_store": (*[_pointer] * 8, _int),
    "attention": (*[_pointer] * 5, _int),
}
_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def unsupported_reason(arch: DecoderArchitecture | None, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run a model (None: transformers' own code runs it), if they cannot."""
    if arch is None:
        return "compiled CPU kernels belong to the native decoder, and transformers runs this model"
    if dtype not in _TYPES:
        return f"compiled CPU kernels compute in bfloat16 or float32, not {dtype}"
    if arch.head_dim > _MAX_HEAD_DIM or arch.head_dim % 2:
        return (
            f"compiled CPU kernels need an even head_dim up to {_MAX_HEAD_DIM}, not {arch.head_dim}"
        )
    return None


class CpuOps(TorchOps):
    """The operations as C++ kernels; float32 and bfloat16, on CPU."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        """Build or load the kernels for tensors of `dtype`."""
        library = load_library()
        self.dtype = dtype

        def kernel(name: str) -> Callable[..., None]:
            function: Any = getattr(library, f"{name}_{_TYPES[dtype]}")
            function.argtypes, function.restype = _ARGUMENTS[name], None
            bound: Callable[..., None] = function
            return bound

        self._rms_norm = kernel("rms_norm")
        self._layer_norm = kernel("layer_norm")
        self._act = kernel("act")
        self._rope_and_store = kernel("rope_and_store")
        self._attention = kernel("attention")
        self._library = library

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A linear layer over a weight [N, C]."""
        if can_pack(self._library, weight):
            return CpuLinear(self._library, weight, bias)
        return super().make_linear(weight, bias)

    def make_activated_linear(
        self, weight: Tensor, bias: Tensor | None, activation: Activation, *, gated: bool
    ) -> Linear:
        """A linear layer whose output is activated before it is rounded."""
        if can_pack(self._library, weight):
            return CpuLinear(self._library, weight, bias, activation=activation, gated=gated)
        return super().make_activated_linear(weight, bias, activation, gated=gated)

    def make_quantized_linear(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        activation: Activation | None = None,
        gated: bool = False,
    ) -> Linear:
        """A quantized layer on packed codes; one that the kernels do not take is torch's."""
        if self.dtype is torch.bfloat16 and unsupported_weight(weight) is None:
            return CpuQuantizedLinear(
                self._library, weight, bias, activation=activation, gated=gated
            )
        linear = fast_quantized_linear(weight, bias, self.dtype)
        if linear is None or activation is None:
            return linear or super().make_quantized_linear(
                weight, bias, activation=activation, gated=gated
            )
        return ActivatedLinear(self, linear, activation, gated=gated)

    def make_kv_cache(
        self,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """A zeroed KV cache of one layer in the layout of cpu_cache.h.

        Its shape [groups, 2 M, 16, D] tells the sizes, not the order of the elements.
        """
        _check(dtype is self.dtype and device.type == "cpu", "type of KV cache", (dtype, device))
        _check(head_dim <= _MAX_HEAD_DIM and head_dim % 2 == 0, "head_dim", head_dim)
        padded_dim = -(-head_dim // _GROUP) * _GROUP
        shape = (-(-num_slots // _GROUP), 2 * num_kv_heads, _GROUP, padded_dim)
        return zeros(shape, dtype, device)[..., :head_dim]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm of the rows of x [T, H]; weight [H] is float32."""
        size = x.shape[-1]
        _check(weight.numel() == size, "weight", weight.shape)
        out = torch.empty_like(x)
        self._rms_norm(
            out.data_ptr(),
            self._address(x),
            _float_address(weight),
            x.numel() // size,
            size,
            eps,
            torch.get_num_threads(),
        )
        return out

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Layer norm of the rows of x [T, H]; weight and bias are float32 [H]."""
        size = x.shape[-1]
        for vector in (weight, bias):
            _check(vector is None or vector.numel() == size, "weight or bias", vector)
        out = torch.empty_like(x)
        self._layer_norm(
            out.data_ptr(),
            self._address(x),
            _float_address(weight),
            _float_address(bias),
            x.numel() // size,
            size,
            eps,
            torch.get_num_threads(),
        )
        return out

    def rope_and_store(
        self,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        slot_mapping: Tensor,
        kv_cache: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        q_norm_weight: Tensor | None,
        k_norm_weight: Tensor | None,
        eps: float,
    ) -> None:
        """Norm and rotate queries and keys in place, then write keys and values at their slots."""
        num_tokens, width = qkv.shape
        _check(width == (num_heads + 2 * num_kv_heads) * head_dim, "width of qkv", width)
        _check(kv_cache.dtype is self.dtype, "kv_cache", kv_cache.dtype)
        _check(kv_cache.shape[1:] == (2 * num_kv_heads, _GROUP, head_dim), "kv_cache", kv_cache)
        _check(
            slot_mapping.dtype is torch.int64 and slot_mapping.is_contiguous(),
            "slot_mapping",
            slot_mapping.dtype,
        )
        _check(slot_mapping.numel() == num_tokens, "slot_mapping", slot_mapping.shape)
        together = False
        if q_norm_weight is not None and k_norm_weight is not None:
            together = q_norm_weight.numel() != head_dim
            for weight, heads in ((q_norm_weight, num_heads), (k_norm_weight, num_kv_heads)):
                size = heads * head_dim if together else head_dim
                _check(weight.numel() == size, "norm weight", weight.shape)
        if cos is not None and sin is not None:
            for factors in (cos, sin):
                size = num_tokens * (rotary_dim // 2)
                _check(factors.numel() == size, "cos or sin", factors.shape)
        shape = _RopeShape(num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, together, eps)
        self._rope_and_store(
            ctypes.addressof(shape),
            self._address(qkv),
            _float_address(cos),
            _float_address(sin),
            slot_mapping.data_ptr(),
            kv_cache.data_ptr(),
            _float_address(q_norm_weight),
            _float_address(k_norm_weight),
            torch.get_num_threads(),
        )

    def attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        batch: ForwardBatch,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Causal attention of each sequence's new tokens over its cached ones -> [T, N * D]."""
        num_tokens, width = q.shape
        _, doubled, group, head_dim = kv_cache.shape
        num_kv_heads = doubled // 2
        num_heads = width // head_dim
        _check(kv_cache.dtype is self.dtype and group == _GROUP, "kv_cache", kv_cache.dtype)
        _check(num_heads % num_kv_heads == 0, "number of query heads", num_heads)
        _check(q.dtype is self.dtype and q.stride(1) == 1, "q", (q.dtype, q.stride()))
        arguments = batch.derived.get("cpu_attention")
        if arguments is None:
            arguments = batch.derived["cpu_attention"] = _batch_arguments(batch)
        shape = _AttentionShape(
            num_heads,
            num_kv_heads,
            head_dim,
            q.stride(0),
            sliding_window or 0,
            scale,
            softcap or 0.0,
        )
        out = torch.empty((num_tokens, width), dtype=self.dtype)
        self._attention(
            ctypes.addressof(arguments),
            ctypes.addressof(shape),
            out.data_ptr(),
            q.data_ptr(),
            kv_cache.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def act_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, x [T, 2 I] being gate and up side by side -> [T, I]."""
        return self._activate(x, activation, x.shape[-1] // 2, True)

    def act(self, x: Tensor, activation: Activation) -> Tensor:
        """The activation of each element."""
        return self._activate(x, activation, x.shape[-1], False)

    def _activate(self, x: Tensor, activation: Activation, size: int, gated: bool) -> Tensor:
        num_tokens = x.shape[0]
        out = torch.empty((num_tokens, size), dtype=self.dtype)
        self._act(
            out.data_ptr(),
            self._address(x),
            num_tokens,
            size,
            ACTIVATION_CODES[activation],
            gated,
            torch.get_num_threads(),
        )
        return out

    def _address(self, x: Tensor) -> int:
        if x.dtype is not self.dtype or not x.is_contiguous():
            _check(False, f"contiguous {self.dtype} tensor", (x.dtype, x.stride()))
        return x.data_ptr()


def _float_address(x: Tensor | None) -> int | None:
    if x is None:
        return None
    _check(x.dtype is torch.float32 and x.is_contiguous(), "float32 argument", x.dtype)
    return x.data_ptr()


def _batch_arguments(batch: ForwardBatch) -> _AttentionBatch:
    """The batch as the kernel sees it; the batch keeps the tensors alive."""
    tensors = (batch.query_start_loc, batch.seq_lens, batch.block_table)
    for tensor in tensors:
        _check(tensor.dtype is torch.int32 and tensor.stride(-1) == 1, "batch", tensor.dtype)
    num_seqs = batch.num_seqs
    _check(batch.query_start_loc.numel() == num_seqs + 1, "query_start_loc", num_seqs)
    _check(batch.seq_lens.numel() == num_seqs, "seq_lens", num_seqs)
    width = -(-max(batch.context_lens) // batch.block_size)
    _check(batch.block_table.shape[0] == num_seqs, "block_table", batch.block_table.shape)
    _check(batch.block_table.shape[1] >= width, "block_table", batch.block_table.shape)
    return _AttentionBatch(
        num_seqs,
        batch.block_size,
        batch.block_table.stride(0),
        *(tensor.data_ptr() for tensor in tensors),
    )


def _check(holds: bool, name: str, found: object) -> None:
    if not holds:
        raise ValueError(f"CPU kernel cannot take {name}: {found}")

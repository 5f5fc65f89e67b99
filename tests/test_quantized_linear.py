"""Quantized linear layers against their definition in quant/linear.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbench.engine.kernels.eager import EagerOps
from llmbench.engine.kernels.reference import ACTIVATIONS, TorchOps
from llmbench.engine.layers.linear import Linear
from llmbench.engine.layers.quantized_linear import PackedWeight
from llmbench.engine.layers.torch_quantized_linear import FEW_ROWS, fast_quantized_linear
from llmbench.engine.models.linear_weights import SplitLinear, make_linear, stack
from llmbench.quant.config import Scheme
from llmbench.quant.linear import quantized_linear
from llmbench.quant.quantized_weight import QuantizedWeight

SHAPES = [(64, 64), (48, 96), (33, 160), (1, 32), (200, 576)]


def make(
    n: int, c: int, scheme: Scheme, *, permuted: bool = False, dtype: torch.dtype = torch.half
) -> QuantizedWeight:
    """A weight of random codes, scales and zeros."""
    generator = torch.Generator().manual_seed(n * 1000 + c)
    groups = 1 if scheme.group_size == -1 else -(-c // scheme.group_size)

    def draw(*shape: int) -> Tensor:
        return torch.randint(1 << scheme.bits, shape, generator=generator).to(torch.uint8)

    g_idx = None
    if permuted:
        channels = torch.arange(c) // scheme.group_size
        g_idx = channels[torch.randperm(c, generator=generator)].int()
    return QuantizedWeight(
        bits=scheme.bits,
        group_size=scheme.group_size,
        codes=draw(n, c),
        scales=(torch.rand(n, groups, generator=generator) * 0.05 + 0.01).to(dtype),
        zeros=None if scheme.sym else draw(n, groups),
        g_idx=g_idx,
        activations=scheme.activations,
    )


def inputs(rows: int, c: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, c, generator=generator).to(dtype)


def int8(bits: int, group_size: int, *, sym: bool = True) -> Scheme:
    return Scheme(bits=bits, group_size=group_size, sym=sym, activations="int8")


ALL_SCHEMES = [
    *(
        Scheme(bits=b, group_size=g, sym=s)
        for b in (2, 3, 4, 8)
        for g in (-1, 32)
        for s in (True, False)
    ),
    *(int8(bits, size, sym=sym) for bits in (4, 8) for size in (-1, 32) for sym in (True, False)),
]


@pytest.mark.parametrize("scheme", ALL_SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_computes_the_definition(shape: tuple[int, int], scheme: Scheme) -> None:
    weight = make(*shape, scheme)
    x = inputs(3, shape[1], torch.float32)
    bias = torch.randn(shape[0])
    linear = TorchOps().make_quantized_linear(weight, bias)
    expected = quantized_linear(x, weight, bias)
    torch.testing.assert_close(linear(x), expected, atol=1e-5, rtol=1e-5)
    residual = torch.randn(3, shape[0])
    added = linear.add_to(residual.clone(), x)
    torch.testing.assert_close(added, residual + expected, atol=1e-5, rtol=1e-5)
    assert linear.kernel == "reference"


@pytest.mark.parametrize("scheme", ALL_SCHEMES, ids=str)
def test_packed_weight_comes_back_and_takes_its_true_width(scheme: Scheme) -> None:
    weight = make(64, 96, scheme)
    packed = PackedWeight(weight)
    again = packed.unpacked()
    assert torch.equal(again.codes, weight.codes)
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert torch.equal(packed.dequantize(torch.float32), weight.dequantize())
    assert again.scheme == weight.scheme
    # Words of 32 bits fill up lines of zeros alone: 96 codes of any width fill theirs.
    filling = 0 if weight.zeros is None else 64 * 4
    assert weight.nbytes <= packed.nbytes <= weight.nbytes + filling
    held = packed._empty.codes.untyped_storage().nbytes()
    assert held < 64 * 96, "a view keeps the unpacked codes in memory"


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("ops", [TorchOps(), EagerOps(torch.float32)], ids=lambda ops: ops.name)
@pytest.mark.parametrize("scheme", [Scheme(group_size=32), int8(8, -1)], ids=str)
def test_activation_follows_the_product(scheme: Scheme, ops: TorchOps, activation: Any) -> None:
    weight, x = make(64, 96, scheme), inputs(4, 96, torch.float32)
    plain = quantized_linear(x, weight)
    gated = ops.make_quantized_linear(weight, None, activation=activation, gated=True)
    expected = ACTIVATIONS[activation](plain[:, :32]) * plain[:, 32:]
    torch.testing.assert_close(gated(x), expected, atol=1e-4, rtol=1e-4)
    single = ops.make_quantized_linear(weight, None, activation=activation)
    torch.testing.assert_close(single(x), ACTIVATIONS[activation](plain), atol=1e-4, rtol=1e-4)


INT4_SCHEMES = [
    Scheme(bits=bits, group_size=size, sym=sym)
    for bits, size in [(4, 32), (4, 64), (4, 128), (4, 256), (4, 512), (4, -1), (3, 32), (2, 64)]
    for sym in (True, False)
]


@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS + 3])
@pytest.mark.parametrize("scheme", INT4_SCHEMES, ids=str)
def test_packed_4_bit_kernel_computes_the_definition(scheme: Scheme, rows: int) -> None:
    for n, c in ((64, 512), (100, 1024)):
        weight, x = make(n, c, scheme), inputs(rows, c, torch.bfloat16)
        bias = torch.randn(n).bfloat16()
        linear = fast_quantized_linear(weight, bias, torch.bfloat16)
        assert linear is not None
        assert linear.kernel == "int4pack"
        check_bfloat16(linear, x, weight, bias)


def check_bfloat16(
    linear: Linear, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None
) -> None:
    """Within the rounding of bfloat16 weights and outputs, row by row."""
    expected = quantized_linear(x.float(), weight, None if bias is None else bias.float())
    found = linear(x)
    assert found.dtype is torch.bfloat16
    assert found.shape == expected.shape
    errors = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.max()) < 0.01
    residual = torch.randn_like(found)
    added = linear.add_to(residual.clone(), x)
    torch.testing.assert_close(added, residual + found, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("rows", [2, FEW_ROWS + 1])
def test_packed_4_bit_kernel_reads_groups_out_of_order(rows: int) -> None:
    weight = make(80, 192, Scheme(group_size=64, sym=False), permuted=True)
    linear = fast_quantized_linear(weight, None, torch.bfloat16)
    assert linear is not None
    check_bfloat16(linear, inputs(rows, 192, torch.bfloat16), weight)


def test_packed_4_bit_weight_is_held_once() -> None:
    weight = make(1024, 1024, Scheme(group_size=64))
    linear = fast_quantized_linear(weight, None, torch.bfloat16)
    assert linear is not None
    tensors = [value for value in vars(linear).values() if isinstance(value, Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == linear.weight_bytes
    assert linear.weight_bytes <= 0.32 * 2 * 1024 * 1024


def uneven(weight: QuantizedWeight) -> QuantizedWeight:
    """One channel more in the first group, and one less in the second."""
    assert weight.g_idx is not None
    g_idx = weight.g_idx.clone()
    g_idx[(g_idx == 1).nonzero()[0]] = 0
    return replace(weight, g_idx=g_idx)


WITHOUT_KERNEL: dict[str, Callable[[], tuple[QuantizedWeight, torch.dtype]]] = {
    "float32": lambda: (make(64, 64, Scheme(group_size=32)), torch.float32),
    "group of 16": lambda: (make(64, 64, Scheme(group_size=16)), torch.bfloat16),
    "row of 80 channels": lambda: (make(64, 80, Scheme(group_size=-1)), torch.bfloat16),
    "8 bits": lambda: (make(64, 64, Scheme(bits=8, group_size=32)), torch.bfloat16),
    "uneven groups": lambda: (
        uneven(make(64, 64, Scheme(group_size=32), permuted=True)),
        torch.bfloat16,
    ),
    "8 bits with zeros": lambda: (make(64, 64, int8(8, -1, sym=False)), torch.bfloat16),
}


@pytest.mark.parametrize("case", WITHOUT_KERNEL)
def test_what_torch_has_no_kernel_for_goes_to_the_reference(case: str) -> None:
    weight, dtype = WITHOUT_KERNEL[case]()
    linear = EagerOps(dtype).make_quantized_linear(weight, None)
    assert linear.kernel == "reference"
    x = inputs(3, weight.in_features, dtype)
    expected = quantized_linear(x.float(), weight)
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(linear(x).float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", [int8(8, -1), int8(4, -1), int8(4, -1, sym=False)], ids=str)
def test_integer_kernel_equals_the_definition_to_the_bit(
    scheme: Scheme, shape: tuple[int, int], rows: int, dtype: torch.dtype
) -> None:
    weight, x = make(*shape, scheme), inputs(rows, shape[1], dtype)
    bias = torch.randn(shape[0]).to(dtype)
    linear = fast_quantized_linear(weight, bias, dtype)
    assert linear is not None
    assert linear.kernel == "int_mm"
    assert torch.equal(linear(x), quantized_linear(x, weight, bias))


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("scheme", [int8(4, 32), int8(4, 32, sym=False), int8(8, 32)], ids=str)
def test_integer_kernel_sums_groups_as_the_definition(scheme: Scheme, permuted: bool) -> None:
    weight, x = make(48, 96, scheme, permuted=permuted), inputs(5, 96, torch.float32)
    linear = fast_quantized_linear(weight, None, torch.float32)
    assert linear is not None
    assert linear.kernel == "int_mm"
    torch.testing.assert_close(linear(x), quantized_linear(x, weight), atol=1e-5, rtol=1e-5)


def test_integer_kernel_takes_two_levels_to_the_bit() -> None:
    weight = replace(
        make(48, 128, int8(4, 64)),
        scales=torch.rand(48, 2).mul(10).add(1).half(),
        channel_scales=torch.rand(48) * 0.01,
    )
    x = inputs(5, 128, torch.float32)
    linear = fast_quantized_linear(weight, None, torch.float32)
    assert linear is not None
    assert torch.equal(linear(x), quantized_linear(x, weight))


@pytest.mark.parametrize("ops", [TorchOps(), EagerOps(torch.float32)], ids=lambda ops: ops.name)
def test_outliers_are_multiplied_in_full_precision(ops: TorchOps) -> None:
    weight = replace(make(48, 96, int8(8, -1)), outlier_threshold=6.0)
    x = inputs(5, 96, torch.float32)
    x[1, 17], x[1, 60], x[3, 17] = 40.0, -7.5, 6.0
    linear = ops.make_quantized_linear(weight, None)
    torch.testing.assert_close(linear(x), quantized_linear(x, weight), atol=1e-4, rtol=1e-4)
    dense = x @ weight.dequantize().t()
    rounded = quantized_linear(x, replace(weight, outlier_threshold=None))
    better, worse = (linear(x)[1] - dense[1]).norm(), (rounded[1] - dense[1]).norm()
    assert float(better) < 0.3 * float(worse)
    # A token's result does not depend on the outliers of another.
    torch.testing.assert_close(linear(x[:1]), linear(x)[:1], atol=1e-5, rtol=1e-5)


def test_token_of_zeros_gives_zeros() -> None:
    weight, x = make(48, 96, int8(8, -1)), torch.zeros(2, 96)
    assert torch.equal(EagerOps(torch.float32).make_quantized_linear(weight, None)(x), x[:, :48])


def test_parts_that_share_a_scheme_become_one_weight() -> None:
    parts = [make(n, 64, Scheme(group_size=32, sym=False)) for n in (64, 32, 32)]
    one = stack(parts)
    assert isinstance(one, QuantizedWeight)
    assert torch.equal(one.dequantize(), torch.cat([part.dequantize() for part in parts]))


@pytest.mark.parametrize("gated", [False, True])
def test_parts_of_different_kinds_run_apart(gated: bool) -> None:
    quantized, tensor = make(32, 64, Scheme(group_size=32)), torch.randn(32, 64)
    weight, bias, x = stack([quantized, tensor]), torch.randn(64), torch.randn(3, 64)
    assert isinstance(weight, tuple)
    ops = EagerOps(torch.float32)
    plain = make_linear(ops, weight, bias)
    assert isinstance(plain, SplitLinear)
    assert plain.kernel == "split(reference,torch)"
    dense = torch.cat([quantized.dequantize(), tensor])
    expected = x @ dense.t() + bias
    torch.testing.assert_close(plain(x), expected, atol=1e-5, rtol=1e-5)
    activated = make_linear(ops, weight, bias, "silu", gated=gated)(x)
    silu = torch.nn.functional.silu
    wanted = silu(expected[:, :32]) * expected[:, 32:] if gated else silu(expected)
    torch.testing.assert_close(activated, wanted, atol=1e-5, rtol=1e-5)

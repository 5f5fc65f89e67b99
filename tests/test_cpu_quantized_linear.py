"""Compiled quantized layers against quant/linear.py, and their independence of the batch."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from llmbench.engine.errors import KernelBuildError
from llmbench.engine.kernels.cpu_ops import CpuOps
from llmbench.engine.kernels.cpu_quantized_linear import CpuQuantizedLinear, unsupported_weight
from llmbench.engine.kernels.reference import ACTIVATIONS, TorchOps
from llmbench.engine.models.architecture import Activation
from llmbench.quant.config import Activations
from llmbench.quant.linear import quantize_activations, quantized_linear
from llmbench.quant.quantized_weight import QuantizedWeight

ROWS = (1, 2, 7, 8, 16, 17, 33, 130)


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    try:
        return CpuOps(torch.bfloat16)
    except KernelBuildError as error:
        pytest.skip(str(error))


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


def make_weight(
    outputs: int,
    inputs: int,
    *,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    activations: Activations = "none",
    dtype: torch.dtype = torch.float16,
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(outputs + inputs + bits)
    groups = 1 if group_size == -1 else -(-inputs // group_size)

    def codes(columns: int) -> Tensor:
        shape = (outputs, columns)
        return torch.randint(1 << bits, shape, generator=generator, dtype=torch.uint8)

    scales = (torch.rand(outputs, groups, generator=generator) + 0.5) * 2.0**-bits
    return QuantizedWeight(
        bits=bits,
        group_size=group_size,
        codes=codes(inputs),
        scales=scales.to(dtype),
        zeros=None if sym else codes(groups),
        activations=activations,
    )


def assert_close(actual: Tensor, x: Tensor, weight: QuantizedWeight, expected: Tensor) -> None:
    """`actual` bfloat16 is float32's `expected` with the error of float32 sums, rounded once.

    A sum of C products errs by at most C times the unit roundoff of the sum of their sizes
    (Higham 2002, eq. 3.5); 8-bit sums are exact, and adding the groups errs likewise.
    """
    sizes = x.float().abs() @ largest_sizes(weight).t()
    atol = weight.in_features * 2.0**-24 * sizes + 2.0**-24 * expected.abs() + 1e-30
    error = (actual.float() - expected).abs()
    assert (error <= 2.0**-8 * expected.abs() + 2 * atol).all(), float(error.max())


def largest_sizes(weight: QuantizedWeight) -> Tensor:
    """What products with code and zero apart may come to, which is more than the weight."""
    if weight.channel_scales is not None:
        return weight.dequantize().abs()
    scales = weight.scales.float()[:, weight.group_of_channel()]
    return scales * (1 << weight.bits)


@pytest.mark.parametrize("activations", ["none", "int8"])
@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_product_equals_the_definition(
    ops: CpuOps, bits: int, group_size: int, sym: bool, activations: Activations
) -> None:
    for outputs, inputs in ((64, 128), (17, 130), (100, 384)):
        weight = make_weight(
            outputs, inputs, bits=bits, group_size=group_size, sym=sym, activations=activations
        )
        bias = draw(outputs)
        layer = ops.make_quantized_linear(weight, bias)
        assert isinstance(layer, CpuQuantizedLinear)
        assert layer.kernel == f"cpu-w{8 if bits == 8 else 4}a{16 if activations == 'none' else 8}"
        for rows in ROWS:
            x = draw(rows, inputs)
            expected = quantized_linear(x.float(), weight, bias.float())
            assert_close(layer(x), x, weight, expected)
            residual = draw(rows, outputs)
            out = layer.add_to(residual.clone(), x)
            assert_close(out, x, weight, expected + residual.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activations", ["none", "int8"])
def test_scales_of_any_type_are_used_as_they_are_stored(
    ops: CpuOps, dtype: torch.dtype, activations: Activations
) -> None:
    weight = make_weight(48, 64, activations=activations, dtype=dtype)
    x = draw(5, 64)
    layer = ops.make_quantized_linear(weight, None)
    assert_close(layer(x), x, weight, quantized_linear(x.float(), weight))


@pytest.mark.parametrize("activations", ["none", "int8"])
@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-15, 6.0e4])
def test_scales_reach_the_ends_of_float16(
    ops: CpuOps, scale: float, activations: Activations
) -> None:
    weight = make_weight(32, 64, activations=activations)
    weight = dataclasses.replace(weight, scales=torch.full_like(weight.scales, scale))
    x = draw(3, 64)
    layer = ops.make_quantized_linear(weight, None)
    assert_close(layer(x), x, weight, quantized_linear(x.float(), weight))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", ROWS)
def test_integer_sums_are_exact(ops: CpuOps, rows: int, bits: int) -> None:
    """With scales that are powers of two nothing but the last rounding can differ."""
    weight = make_weight(64, 1536, bits=bits, group_size=-1, activations="int8")
    weight = dataclasses.replace(weight, scales=torch.full_like(weight.scales, 2.0**-10))
    x = draw(rows, 1536)
    x[:, 0] = 127 / 4  # the largest of each row: its scale is 1 / 4
    codes, scales = quantize_activations(x)
    assert (scales == 0.25).all()
    sums = codes.double() @ weight.centered().double().t()
    expected = (sums * 2.0**-12).bfloat16()
    assert torch.equal(ops.make_quantized_linear(weight, None)(x), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_activations_are_rounded_as_the_definition_rounds_them(ops: CpuOps, bits: int) -> None:
    """An identity shows the rounded inputs themselves, every bfloat16 from 0 to 1 among them."""
    size = 128
    codes = torch.full((size, size), 1 << (bits - 1), dtype=torch.uint8)
    codes.fill_diagonal_((1 << (bits - 1)) + 1)
    weight = QuantizedWeight(
        bits=bits,
        group_size=-1,
        codes=codes,
        scales=torch.ones(size, 1),
        activations="int8",
    )
    values = torch.arange(0x3F80 + 1, dtype=torch.int16).view(torch.bfloat16)
    rows = -(-values.numel() // (size - 1))
    x = torch.zeros(rows, size, dtype=torch.bfloat16)
    x[:, 0] = torch.linspace(1, 3, rows)  # each row's largest value
    padding = rows * (size - 1) - values.numel()
    x[:, 1:] = torch.nn.functional.pad(values, (0, padding)).view(rows, size - 1)
    rounded, scales = quantize_activations(x)
    assert torch.equal(ops.make_quantized_linear(weight, None)(x), (rounded * scales).bfloat16())


def test_a_row_of_zeros_stays_zero_and_one_with_nan_is_nan(ops: CpuOps) -> None:
    layer = ops.make_quantized_linear(make_weight(32, 64, activations="int8"), None)
    x = draw(3, 64)
    x[0], x[1, 5] = 0, float("nan")
    out = layer(x)
    assert (out[0] == 0).all()
    assert out[1].isnan().all()
    assert not out[2].isnan().any()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activations", ["none", "int8"])
def test_output_is_activated_before_it_is_rounded(
    ops: CpuOps, activations: Activations, gated: bool, activation: Activation
) -> None:
    for (outputs, inputs), rows in itertools.product(((192, 64), (36, 48)), (1, 35)):
        weight = make_weight(outputs, inputs, group_size=16, activations=activations)
        bias, x = draw(outputs), draw(rows, inputs)
        layer = ops.make_quantized_linear(weight, bias, activation=activation, gated=gated)
        wide = quantized_linear(x.float(), weight, bias.float())
        expected = (
            TorchOps().act_and_mul(wide, activation) if gated else ACTIVATIONS[activation](wide)
        )
        atol = 2.0**-12 * float(expected.abs().max())
        torch.testing.assert_close(layer(x).float(), expected, rtol=2.0**-8, atol=atol)


@pytest.mark.parametrize("activations", ["none", "int8"])
@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
def test_groups_in_any_order_of_channels(ops: CpuOps, sym: bool, activations: Activations) -> None:
    for inputs, group_size in ((192, 64), (80, 32)):  # the last group of 80 is not full
        weight = make_weight(48, inputs, group_size=group_size, sym=sym, activations=activations)
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
        g_idx = (torch.arange(inputs) // group_size)[order].to(torch.int32)
        weight = dataclasses.replace(weight, g_idx=g_idx)
        layer = ops.make_quantized_linear(weight, None)
        assert isinstance(layer, CpuQuantizedLinear)
        for rows in (1, 20):
            x = draw(rows, inputs)
            assert_close(layer(x), x, weight, quantized_linear(x.float(), weight))


def make_two_levels(
    outputs: int, inputs: int, group_size: int, *, scales: Tensor | None = None
) -> QuantizedWeight:
    """QQQ's per-group weight: code times scale is rounded to 8 bits."""
    weight = make_weight(outputs, inputs, group_size=group_size, activations="int8")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(weight.scales.shape, generator=generator) * 15
    return dataclasses.replace(
        weight,
        scales=(drawn if scales is None else scales.expand_as(drawn)).half(),
        channel_scales=torch.rand(outputs, generator=generator) / 100,
    )


@pytest.mark.parametrize("group_size", [16, 64, -1])
def test_two_levels_of_scales(ops: CpuOps, group_size: int) -> None:
    for outputs, inputs in ((48, 128), (100, 384)):
        weight = make_two_levels(outputs, inputs, group_size)
        layer = ops.make_quantized_linear(weight, None)
        assert isinstance(layer, CpuQuantizedLinear)
        x = draw(130, inputs)
        together = layer(x)
        assert_close(together, x, weight, quantized_linear(x.float(), weight))
        for rows in ROWS:
            assert torch.equal(layer(x[:rows]), together[:rows])


@pytest.mark.parametrize("scale", [2.5, 0.5, 15.9375, 17.0, 40.0])
def test_wide_integers_are_rounded_and_clipped_as_the_definition_does(
    ops: CpuOps, scale: float
) -> None:
    """Halves go to the even integer, and what exceeds 8 bits is clipped."""
    weight = make_two_levels(32, 64, 32, scales=torch.tensor(scale))
    x = torch.eye(64).bfloat16()
    layer = ops.make_quantized_linear(weight, None)
    assert torch.equal(layer(x), quantized_linear(x.float(), weight).bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("activations", ["none", "int8"])
def test_a_row_has_the_same_bits_in_any_company(
    ops: CpuOps, activations: Activations, group_size: int, bits: int
) -> None:
    weight = make_weight(
        100, 288, bits=bits, group_size=group_size, sym=False, activations=activations
    )
    layer = ops.make_quantized_linear(weight, draw(100))
    x = draw(70, 288)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = layer(x)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for start, stop in ((0, 1), (3, 5), (15, 40), (60, 70), (2, 66)):
                assert torch.equal(layer(x[start:stop]), together[start:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("exponent", [0.0, 10.0, 30.0], ids=["even", "wide", "subnormal"])
@pytest.mark.parametrize("group_size", [16, 32, 48, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_few_rows_have_the_bits_that_many_rows_have(
    ops: CpuOps, bits: int, group_size: int, exponent: float, sym: bool
) -> None:
    """Inputs of any size, with the widest spread subnormal ones: where order and rounding show."""
    weight = make_weight(100, 330, bits=bits, group_size=group_size, sym=sym)
    layer = ops.make_quantized_linear(weight, None)
    spread = torch.exp2(exponent * draw(16, 330).float() - 2 * exponent)
    x = (draw(330, 16).t().float() * spread).bfloat16()
    together = layer(x)
    for rows in range(1, 9):
        assert torch.equal(layer(x[:rows]), together[:rows])


@pytest.mark.parametrize(
    ("bits", "group_size", "sym", "dtype", "most"),
    [
        (4, 64, True, torch.float16, 0.266),
        (4, 64, False, torch.float16, 0.282),
        (4, 64, True, torch.float32, 0.282),
        (4, 128, False, torch.bfloat16, 0.266),
        (4, -1, True, torch.float32, 0.252),
        (8, -1, True, torch.float32, 0.502),
        (8, 128, False, torch.float32, 0.525),
    ],
)
def test_weight_takes_little_more_than_its_codes(
    ops: CpuOps, bits: int, group_size: int, sym: bool, dtype: torch.dtype, most: float
) -> None:
    shape = (576, 1536)
    weight = make_weight(*shape, bits=bits, group_size=group_size, sym=sym, dtype=dtype)
    layer = ops.make_quantized_linear(weight, None)
    assert layer.weight_bytes / (2 * shape[0] * shape[1]) < most


def test_torch_multiplies_right_after_the_kernel(ops: CpuOps) -> None:
    """Both use the processor's tile registers and must leave them to each other."""
    layer = ops.make_quantized_linear(make_weight(64, 64), None)
    weight, x = draw(64, 64), draw(64, 64)
    own, expected = layer(x), x @ weight.t()
    for _ in range(3):
        assert torch.equal(layer(x), own)
        assert torch.equal(x @ weight.t(), expected)


def unusual_order(weight: QuantizedWeight) -> QuantizedWeight:
    return dataclasses.replace(weight, g_idx=torch.zeros(64, dtype=torch.int32))


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (make_weight(32, 72, group_size=24), "group_size 24 is no multiple of 16"),
        (unusual_order(make_weight(32, 64)), "g_idx puts 64 inputs into a group of 32"),
        (
            dataclasses.replace(
                make_weight(32, 64, bits=8, group_size=-1, activations="int8"),
                outlier_threshold=6.0,
            ),
            "channels with outliers",
        ),
    ],
    ids=["group", "order", "outliers"],
)
def test_what_the_kernels_do_not_take_is_torchs(
    ops: CpuOps, weight: QuantizedWeight, reason: str
) -> None:
    found = unsupported_weight(weight)
    assert found is not None
    assert reason in found
    layer = ops.make_quantized_linear(weight, None)
    assert not layer.kernel.startswith("cpu")
    x = draw(3, weight.in_features)
    expected = quantized_linear(x, weight).float()
    atol = 2.0**-7 * float(expected.abs().max())
    torch.testing.assert_close(layer(x).float(), expected, rtol=2.0**-7, atol=atol)


@pytest.mark.parametrize("wrong", [draw(2, 65), draw(2, 64).float()], ids=["width", "dtype"])
def test_a_layer_refuses_memory_of_another_shape(ops: CpuOps, wrong: Tensor) -> None:
    layer = ops.make_quantized_linear(make_weight(64, 64), None)
    with pytest.raises(ValueError, match="linear layer cannot take"):
        layer(wrong)
    with pytest.raises(ValueError, match="linear layer cannot add to"):
        layer.add_to(draw(3, 64), draw(2, 64))

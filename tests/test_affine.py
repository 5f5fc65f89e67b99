"""Codes are the nearest ones for the scale that is stored, and zeros stay zeros."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmbench.quant.affine import (
    MIN_SCALE,
    Range,
    affine_params,
    grouped,
    quantize,
    round_groups,
    to_codes,
)
from llmbench.quant.config import BITS, Scheme
from llmbench.quant.errors import QuantError
from llmbench.quant.quantized_weight import QuantizedWeight

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PRUNED = [
    [0.0, 0.0, 0.0, 0.0, 0.7, -0.7, 0.35, 0.0],
    [0.1, 0.2, -0.3, 0.4, 0.0, 0.0, 0.0, 0.0],
    [0.0] * 8,
]
"""Case C03: groups of four and a whole row that are pruned away."""


def rounded(
    weight: Tensor,
    scheme: Scheme,
    dtype: torch.dtype = torch.float16,
    code_range: Range = "full",
) -> QuantizedWeight:
    params = affine_params(
        grouped(weight, scheme.group_size), scheme, dtype=dtype, code_range=code_range
    )
    return quantize(weight, scheme, params)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_groups_of_zeros_stay_exactly_zero(bits: int, sym: bool, dtype: torch.dtype) -> None:
    values = torch.tensor(PRUNED, dtype=dtype)
    weight = rounded(values, Scheme(bits=bits, group_size=4, sym=sym), dtype)
    dense = weight.dequantize()
    assert bool(torch.isfinite(weight.scales).all())
    assert bool((weight.scales > 0).all())
    assert bool(torch.isfinite(dense).all())
    for row, columns in ((0, slice(0, 4)), (1, slice(4, 8)), (2, slice(0, 8))):
        assert dense[row, columns].abs().max() == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_smallest_scale_is_held_by_every_type(dtype: torch.dtype) -> None:
    scale = torch.tensor(MIN_SCALE).to(dtype)
    assert float(scale) == MIN_SCALE
    assert bool(torch.isfinite(1 / scale.float()))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    sym=st.booleans(),
    values=st.lists(st.floats(-4, 4, width=32), min_size=8, max_size=8),
)
def test_no_other_code_is_nearer(
    dtype: torch.dtype, bits: int, sym: bool, values: list[float]
) -> None:
    row = torch.tensor([values])
    weight = rounded(row, Scheme(bits=bits, group_size=4, sym=sym), dtype)
    scales = weight.scales.double()[:, weight.group_of_channel()]
    zeros = (weight.codes.double() - weight.centered().double())[0]
    for column in range(8):
        every = (torch.arange(1 << bits).double() - zeros[column]) * scales[0, column]
        distance = (every - row[0, column].double()).abs()
        mine = distance[int(weight.codes[0, column])]
        # Two codes may be equally near; the division in float32 decides.
        assert float(mine) <= float(distance.min()) + 1e-4 * float(scales[0, column])


def test_symmetric_scale_has_seven_and_a_half_steps() -> None:
    weight = rounded(torch.tensor([[1.5, -0.2, 0.0, 0.4]]), Scheme(group_size=4), torch.float32)
    assert weight.scales.tolist() == [[pytest.approx(0.2)]]
    assert weight.zeros is None
    assert weight.codes.tolist() == [[15, 7, 8, 10]]


def test_restricted_range_meets_the_largest_value() -> None:
    # Case C06: QQQ's codes per channel, -7 to 7 with scale absmax / 7.
    scheme = Scheme(group_size=-1, activations="int8")
    weight = rounded(torch.tensor([[0.7, -0.33, 0.1, 0.0]]), scheme, torch.float32, "restricted")
    assert weight.scales.item() == pytest.approx(0.1)
    assert weight.centered().tolist() == [[7, -3, 1, 0]]
    lowest = rounded(torch.tensor([[-0.7, 0.7]]), scheme, torch.float32, "restricted")
    assert lowest.codes.tolist() == [[1, 15]]


def test_asymmetric_range_keeps_zero_a_code() -> None:
    weight = rounded(
        torch.tensor([[1.0, 4.0, 2.0, 3.0]]), Scheme(group_size=4, sym=False), torch.float32
    )
    # The range starts at 0 although the smallest value is 1.
    assert weight.zeros is not None
    assert weight.zeros.tolist() == [[0]]
    assert weight.scales.item() == pytest.approx(4 / 15)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sym", [True, False])
def test_codes_are_those_of_the_stored_scale(bits: int, sym: bool) -> None:
    values = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    scheme = Scheme(bits=bits, group_size=8, sym=sym)
    params = affine_params(grouped(values, 8), scheme, dtype=torch.float16)
    assert params.scales.dtype == torch.float16
    weight = quantize(values, scheme, params)
    scales, zeros = params.scales.float()[..., None], params.zeros[..., None]
    again = to_codes(grouped(weight.dequantize(), 8), scales, zeros, params)
    assert torch.equal(again.reshape(4, 32).to(torch.uint8), weight.codes)
    assert torch.equal(round_groups(grouped(values, 8), params).reshape(4, 32), weight.dequantize())


def test_shrinking_clips_the_largest_values() -> None:
    values = torch.tensor([[[4.0, 1.0]]])
    params = affine_params(values, Scheme(group_size=2), dtype=torch.float32, shrink=0.5)
    assert params.scales.item() == pytest.approx(2 / 7.5)
    assert float(round_groups(values, params).max()) == pytest.approx(7 * 2 / 7.5)


def test_scale_beyond_its_type_is_refused() -> None:
    with pytest.raises(QuantError, match="does not fit float16"):
        affine_params(torch.full((1, 1, 4), 1e6), Scheme(group_size=4), dtype=torch.float16)

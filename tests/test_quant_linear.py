"""The reference product of quantized layers: integers with two scales, and nothing lost."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from llmbench.quant.affine import affine_params, grouped, quantize
from llmbench.quant.config import Scheme
from llmbench.quant.linear import quantize_activations, quantized_linear
from llmbench.quant.quantized_weight import QuantizedWeight

W8A8 = Scheme(bits=8, group_size=-1, activations="int8")
Make = Callable[..., QuantizedWeight]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_token_of_zeros_gives_zeros(dtype: torch.dtype) -> None:
    # Case C03: 0 / 0 in the scale of a token must not make NaN.
    values = torch.tensor(
        [[0, 0, 0, 0, 0.7, -0.7, 0.35, 0], [0.1, 0.2, -0.3, 0.4, 0, 0, 0, 0], [0.0] * 8]
    )
    params = affine_params(grouped(values, -1), W8A8, dtype=torch.float32)
    weight = quantize(values, W8A8, params)
    x = torch.tensor([[0.0] * 8, [1, -2, 3, -4, 5, -6, 7, -8]], dtype=dtype)
    out = quantized_linear(x, weight)
    assert out.dtype == dtype
    assert out[0].tolist() == [0.0, 0.0, 0.0]
    assert bool(torch.isfinite(out).all())
    assert out[1, 2] == 0.0
    codes, scales = quantize_activations(x)
    assert float(scales[1]) == pytest.approx(8 / 127)
    assert codes[1].tolist() == [16, -32, 48, -64, 79, -95, 111, -127]


def test_without_activation_rounding_it_is_the_dequantized_product(random_weight: Make) -> None:
    weight = random_weight(Scheme(group_size=8, sym=False), 5, 16)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    bias = torch.arange(5.0)
    assert_close(quantized_linear(x, weight, bias), x @ weight.dequantize().t() + bias)


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from((4, 8)),
    group_size=st.sampled_from((-1, 4, 8)),
    sym=st.booleans(),
    seed=st.integers(0, 99),
)
def test_integer_product_is_that_of_the_rounded_input(
    random_weight: Make, bits: int, group_size: int, sym: bool, seed: int
) -> None:
    scheme = Scheme(bits=bits, group_size=group_size, sym=sym, activations="int8")
    weight = random_weight(scheme, 5, 16, seed=seed)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(seed))
    codes, scales = quantize_activations(x)
    expected = (codes.double() * scales.double()) @ weight.dequantize().double().t()
    assert_close(quantized_linear(x, weight).double(), expected, rtol=1e-5, atol=1e-6)


def test_groups_out_of_order_meet_their_own_channels(random_weight: Make) -> None:
    scheme = Scheme(group_size=4, activations="int8")
    plain = random_weight(scheme, 5, 16)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    shuffled = replace(
        plain,
        codes=plain.codes[:, order],
        g_idx=plain.group_of_channel()[order].to(torch.int32),
    )
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(quantized_linear(x[:, order], shuffled), quantized_linear(x, plain))


def test_outliers_are_multiplied_in_full_precision(random_weight: Make) -> None:
    weight = replace(random_weight(W8A8, 5, 16), outlier_threshold=6.0)
    within = replace(weight, outlier_threshold=None)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    expected = quantized_linear(x.index_fill(1, torch.tensor([7]), 0.0), within)
    expected[[0, 2]] = quantized_linear(x, within)[[0, 2]]
    x[1, 7] = 60.0
    expected[1] += 60.0 * weight.dequantize()[:, 7]
    assert_close(quantized_linear(x, weight), expected)
    # Inside the integers, that one value takes all digits from its token.
    assert not torch.allclose(quantized_linear(x, within), expected, rtol=1e-3)


def test_two_level_product_runs_on_the_wide_integers() -> None:
    weight = QuantizedWeight(
        bits=4,
        group_size=2,
        codes=torch.tensor([[9, 15, 6, 0]], dtype=torch.uint8),
        scales=torch.tensor([[1.3, 2.6]], dtype=torch.float16),
        channel_scales=torch.tensor([0.5]),
        activations="int8",
    )
    x = torch.tensor([[127.0, 1.0, 2.0, -3.0]])
    assert quantized_linear(x, weight).item() == (127 * 1 + 1 * 9 + 2 * -5 + -3 * -21) * 0.5

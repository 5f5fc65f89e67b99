"""Rounding to nearest takes the nearest code, for zeros too, and reports what it lost."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmbench.quant.config import BITS, PER_CHANNEL, QuantConfig, Scheme
from llmbench.quant.rtn import RTN, rtn_quantize, weight_error

ZERO_GROUPS = torch.tensor(
    [
        [0, 0, 0, 0, 0.7, -0.7, 0.35, 0],
        [0.1, 0.2, -0.3, 0.4, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
)
"""Weights with groups of four zeros and a row of zeros (AutoAWQ#519)."""


class FakeBlock:
    """As much of a block as a method looks at."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = dict(weights)

    def weight(self, name: str) -> torch.Tensor:
        return self.weights[name]

    def set_weight(self, name: str, weight: torch.Tensor) -> None:
        self.weights[name] = weight


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [4, 8, PER_CHANNEL])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("scale_search", [True, False])
def test_every_code_is_the_nearest(
    bits: int, group_size: int, sym: bool, scale_search: bool
) -> None:
    W = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    scheme = Scheme(bits=bits, group_size=group_size, sym=sym)
    weight = rtn_quantize(W, scheme, scale_dtype=torch.float16, scale_search=scale_search)
    assert weight.scheme == scheme
    groups = weight.group_of_channel()
    scales = weight.scales.float()[:, groups]  # [N, C]
    zeros = (
        torch.full_like(scales, weight.middle)
        if weight.zeros is None
        else weight.zeros.float()[:, groups]
    )
    values = (torch.arange(1 << bits) - zeros[..., None]) * scales[..., None]  # [N, C, codes]
    nearest = (values - W[..., None]).abs().amin(dim=-1)
    torch.testing.assert_close((weight.dequantize() - W).abs(), nearest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("scale_search", [True, False])
def test_zero_groups_stay_exactly_zero(dtype: torch.dtype, sym: bool, scale_search: bool) -> None:
    scheme = Scheme(bits=4, group_size=4, sym=sym)
    weight = rtn_quantize(ZERO_GROUPS, scheme, scale_dtype=dtype, scale_search=scale_search)
    assert torch.isfinite(weight.scales).all()
    assert (weight.scales > 0).all()
    found = weight.dequantize()
    assert (found[ZERO_GROUPS == 0] == 0.0).all()
    torch.testing.assert_close(found, ZERO_GROUPS, rtol=0, atol=0.06)


def test_largest_value_without_a_search_is_half_a_step_beyond_the_top_code() -> None:
    W = torch.tensor([[7.5, -7.5, 3.2, 0.4]])
    scheme = Scheme(bits=4, group_size=4)
    weight = rtn_quantize(W, scheme, scale_dtype=torch.float32, scale_search=False)
    assert weight.codes.tolist() == [[15, 0, 11, 8]]
    assert weight.scales.tolist() == [[1.0]]


def test_block_computes_with_the_rounded_weights_afterwards() -> None:
    generator = torch.Generator().manual_seed(1)
    layers = {name: torch.randn(4, 8, generator=generator) for name in ("a", "b", "kept")}
    block: Any = FakeBlock(layers)
    schemes = {"a": Scheme(bits=4, group_size=4), "b": Scheme(bits=8, group_size=8)}
    results = RTN(QuantConfig(method="rtn"), torch.float16).quantize_block(block, None, schemes)
    assert results.keys() == schemes.keys()
    for name, result in results.items():
        assert result.weight.scheme == schemes[name]
        assert torch.equal(block.weights[name], result.weight.dequantize())
        lost = (block.weights[name] - layers[name]).norm() / layers[name].norm()
        assert result.report.relative_mse == pytest.approx(float(lost) ** 2, rel=1e-4)
        assert result.report.fallback is None
    assert torch.equal(block.weights["kept"], layers["kept"])


def test_error_of_a_weight_of_zeros_is_zero() -> None:
    zeros = torch.zeros(2, 4)
    weight = rtn_quantize(zeros, Scheme(bits=4, group_size=4), scale_dtype=torch.float16)
    assert weight_error(zeros, weight) == 0.0


def test_search_is_what_the_run_asks_for() -> None:
    W = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    schemes = {"a": Scheme(bits=3, group_size=64)}
    errors = []
    for scale_search in (True, False):
        config = QuantConfig(method="rtn", scale_search=scale_search)
        block: Any = SimpleNamespace(weight=lambda name: W, set_weight=lambda name, weight: None)
        results = RTN(config, torch.float16).quantize_block(block, None, schemes)
        errors.append(results["a"].report.relative_mse)
    assert errors[0] < errors[1]

"""The searched range of a group is the one that costs the layer's output least."""

import pytest
import torch
from torch import Tensor

from llmbench.quant import clipping
from llmbench.quant.affine import AffineParams, affine_params, grouped, quantize
from llmbench.quant.clipping import search_ranges
from llmbench.quant.config import BITS, PER_CHANNEL, Scheme


def layer(n: int = 24, c: int = 32) -> tuple[Tensor, Tensor]:
    """A weight with heavy tails and skewed rows, and correlated inputs of unequal size."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(n, c, generator=generator) ** 3 + 0.5
    X = torch.randn(200, c, generator=generator) @ torch.randn(c, c, generator=generator)
    return W, X * torch.linspace(0.1, 3, c)


def output_error(W: Tensor, X: Tensor, scheme: Scheme, params: AffineParams) -> Tensor:
    """[N], over the tokens themselves."""
    return ((quantize(W, scheme, params).dequantize() - W) @ X.t()).square().sum(dim=1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group_size", [8, PER_CHANNEL])
def test_no_row_is_worse_than_with_full_ranges(bits: int, sym: bool, group_size: int) -> None:
    W, X = layer()
    scheme = Scheme(bits=bits, group_size=group_size, sym=sym)
    full = affine_params(grouped(W, group_size), scheme, dtype=torch.float16)
    found = search_ranges(W, X.t() @ X, scheme, dtype=torch.float16)
    before, after = (output_error(W, X, scheme, params) for params in (full, found))
    assert (after <= before * 1.001).all()
    if bits < 8:
        assert after.sum() < 0.95 * before.sum()


def test_both_ends_of_a_range_with_a_zero_point_are_searched() -> None:
    # An outlier below, and an input that hardly sees it: only the lower end should move.
    W = torch.cat([torch.linspace(-0.7, 1, 31), torch.tensor([-1.0])])[None]
    H = torch.eye(32)
    H[31, 31] = 1e-4
    scheme = Scheme(bits=4, group_size=32, sym=False)
    found = search_ranges(W, H, scheme, dtype=torch.float32)
    low = -found.zeros * found.scales
    high = (found.max_code - found.zeros) * found.scales
    assert -float(low) < 0.9 < float(high)


@pytest.mark.parametrize("sym", [True, False])
def test_rows_are_searched_independently_of_how_they_are_cut(
    sym: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    W, X = layer(n=23)
    scheme = Scheme(bits=4, group_size=8, sym=sym)
    whole = search_ranges(W, X.t() @ X, scheme, dtype=torch.float16)
    monkeypatch.setattr(clipping, "CHUNK", 5 * W.shape[1])
    parts = search_ranges(W, X.t() @ X, scheme, dtype=torch.float16)
    torch.testing.assert_close(parts.scales, whole.scales, rtol=0, atol=0)
    torch.testing.assert_close(parts.zeros, whole.zeros, rtol=0, atol=0)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_groups_of_zeros_and_inputs_of_zeros_stay_finite(dtype: torch.dtype, sym: bool) -> None:
    W, X = layer(n=6)
    W[0], W[1, :8] = 0, 0
    X[:, 8:16] = 0
    scheme = Scheme(bits=4, group_size=8, sym=sym)
    found = search_ranges(W, X.t() @ X, scheme, dtype=dtype)
    assert torch.isfinite(found.scales).all()
    assert (found.scales > 0).all()
    rounded = quantize(W, scheme, found).dequantize()
    assert rounded[0].eq(0).all()
    assert rounded[1, :8].eq(0).all()
    # Where no input ever came, nothing is known that speaks against the full range.
    full = affine_params(grouped(W, 8), scheme, dtype=dtype)
    torch.testing.assert_close(found.scales[2:, 1], full.scales[2:, 1], rtol=0, atol=0)

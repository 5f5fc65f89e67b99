"""Refining scales or codes never raises the error that GPTQ minimizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmbench.quant.affine import AffineParams, affine_params, grouped, to_codes
from llmbench.quant.config import Scheme
from llmbench.quant.refinement import dequantized, descend, refit_scales, row_errors


def problem(
    seed: int, *, bits: int = 3, sym: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, AffineParams]:
    """W [6, 32], H, and the codes [6, 32] of rounding to nearest in groups of 8."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(6, 32, generator=generator)
    x = torch.randn(48, 32, generator=generator) @ torch.randn(32, 32, generator=generator)
    groups = grouped(W, 8)
    params = affine_params(groups, Scheme(bits=bits, group_size=8, sym=sym), dtype=dtype)
    zeros = params.zeros[..., None]
    codes = to_codes(groups, params.scales[..., None], zeros, params).reshape(W.shape)
    return W, x.t() @ x, codes, params


def errors(W: Tensor, H: Tensor, codes: Tensor, params: AffineParams) -> Tensor:
    return row_errors((W - dequantized(codes, params)).double(), H.double())


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 1000),
    sym=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_refitted_scales_are_no_worse_in_any_row(seed: int, sym: bool, dtype: torch.dtype) -> None:
    W, H, codes, params = problem(seed, sym=sym, dtype=dtype)
    fitted = refit_scales(W, H, codes, params)
    assert fitted.scales.dtype is dtype
    assert (fitted.scales > 0).all()
    before, after = errors(W, H, codes, params), errors(W, H, codes, fitted)
    assert (after <= before * (1 + 1e-5)).all()


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 1000), sym=st.booleans(), bits=st.sampled_from([2, 3, 4, 8]))
def test_a_sweep_is_no_worse_in_any_row(seed: int, sym: bool, bits: int) -> None:
    W, H, codes, params = problem(seed, bits=bits, sym=sym)
    swept = descend(W, H, codes, params)
    assert torch.equal(swept, swept.round())
    assert swept.min() >= params.min_code
    assert swept.max() <= params.max_code
    before, after = errors(W, H, codes, params), errors(W, H, swept, params)
    assert (after <= before * (1 + 1e-5)).all()


def test_refitted_scales_are_the_least_squares_solution() -> None:
    """Row by row against a general solver over the tokens themselves."""
    generator = torch.Generator().manual_seed(3)
    W, x = torch.randn(4, 16, generator=generator), torch.randn(40, 16, generator=generator)
    groups = grouped(W, 4)
    params = affine_params(groups, Scheme(bits=4, group_size=4), dtype=torch.float32)
    steps = to_codes(groups, params.scales[..., None], params.zeros[..., None], params) - 8
    fitted = refit_scales(W, x.t() @ x, (steps + 8).reshape(W.shape), params)
    for row in range(4):
        outputs = torch.stack([x[:, 4 * g : 4 * g + 4] @ steps[row, g] for g in range(4)], dim=1)
        solution = torch.linalg.lstsq(outputs, (x @ W[row])[:, None]).solution[:, 0]
        torch.testing.assert_close(fitted.scales[row], solution, rtol=1e-3, atol=1e-5)


def test_sweep_takes_columns_in_turn_to_their_best_code() -> None:
    """Worked by hand: with H = [[2, 1], [1, 2]] column 0 stays, column 1 makes up for it.

    w = (7.5, 2.4) is rounded to (7, 2), so d = (0.5, 0.4). Column 0: 7 + (H d)_0 / 2 = 7.7, above
    the top code, stays 7. Column 1: 2 + (H d)_1 / 2 = 2.65 becomes 3.
    """
    W, H = torch.tensor([[7.5, 2.4]]), torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    params = AffineParams(torch.ones(1, 1), torch.full((1, 1), 8.0), 0, 15)
    assert descend(W, H, torch.tensor([[15.0, 10.0]]), params).tolist() == [[15.0, 11.0]]


@pytest.mark.parametrize("num_columns", [63, 64, 65, 130])
def test_sweep_in_blocks_is_the_sweep_column_by_column(num_columns: int) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    W = torch.randn(5, num_columns, generator=generator)
    x = torch.randn(300, num_columns, generator=generator)
    H = x.t() @ x
    params = affine_params(W[:, None], Scheme(bits=3, group_size=-1), dtype=torch.float32)
    scales = params.scales
    codes = to_codes(W, scales, params.zeros, params)
    swept = descend(W, H, codes, params)
    for j in range(num_columns):
        rest = (W - (codes - 4) * scales).double() @ H.double()[:, j] / float(H[j, j])
        best = (codes[:, j] - 4) * scales[:, 0] + rest
        codes[:, j] = torch.clamp(torch.round(best / scales[:, 0]) + 4, 0, 7)
    assert torch.equal(swept, codes)


def test_group_of_zeros_keeps_its_scale() -> None:
    W, H, codes, params = problem(0)
    W[:, 8:16] = 0
    codes[:, 8:16] = 4
    fitted = refit_scales(W, H, codes, params)
    assert torch.equal(fitted.scales[:, 1], params.scales[:, 1])
    assert torch.isfinite(fitted.scales).all()

"""A searched scale is never worse than the largest value's, and sees what each column counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmbench.quant.affine import (
    MIN_SCALE,
    AffineParams,
    Range,
    affine_params,
    grouped,
    round_groups,
)
from llmbench.quant.config import BITS, PER_CHANNEL, Scheme
from llmbench.quant.scale_search import search_params


def random_groups(seed: int, shape: tuple[int, ...] = (4, 3, 16)) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(groups: Tensor, params: AffineParams, importance: Tensor | None = None) -> Tensor:
    squared = (round_groups(groups, params) - groups).square()
    return (squared if importance is None else squared * importance).sum(dim=-1)


@settings(deadline=None, max_examples=50)
@given(
    bits=st.sampled_from(BITS),
    sym=st.booleans(),
    restricted=st.booleans(),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_search_is_never_worse_than_the_full_range(
    bits: int, sym: bool, restricted: bool, weighted: bool, dtype: torch.dtype, seed: int
) -> None:
    scheme = Scheme(bits=bits, group_size=16, sym=sym)
    code_range: Range = "restricted" if restricted else "full"
    groups = random_groups(seed)
    importance = random_groups(seed + 1, (3, 16)).exp() if weighted else None
    full = affine_params(groups, scheme, dtype=dtype, code_range=code_range)
    found = search_params(groups, scheme, dtype=dtype, importance=importance, code_range=code_range)
    assert found.scales.dtype is dtype
    assert (found.scales >= MIN_SCALE).all()
    assert (found.min_code, found.max_code) == (full.min_code, full.max_code)
    assert (error(groups, found, importance) <= error(groups, full, importance)).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_search_comes_near_the_best_scale_there_is(bits: int) -> None:
    scheme = Scheme(bits=bits, group_size=64)
    groups = random_groups(5, (8, 1, 64))
    found = error(groups, search_params(groups, scheme, dtype=torch.float32))
    best = torch.full_like(found, torch.inf)
    for share in torch.linspace(0.1, 1.6, 3000).tolist():
        params = affine_params(groups, scheme, dtype=torch.float32, shrink=share)
        best = torch.minimum(best, error(groups, params))
    assert float(found.sum()) <= 1.05 * float(best.sum())


def test_symmetric_range_may_grow_so_that_the_largest_value_is_met() -> None:
    """Two values of one size: half a step is lost to the clipped one at the usual scale."""
    groups = torch.tensor([[[7.0, -7.0, 0.0, 0.0]]])
    scheme = Scheme(bits=4, group_size=4)
    params = search_params(groups, scheme, dtype=torch.float32)
    torch.testing.assert_close(round_groups(groups, params), groups)


def test_column_that_does_not_count_has_no_say() -> None:
    groups = torch.cat([random_groups(0, (2, 1, 15)), torch.full((2, 1, 1), 1.8)], dim=-1)
    counts = torch.ones(1, 16)
    counts[0, -1] = 0.0
    scheme = Scheme(bits=3, group_size=16)
    heard = search_params(groups, scheme, dtype=torch.float32)
    unheard = search_params(groups, scheme, dtype=torch.float32, importance=counts)
    others = counts.bool()[0]
    for_others = [
        float((round_groups(groups, p) - groups)[..., others].square().sum())
        for p in (heard, unheard)
    ]
    assert for_others[1] < for_others[0]


def test_importance_counts_by_its_ratios_alone() -> None:
    groups, importance = random_groups(1), random_groups(2, (3, 16)).exp()
    scheme = Scheme(bits=4, group_size=16)
    one, other = (
        search_params(groups, scheme, dtype=torch.float32, importance=importance * factor)
        for factor in (1.0, 2.0**-60)
    )
    torch.testing.assert_close(one.scales, other.scales)


def test_rows_are_searched_alike_however_many_there_are() -> None:
    """More rows than fit one chunk, and a last chunk that is not full."""
    weight = random_groups(3, (1100, 256))
    scheme = Scheme(bits=4, group_size=64)
    together = search_params(grouped(weight, 64), scheme, dtype=torch.float16)
    alone = search_params(grouped(weight[1000:1003], 64), scheme, dtype=torch.float16)
    assert torch.equal(together.scales[1000:1003], alone.scales)


@pytest.mark.parametrize("sym", [True, False])
def test_group_of_zeros_stays_zero(sym: bool) -> None:
    scheme = Scheme(bits=4, group_size=PER_CHANNEL, sym=sym)
    groups = torch.zeros(2, 1, 8)
    params = search_params(groups, scheme, dtype=torch.float16)
    assert (params.scales > 0).all()
    assert torch.equal(round_groups(groups, params), groups)

"""Choosing the scale of a group: the largest value, or the range that costs least.

Rounding to nearest wants the largest value of a group inside the range; but a range that is a
little narrower clips one weight and rounds all others more finely. The search tries shares of
the full range and keeps, group by group, the one with the smallest sum of squared errors (as
GPTQ's `mse` option does), then moves each scale to the least-squares one for the codes it gave.

Each column's error may count differently. GPTQ's objective is the sum of (w - q)^2 / d^2, with d
the diagonal of the inverse Hessian's Cholesky factor (Frantar et al. 2022, eq. 2 and 4): what an
error costs after all later columns have made up for it. With these weights the search sees what
GPTQ will pay.

Shapes: `N` out features · `G` groups of a row · `S` channels of a group.
"""

import torch
from torch import Tensor

from llmbench.quant.affine import (
    AffineParams,
    Range,
    affine_params,
    round_groups,
    stored_scales,
    to_codes,
)
from llmbench.quant.config import Scheme

NUM_SHARES = 12
LOWEST_SHARE = {2: 0.3, 3: 0.4, 4: 0.5, 8: 0.9}
"""By bits: the fewer the codes, the more is clipped by the best range."""
NUM_REFITS = 2
CHUNK = 1 << 17
"""Weights that are searched at once, few enough for all temporaries to stay in a core's cache."""


def search_params(
    groups: Tensor,
    scheme: Scheme,
    *,
    dtype: torch.dtype,
    importance: Tensor | None = None,
    code_range: Range = "full",
) -> AffineParams:
    """Scale and zero of groups [N, G, S] with the smallest weighted squared error.

    `importance` [G, S], not negative, weighs the columns; without it all count alike.
    """
    rows = max(1, CHUNK // (groups.shape[1] * groups.shape[2]))
    parts = [
        _search(chunk, scheme, dtype, importance, code_range) for chunk in torch.split(groups, rows)
    ]
    return AffineParams(
        torch.cat([part.scales for part in parts]),
        torch.cat([part.zeros for part in parts]),
        parts[0].min_code,
        parts[0].max_code,
    )


def _search(
    groups: Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    importance: Tensor | None,
    code_range: Range,
) -> AffineParams:
    groups = groups.float()
    best = affine_params(groups, scheme, dtype=dtype, code_range=code_range)
    best_error = _error(groups, best, importance)
    # Half a step of a full symmetric range lies beyond its top code: a wider one may be better.
    highest = best.max_code / (best.max_code - 1) if scheme.sym and code_range == "full" else 1.0
    for share in torch.linspace(LOWEST_SHARE[scheme.bits], highest, NUM_SHARES).tolist():
        params = affine_params(groups, scheme, dtype=dtype, shrink=share, code_range=code_range)
        best, best_error = _better(groups, params, best, best_error, importance)
    for _ in range(NUM_REFITS):
        params = _refit(groups, best, importance, dtype)
        best, best_error = _better(groups, params, best, best_error, importance)
    return best


def _error(groups: Tensor, params: AffineParams, importance: Tensor | None) -> Tensor:
    """[N, G], the weighted squared error of each group."""
    squared = round_groups(groups, params).sub_(groups).square_()
    return (
        squared.sum(dim=-1)
        if importance is None
        else torch.einsum("ngs,gs->ng", squared, importance)
    )


def _better(
    groups: Tensor,
    params: AffineParams,
    best: AffineParams,
    best_error: Tensor,
    importance: Tensor | None,
) -> tuple[AffineParams, Tensor]:
    """Of two choices, the better one of each group."""
    error = _error(groups, params, importance)
    wins = error < best_error
    chosen = AffineParams(
        torch.where(wins, params.scales, best.scales),
        torch.where(wins, params.zeros, best.zeros),
        best.min_code,
        best.max_code,
    )
    return chosen, torch.where(wins, error, best_error)


def _refit(
    groups: Tensor, params: AffineParams, importance: Tensor | None, dtype: torch.dtype
) -> AffineParams:
    """The same zeros, and the least-squares scales for the codes that `params` gives."""
    zeros = params.zeros[..., None]
    steps = to_codes(groups, params.scales[..., None], zeros, params).sub_(zeros)
    weighted = steps if importance is None else steps * importance
    top, bottom = (weighted * groups).sum(dim=-1), (weighted * steps).sum(dim=-1)
    scales = torch.where(bottom > 0, top / bottom, params.scales.float())
    return AffineParams(
        stored_scales(scales, dtype), params.zeros, params.min_code, params.max_code
    )

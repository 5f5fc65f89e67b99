"""Choosing the range of every group by what it does to the layer's output (AWQ's clip search).

Narrowing a group's range clips its largest weights and rounds all others more finely. Whether that
pays depends on the inputs: the group's part of the output is wrong by (W - Q) X, so its squared
error is a quadratic form with the group's block on the diagonal of H = sum of x x^T (Lin et al.
2023, section 3.2, "weight clipping", there over a few tokens). That is exact over all tokens and
needs none of them. Where groups have a zero point both ends of the range are searched, one after
the other, since weights are rarely symmetric.

Errors of a row's groups may add up or cancel, which the search does not see; so a row keeps its
full ranges where those do better over the whole row.

Shapes: `N` out features · `C` in features · `G` groups of a row · `S` channels of a group.
"""

import torch
from torch import Tensor

from llmbench.quant.affine import AffineParams, affine_params, grouped, round_groups
from llmbench.quant.config import Scheme
from llmbench.quant.refinement import row_errors

LOWEST_SHARE = {2: 0.3, 3: 0.4, 4: 0.5, 8: 0.8}
"""Narrowest range by bits, as a share of the full one; 0.5 is the AWQ code's for 4 bits."""
NUM_SHARES = 10
MOVES = (-0.15, -0.1, -0.05, 0.05, 0.1)
"""Changes to one end of a range, as shares, around the best common one."""
CHUNK = 1 << 17
"""Weights that are searched at once, few enough for all temporaries to stay in a core's cache."""


def search_ranges(W: Tensor, H: Tensor, scheme: Scheme, *, dtype: torch.dtype) -> AffineParams:
    """Scale and zero of every group of W [N, C], with the least error over inputs of H [C, C].

    Never worse, row by row, than the full ranges.
    """
    groups = grouped(W, scheme.group_size)
    n, g, s = groups.shape
    blocks = torch.stack([H[i * s : (i + 1) * s, i * s : (i + 1) * s] for i in range(g)])
    rows = max(1, CHUNK // (g * s))
    parts = []
    for start in range(0, n, rows):
        chunk = groups[start : start + rows]
        full = affine_params(chunk, scheme, dtype=dtype)
        found = _search(chunk, blocks, scheme, dtype)
        parts.append(_better_rows(chunk, H, full, found))
    return AffineParams(
        torch.cat([part.scales for part in parts]),
        torch.cat([part.zeros for part in parts]),
        parts[0].min_code,
        parts[0].max_code,
    )


def _search(groups: Tensor, blocks: Tensor, scheme: Scheme, dtype: torch.dtype) -> AffineParams:
    """Ranges of groups [N, G, S] with blocks [G, S, S] of H."""
    low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)

    def params_of(low_share: Tensor, high_share: Tensor) -> AffineParams:
        ends = torch.stack([low * low_share, high * high_share], dim=-1)  # [N, G, 2]
        return affine_params(ends, scheme, dtype=dtype)

    def error_of(low_share: Tensor, high_share: Tensor) -> Tensor:
        difference = round_groups(groups, params_of(low_share, high_share)).sub_(groups)
        difference = difference.transpose(0, 1)  # [G, N, S]
        return torch.matmul(difference, blocks).mul_(difference).sum(dim=-1).t()

    low_share = high_share = torch.ones_like(low)
    best = error_of(low_share, high_share)

    def try_shares(lows: Tensor, highs: Tensor) -> None:
        nonlocal best, low_share, high_share
        error = error_of(lows, highs)
        is_better = error < best
        best = torch.where(is_better, error, best)
        low_share = torch.where(is_better, lows, low_share)
        high_share = torch.where(is_better, highs, high_share)

    lowest = LOWEST_SHARE[scheme.bits]
    for step in range(1, NUM_SHARES + 1):
        share = torch.full_like(low, 1 - (1 - lowest) * step / NUM_SHARES)
        try_shares(share, share)
    if scheme.sym:
        common = low_share
        for move in MOVES:
            share = common + move / 2
            try_shares(share, share)
        return params_of(low_share, high_share)
    common = low_share
    for move in MOVES:
        try_shares(common + move, high_share)
    common = high_share
    for move in MOVES:
        try_shares(low_share, common + move)
    return params_of(low_share, high_share)


def _better_rows(
    groups: Tensor, H: Tensor, full: AffineParams, found: AffineParams
) -> AffineParams:
    """Row by row the ranges that do better over all groups."""
    n = len(groups)
    W = groups.reshape(n, -1)
    errors = [
        row_errors(round_groups(groups, params).reshape(n, -1) - W, H) for params in (full, found)
    ]
    is_better = (errors[1] < errors[0])[:, None]
    return AffineParams(
        torch.where(is_better, found.scales, full.scales),
        torch.where(is_better, found.zeros, full.zeros),
        full.min_code,
        full.max_code,
    )

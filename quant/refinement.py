"""Improving codes and scales that GPTQ has found, on the same objective.

GPTQ decides each column once, without knowing the columns after it. Two cheap steps lower the
same error ||(W - Q) X||^2 = tr((W - Q) H (W - Q)^T) further, and neither can raise it:

- `refit_scales`: for fixed codes the error is a quadratic function of a row's scales, so their
  best values solve a system of G equations.
- `descend`: coordinate descent (Behdin et al. 2023, QuantEase, section 3): each column in turn
  is rounded again to the nearest code of the value that is best while all others stay.

Shapes: `N` out features · `C` in features · `G` groups of a row · `S` channels of a group.
Columns are those of groups in order: channel c is in group c // S.
"""

from dataclasses import replace

import torch
from torch import Tensor

from llmbench.quant.affine import AffineParams, stored_scales, to_codes

BLOCK = 64
"""Columns whose changes reach the columns outside the block in one matrix product."""
RIDGE = 1e-6
"""Share of the mean diagonal that keeps a row's system solvable when a group is all zeros."""


def dequantized(codes: Tensor, params: AffineParams) -> Tensor:
    """[N, C] float32, the values of whole-number float codes [N, C]."""
    steps = _grouped(codes, params) - params.zeros[..., None]
    return (steps * params.scales.float()[..., None]).reshape(codes.shape)


def row_errors(D: Tensor, H: Tensor) -> Tensor:
    """[N] float64, d H d^T for each row of a difference D [N, C]."""
    return torch.einsum("nc,nc->n", (D @ H).double(), D.double())


def refit_scales(W: Tensor, H: Tensor, codes: Tensor, params: AffineParams) -> AffineParams:
    """The scales, as they are stored, that fit W [N, C] best with these codes under H.

    Rows for which rounding the solution to the stored type leaves no gain keep their scales.
    """
    n, g = params.scales.shape
    steps = _grouped(codes, params) - params.zeros[..., None]  # [N, G, S]
    # A row's error is a constant - 2 r s + s A s in its scales s.
    A = torch.empty(n, g, g, device=W.device)
    for group, rows_of_H in enumerate(H.chunk(g)):
        carried = steps[:, group] @ rows_of_H  # [N, C]
        A[:, group] = torch.einsum("ngs,ngs->ng", carried.view_as(steps), steps)
    r = torch.einsum("ngs,ngs->ng", (W @ H).view_as(steps), steps)
    A, r, old = A.double(), r.double(), params.scales.double()
    diagonal = A.diagonal(dim1=1, dim2=2)
    diagonal += RIDGE * diagonal.mean(dim=1, keepdim=True) + torch.finfo(torch.float32).tiny
    solution = torch.linalg.solve(A, r)
    # A group of zeros has the solution 0, and a negative scale is no scale.
    solution = torch.where(solution > 0, solution, old).float()
    fitted = stored_scales(solution, params.scales.dtype)
    is_better = _quadratic(A, r, fitted.double()) < _quadratic(A, r, old)
    return replace(params, scales=torch.where(is_better[:, None], fitted, params.scales))


def _quadratic(A: Tensor, r: Tensor, s: Tensor) -> Tensor:
    """[N], s A s - 2 r s."""
    return torch.einsum("ngh,ng,nh->n", A, s, s) - 2 * (r * s).sum(dim=1)


def descend(W: Tensor, H: Tensor, codes: Tensor, params: AffineParams) -> Tensor:
    """One sweep over all columns: better codes [N, C] for the same scales.

    H must have a positive diagonal.
    """
    c = W.shape[1]
    scales, zeros = params.scales.float().t().contiguous(), params.zeros.t().contiguous()  # [G, N]
    size = c // len(scales)
    codes_t = codes.t().contiguous()  # [C, N]
    Q = dequantized(codes, params).t().contiguous()  # [C, N]
    R = H @ (W.t() - Q)  # [C, N], what H makes of the error that is left
    for start in range(0, c, BLOCK):
        stop = min(start + BLOCK, c)
        changes = torch.empty_like(Q[start:stop])
        for j in range(start, stop):
            scale, zero = scales[j // size], zeros[j // size]
            best = torch.add(Q[j], R[j], alpha=1 / float(H[j, j]))
            codes_t[j] = to_codes(best, scale, zero, params)
            value = (codes_t[j] - zero) * scale
            change = torch.sub(value, Q[j], out=changes[j - start])
            Q[j] = value
            R[j:stop].addr_(H[j, j:stop], change, alpha=-1)
        R[:start].addmm_(H[:start, start:stop], changes, alpha=-1)
        R[stop:].addmm_(H[stop:, start:stop], changes, alpha=-1)
    return codes_t.t().contiguous()


def _grouped(codes: Tensor, params: AffineParams) -> Tensor:
    return codes.reshape(*params.scales.shape, -1)

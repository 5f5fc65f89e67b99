"""The inverse Hessian that GPTQ walks through, as the factor it needs, whatever the Hessian is.

GPTQ's update of the columns not yet quantized takes rows of the Cholesky factor U of the inverse,
U^T U = H^-1 (Frantar et al. 2022, alg. 1 and section 3.3, step 3). With the rows and columns of
H in reverse order, one Cholesky factorisation and one triangular inverse give U without forming
H^-1: H = R R^T with R upper triangular, so U = R^-1.

H is singular when there are fewer tokens than channels or some channels are never active, so a
share of its mean diagonal is added (`damp`). Where that is not enough, shares up to the whole
mean are tried; where even that fails, only the diagonal is kept, so that no error is carried from
one column to another. Both are told to the caller: a run must neither die in its last layers nor
hide what it did.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RUNGS = (1, 3, 10, 30, 100)
"""Multiples of the asked damping that are tried, up to all of the mean diagonal."""


@dataclass(frozen=True, slots=True, eq=False)
class InverseFactor:
    """The upper Cholesky factor of an inverse Hessian.

    Attributes:
        U: [C, C] float32, upper triangular, U^T U = (H + added)^-1.
        added: What was added to every element of H's diagonal.
        damp: The same as a share of the mean diagonal.
        is_diagonal: H's other elements were given up.
    """

    U: Tensor
    added: float
    damp: float
    is_diagonal: bool


def inverse_factor(H: Tensor, damp_percent: float) -> InverseFactor:
    """Factor the inverse of H [C, C], which must be finite and have no negative diagonal.

    Computed in float64: the small eigenvalues of H are the large ones of its inverse.
    """
    R = H.double().flip(0, 1)
    mean = float(R.diagonal().mean())
    if mean <= 0:  # no input was ever active
        mean = 1.0
    for rung in RUNGS:
        damp = min(damp_percent * rung, 1.0)
        damped = R + torch.eye(len(R), dtype=R.dtype, device=R.device) * (damp * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            U = _inverse(lower.flip(0, 1)).float()
            if torch.isfinite(U).all():
                return InverseFactor(U, damp * mean, damp, is_diagonal=False)
        if damp == 1.0:
            break
    diagonal = H.diagonal().double() + damp * mean
    return InverseFactor(diagonal.rsqrt().diag().float(), damp * mean, damp, is_diagonal=True)


def _inverse(upper: Tensor) -> Tensor:
    eye = torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
    inverse: Tensor = torch.linalg.solve_triangular(upper, eye, upper=True)
    return inverse

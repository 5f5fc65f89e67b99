"""The factor of the inverse Hessian is right, and there is one for every Hessian."""

import pytest
import torch

from llmbench.quant.hessian import inverse_factor


def hessian(num_tokens: int, num_channels: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(num_tokens, num_channels, generator=torch.Generator().manual_seed(seed))
    return x.t() @ x


def test_factor_squares_to_the_inverse() -> None:
    H = hessian(100, 24)
    factor = inverse_factor(H, 0.01)
    damped = H.double() + factor.added * torch.eye(24)
    torch.testing.assert_close((factor.U.t() @ factor.U).double(), damped.inverse())
    assert torch.equal(factor.U, factor.U.triu())
    assert (factor.U.diagonal() > 0).all()


def test_damping_is_a_share_of_the_mean_diagonal() -> None:
    H = torch.diag(torch.tensor([1.0, 3.0]))
    factor = inverse_factor(H, 0.05)
    assert factor.damp == 0.05
    assert factor.added == pytest.approx(0.1)
    assert not factor.is_diagonal


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_singular_hessian_is_damped(num_tokens: int) -> None:
    factor = inverse_factor(hessian(num_tokens, 16), 0.01)
    assert torch.isfinite(factor.U).all()
    assert factor.damp == 0.01


def test_damping_rises_until_the_factorisation_succeeds() -> None:
    """The eigenvalues are 2.2 and -0.2: a tenth of the mean diagonal is too little."""
    H = torch.tensor([[1.0, 1.2], [1.2, 1.0]])
    factor = inverse_factor(H, 0.01)
    assert factor.damp == pytest.approx(0.3)
    assert not factor.is_diagonal


def test_hopeless_hessian_keeps_its_diagonal() -> None:
    H = torch.tensor([[1.0, 9.0], [9.0, 3.0]])
    factor = inverse_factor(H, 0.01)
    assert factor.is_diagonal
    assert factor.damp == 1.0
    torch.testing.assert_close(factor.U, torch.diag(torch.tensor([3.0, 5.0]).rsqrt()))


def test_huge_and_tiny_hessians_give_the_same_rounding_problem() -> None:
    """U only scales with H, so that no number of tokens brings it out of range."""
    H = hessian(40, 8)
    for factor in (1e-12, 1e12):
        U = inverse_factor(H * factor, 0.01).U * factor**0.5
        torch.testing.assert_close(U, inverse_factor(H, 0.01).U, rtol=1e-4, atol=1e-6)

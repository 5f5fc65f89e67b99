"""Hadamard matrices: orthogonal at every size that models have, and applied as their factors."""

import math

import pytest
import torch

from llmbench.quant.hadamard import hadamard_factors, random_hadamard

SIZES = [
    *(1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84),
    *(96, 100, 104, 108, 112, 124, 128, 132, 140, 148, 160, 256, 576, 640, 768, 896, 960),
]


@pytest.mark.parametrize("size", SIZES)
def test_hadamard_times_its_transpose_is_the_identity(size: int) -> None:
    q = random_hadamard(size, seed=1)
    assert q.is_hadamard
    matrix = q.matrix()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        matrix.abs(), torch.full_like(matrix, 1 / math.sqrt(size)), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("size", [1152, 1600, 2304, 2560, 3584, 4096, 5120, 5376, 14336])
def test_large_model_widths_have_a_hadamard_matrix(size: int) -> None:
    factors = hadamard_factors(size)
    assert factors is not None
    assert math.prod(len(factor) for factor in factors) == size
    for factor in factors:
        eye = torch.eye(len(factor)).double()
        torch.testing.assert_close(factor @ factor.T, eye, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [3, 6, 50, 92])
def test_a_size_without_known_hadamard_gets_a_random_orthogonal(size: int) -> None:
    q = random_hadamard(size, seed=1)
    assert not q.is_hadamard
    matrix = q.matrix()
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [6, 24, 128, 576])
def test_rotate_is_the_product_with_the_matrix(size: int) -> None:
    q = random_hadamard(size, seed=3)
    x = torch.randn(5, 2, size, dtype=torch.float64)
    torch.testing.assert_close(q.rotate(x), x @ q.matrix(), rtol=0, atol=1e-12)


def test_rotate_returns_the_type_it_was_given() -> None:
    q = random_hadamard(12, seed=0)
    assert q.rotate(torch.ones(2, 12, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_signs_follow_the_seed() -> None:
    assert torch.equal(random_hadamard(64, 5).signs, random_hadamard(64, 5).signs)
    assert not torch.equal(random_hadamard(64, 5).signs, random_hadamard(64, 6).signs)


def test_one_outlier_channel_is_spread_over_all() -> None:
    x = torch.zeros(1, 576, dtype=torch.float64)
    x[0, 7] = 24.0
    torch.testing.assert_close(
        random_hadamard(576, 0).rotate(x).abs(), torch.ones(1, 576).double(), rtol=0, atol=1e-12
    )

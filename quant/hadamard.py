"""Orthogonal matrices that spread one large value over all channels.

A Hadamard matrix has entries 1 and -1 and orthogonal rows; divided by the root of its size it is
a rotation in which every output holds every input with the same weight, so that an outlier
channel ends up shared by all (Chee et al. 2023; Ashkboos et al. 2024, QuaRot). The sizes of
models are rarely powers of two, so two constructions from quadratic residues serve besides
Sylvester's doubling (Paley 1933): of size q + 1 for a prime q = 3 mod 4, and of size 2 (q + 1)
for q = 1 mod 4, a prime or the square of one. Doubling carries a size n to 2 n. That reaches, for
instance, 576 = 16 * 36, 896 = 32 * 28 and 960 = 16 * 60; where nothing reaches the size, a random
orthogonal matrix takes its place. Random signs on the inputs keep the rotation from lining up
with structure in the model.

The matrix is a Kronecker product and is applied factor by factor: n * (m + 64 + ...) products
a row in place of n * n.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

MAX_POWER_OF_TWO = 64
"""Sylvester factors up to this size are one small matrix product each."""
ROWS_AT_ONCE = 8192
"""Rows that are in float64 at a time: an embedding of 128,256 rows must not be so whole."""


@dataclass(frozen=True, slots=True, eq=False)
class Orthogonal:
    """An orthogonal matrix Q = diag(signs) (F1 x F2 x ...) of size n.

    Attributes:
        signs: [n] float64 of 1 and -1.
        factors: Orthogonal float64 matrices, whose Kronecker product has size n.
        is_hadamard: All entries have the same size; False for a random orthogonal matrix.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]
    is_hadamard: bool

    @property
    def size(self) -> int:
        """Rows and columns, n."""
        return self.signs.shape[0]

    def rotate(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """X [..., n] times diag(gain) Q, computed in float64, returned in x's type."""
        scales = self.signs if gain is None else self.signs * gain.double()
        rows = x.reshape(-1, self.size)
        parts = [self._rotate(part, scales) for part in torch.split(rows, ROWS_AT_ONCE)]
        return torch.cat(parts).reshape(x.shape)

    def matrix(self) -> Tensor:
        """Q itself, [n, n] float64."""
        return self.rotate(torch.eye(self.size, dtype=torch.float64))

    def _rotate(self, rows: Tensor, scales: Tensor) -> Tensor:
        sizes = [factor.shape[0] for factor in self.factors]
        y = (rows.double() * scales).reshape(-1, *sizes)
        for axis, factor in enumerate(self.factors, start=1):
            y = (y.movedim(axis, -1) @ factor).movedim(-1, axis)
        return y.reshape(rows.shape).to(rows.dtype)


def random_hadamard(size: int, seed: int) -> Orthogonal:
    """A Hadamard matrix with random signs, or a random orthogonal one where none is known."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    factors = hadamard_factors(size)
    if factors is not None:
        return Orthogonal(signs, factors, is_hadamard=True)
    normal = torch.randn(size, size, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    # With the signs of R's diagonal the distribution is uniform (Mezzadri 2007, section 5).
    return Orthogonal(signs, (q * r.diagonal().sign(),), is_hadamard=False)


def hadamard_factors(size: int) -> tuple[Tensor, ...] | None:
    """Normalized matrices whose Kronecker product is a Hadamard matrix; None if none is known."""
    power = size & -size
    while power >= 1:
        base = size // power
        matrix = _paley(base) if base > 1 else torch.ones(1, 1, dtype=torch.float64)
        if matrix is not None:
            doublings = _sylvester_factors(power)
            kept = [matrix / math.sqrt(base)] if base > 1 or not doublings else []
            return (*kept, *doublings)
        power //= 2
    return None


def _sylvester_factors(size: int) -> list[Tensor]:
    factors = []
    while size > 1:
        part = min(size, MAX_POWER_OF_TWO)
        matrix = torch.ones(1, 1, dtype=torch.float64)
        pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
        for _ in range(part.bit_length() - 1):
            matrix = torch.kron(matrix, pair)
        factors.append(matrix)
        size //= part
    return factors


@lru_cache(maxsize=16)
def _paley(size: int) -> Tensor | None:
    """An unnormalized Hadamard matrix of this size by Paley's constructions, float64."""
    if size % 4:
        return None
    identity = torch.eye(size, dtype=torch.float64)
    if (q := size - 1) % 4 == 3 and _is_prime(q):
        skew = _bordered(_jacobsthal(q))
        skew[1:, 0] = -1
        return identity + skew
    q = size // 2 - 1
    if q % 4 == 1 and (_is_prime(q) or _is_square_of_prime(q)):
        conference = _bordered(_jacobsthal(q))
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(conference, plus) + torch.kron(torch.eye(q + 1).double(), minus)
    return None


def _bordered(matrix: Tensor) -> Tensor:
    """A row and a column of ones around a matrix, 0 in the corner."""
    bordered = torch.ones(len(matrix) + 1, len(matrix) + 1, dtype=torch.float64)
    bordered[0, 0] = 0
    bordered[1:, 1:] = matrix
    return bordered


def _jacobsthal(q: int) -> Tensor:
    """[q, q]: 1 where the difference of two field elements is a square, -1 where not, 0 for 0."""
    if _is_prime(q):
        elements = torch.arange(q)
        return _legendre(elements[:, None] - elements[None, :], q)
    # The field of p * p elements a + b * root(r), r no square: such an element is a square
    # exactly if its norm a * a - r * b * b is one among the p (Lidl & Niederreiter, ch. 5).
    p = math.isqrt(q)
    symbols = _legendre(torch.arange(p), p)
    r = int((symbols == -1).nonzero()[0])
    elements = torch.arange(q)
    a = (elements // p)[:, None] - (elements // p)[None, :]
    b = (elements % p)[:, None] - (elements % p)[None, :]
    return _legendre(a * a - r * b * b, p)


def _legendre(values: Tensor, p: int) -> Tensor:
    """The Legendre symbol of whole numbers for an odd prime p, float64."""
    symbols = torch.full((p,), -1.0, dtype=torch.float64)
    symbols[(torch.arange(1, p) ** 2) % p] = 1
    symbols[0] = 0
    return symbols[values % p]


def _is_prime(number: int) -> bool:
    return number > 2 and all(number % d for d in range(2, math.isqrt(number) + 1))


def _is_square_of_prime(number: int) -> bool:
    root = math.isqrt(number)
    return root * root == number and _is_prime(root)

"""All matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.structures.base import Square, Structure

SMALL = 64
"""Products of matrices of no more rows than this take no longer than other operations."""


@dataclass(frozen=True)
class Dense(Structure):
    """Every entry is free: ``dim²`` of them."""

    dim: int
    invertible = True

    @property
    def numel(self) -> int:
        return self.dim**2

    def _matrix(self, a: Tensor) -> Tensor:
        return a.unflatten(-1, (self.dim, self.dim))

    def identity(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        return torch.eye(self.dim, dtype=dtype, device=device).flatten()

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return (self._matrix(a) @ self._matrix(b)).flatten(-2)

    def apply(self, a: Tensor, x: Tensor) -> Tensor:
        return self._matrix(a) @ x

    def apply_t(self, a: Tensor, x: Tensor) -> Tensor:
        return self._matrix(a).mT @ x

    def gram(self, x: Tensor) -> Tensor:
        return symmetric_product(x, x).flatten(-2)

    def self_gram(self, a: Tensor) -> Tensor:
        return self.gram(self._matrix(a).mT)

    def add_matmul(self, c: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
        return add_product(self._matrix(c), self._matrix(a), self._matrix(b), 1.0, alpha).flatten(-2)

    def add_self_gram(self, c: Tensor, a: Tensor, beta: float, alpha: float) -> Tensor:
        if _halves(self._matrix(a), self.dim):
            return super().add_self_gram(c, a, beta, alpha)
        a = self._matrix(a)
        return add_product(self._matrix(c), a.mT, a, beta, alpha).flatten(-2)

    def inverse(self, a: Tensor) -> Tensor:
        # inv_ex, unlike inv, does not wait for the device to report on singular input.
        return torch.linalg.inv_ex(self._matrix(a)).inverse.flatten(-2)

    def dense(self, a: Tensor) -> Tensor:
        return self._matrix(a)

    def add_identity_(self, a: Tensor, value: float) -> Tensor:
        a[..., :: self.dim + 1].add_(value)
        return a

    def trace(self, a: Tensor) -> Tensor:
        return a[..., :: self.dim + 1].sum(-1, keepdim=True)

    def gram_beside(self, x: Tensor, constant: float | None) -> Tensor:
        if constant is None:
            return self.gram(x)
        matrix = x.new_empty(*x.shape[:-2], self.dim, self.dim)
        matrix[..., :-1, :-1] = symmetric_product(x, x)
        matrix[..., :-1, -1] = matrix[..., -1, :-1] = constant * x.sum(-1)
        matrix[..., -1, -1] = x.shape[-1] * constant**2
        return matrix.flatten(-2)

    def cross_gram(self, x: Tensor, y: Tensor) -> Tensor:
        product = x @ y.mT
        return ((product + product.mT) / 2).flatten(-2)

    def norm_bound(self, a: Tensor) -> Tensor:
        """Frobenius' norm; of small matrices the fourth root of tr((A Aᵀ)²), which is closer."""
        return super().norm_bound(a) if self.dim > SMALL else fourth_root(self._matrix(a))

    def gram_first(self, n: int) -> bool:
        # n d² for the Gram matrix and 2 d³ for the sandwich, instead of 2 n d²: pays from 2 d on, and a
        # little sooner since fewer columns are written.
        return n > 1.6 * self.dim

    def sandwich(self, a: Tensor, gram: Tensor) -> Tensor:
        a = self._matrix(a)
        return symmetric_product(a.mT, a.mT @ self._matrix(gram)).flatten(-2)

    @property
    def square(self) -> Square:
        return DenseSquare(self)


HALVES = 256
"""Symmetric products of matrices of twice as many rows, and as many columns, are taken by halves."""


def symmetric_product(x: Tensor, y: Tensor) -> Tensor:
    """X Yᵀ where that is symmetric: large ones without a part of what is below the diagonal."""
    if not _halves(x, x.shape[-2]):
        return x @ y.mT
    out = x.new_empty(len(x), len(x))
    _fill(out, x, y)
    return out


def _halves(x: Tensor, dim: int) -> bool:
    return x.is_cpu and x.ndim == 2 and dim >= 2 * HALVES and x.shape[-1] >= HALVES


def _fill(out: Tensor, x: Tensor, y: Tensor) -> None:
    half = len(x) // 2
    if half < HALVES // 2:
        torch.mm(x, y.mT, out=out)
        return
    _fill(out[:half, :half], x[:half], y[:half])
    torch.mm(x[:half], y[half:].mT, out=out[:half, half:])
    out[half:, :half] = out[:half, half:].mT
    _fill(out[half:, half:], x[half:], y[half:])


def add_product(c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """β C + α A B of matrices, in one go."""
    if c.ndim == 2:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    if c.ndim == 3:
        return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)
    shape = c.shape
    c, a, b = (m.flatten(0, -3) for m in (c, a, b))
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha).view(shape)


def fourth_root(matrix: Tensor) -> Tensor:
    """The fourth root of tr((M Mᵀ)²), ``[..., 1]``, which is no smaller than |M|₂."""
    square = matrix @ matrix.mT
    return torch.linalg.vector_norm(square.flatten(-2), dim=-1, keepdim=True).sqrt()


@dataclass(frozen=True)
class DenseSquare(Square):
    """A Aᵀ as a full matrix, for structures of which it has no zeros."""

    structure: Structure

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.structure.dim**2

    def of(self, a: Tensor) -> Tensor:
        a = self.structure.dense(a)
        return symmetric_product(a, a).flatten(-2)

    def apply(self, entries: Tensor, x: Tensor, out: Tensor) -> Tensor:
        return torch.matmul(entries.unflatten(-1, (self.structure.dim, -1)), x, out=out)

"""Lower and upper triangular matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ingot.structures.base import Square, Structure
from ingot.structures.dense import DenseSquare


@lru_cache(maxsize=64)
def _positions(dim: int, upper: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the triangle's entries stand in the flattened matrix, and how often Π̂ counts each."""
    rows, columns = (torch.triu_indices if upper else torch.tril_indices)(dim, dim, device=device)
    return rows * dim + columns, torch.where(rows == columns, 1, 2)


@dataclass(frozen=True)
class _Triangular(Structure):
    """Half of the entries are free, row by row; products go through the full matrix."""

    dim: int
    _upper: ClassVar[bool]

    @property
    def numel(self) -> int:
        return self.dim * (self.dim + 1) // 2

    def _matrix(self, a: Tensor) -> Tensor:
        positions, _ = _positions(self.dim, self._upper, a.device)
        matrix = a.new_zeros(*a.shape[:-1], self.dim**2)
        matrix[..., positions] = a
        return matrix.unflatten(-1, (self.dim, self.dim))

    def _entries(self, matrix: Tensor) -> Tensor:
        positions, _ = _positions(self.dim, self._upper, matrix.device)
        return matrix.flatten(-2)[..., positions]

    def identity(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        return self._entries(torch.eye(self.dim, dtype=dtype, device=device))

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self._entries(self._matrix(a) @ self._matrix(b))

    def apply(self, a: Tensor, x: Tensor) -> Tensor:
        return self._matrix(a) @ x

    def apply_t(self, a: Tensor, x: Tensor) -> Tensor:
        return self._matrix(a).mT @ x

    def gram(self, x: Tensor) -> Tensor:
        _, counts = _positions(self.dim, self._upper, x.device)
        return self._entries(x @ x.mT) * counts

    def self_gram(self, a: Tensor) -> Tensor:
        return self.gram(self._matrix(a).mT)

    def flops(self, columns: int) -> int:
        return 2 * self.dim**2 * columns

    @property
    def product_flops(self) -> int:
        return self.flops(self.dim)

    def dense(self, a: Tensor) -> Tensor:
        return self._matrix(a)

    @property
    def square(self) -> Square:
        return DenseSquare(self)


class LowerTriangular(_Triangular):
    """Zeros above the diagonal."""

    _upper = False


class UpperTriangular(_Triangular):
    """Zeros below the diagonal."""

    _upper = True

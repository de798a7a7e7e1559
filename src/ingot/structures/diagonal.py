"""Diagonal matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.structures.base import Structure


@dataclass(frozen=True)
class Diagonal(Structure):
    """Only the diagonal is free."""

    dim: int
    invertible = True

    @property
    def numel(self) -> int:
        return self.dim

    def identity(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        return torch.ones(self.dim, dtype=dtype, device=device)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def apply(self, a: Tensor, x: Tensor) -> Tensor:
        return a.unsqueeze(-1) * x

    def apply_t(self, a: Tensor, x: Tensor) -> Tensor:
        return self.apply(a, x)

    def gram(self, x: Tensor) -> Tensor:
        return x.square().sum(-1)

    def self_gram(self, a: Tensor) -> Tensor:
        return a.square()

    def inverse(self, a: Tensor) -> Tensor:
        return a.reciprocal()

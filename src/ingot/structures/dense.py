"""All matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.structures.base import Structure


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
        return (x @ x.mT).flatten(-2)

    def self_gram(self, a: Tensor) -> Tensor:
        return self.gram(self._matrix(a).mT)

    def inverse(self, a: Tensor) -> Tensor:
        # inv_ex, unlike inv, does not wait for the device to report on singular input.
        return torch.linalg.inv_ex(self._matrix(a)).inverse.flatten(-2)

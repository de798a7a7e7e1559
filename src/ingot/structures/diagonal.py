"""Diagonal matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from ingot.structures.base import Square, SquareSection, Structure


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

    def add_matmul(self, c: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
        return torch.addcmul(c, a, b, value=alpha)

    def add_self_gram(self, c: Tensor, a: Tensor, beta: float, alpha: float) -> Tensor:
        return (c * beta).addcmul_(a, a, value=alpha)

    def inverse(self, a: Tensor) -> Tensor:
        return a.reciprocal()

    def gram_beside(self, x: Tensor, constant: float | None) -> Tensor:
        sums = self.gram(x)
        return sums if constant is None else pad(sums, (0, 1), value=x.shape[-1] * constant**2)

    def add_identity_(self, a: Tensor, value: float) -> Tensor:
        return a.add_(value)

    def trace(self, a: Tensor) -> Tensor:
        return a.sum(-1, keepdim=True)

    def norm(self, a: Tensor) -> Tensor:
        return torch.linalg.vector_norm(a, torch.inf, dim=-1, keepdim=True)

    def norm_bound(self, a: Tensor) -> Tensor:
        return self.norm(a)

    def cross_gram(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(-1)

    def gram_first(self, n: int) -> bool:
        return True

    def sandwich(self, a: Tensor, gram: Tensor) -> Tensor:
        return a.square() * gram

    @property
    def square(self) -> Square:
        return Squares(self.dim)

    def mixed_at(self, row: int) -> tuple[int, int]:
        return row, row

    def section(self, start: int, stop: int) -> tuple[Structure, slice]:
        return Diagonal(stop - start), slice(start, stop)


@dataclass(frozen=True)
class Squares(Square):
    """a², one number for each row."""

    dim: int
    works_in_place = True

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.dim

    def sections(self, entries: Tensor) -> list[SquareSection]:
        last = self.dim - 1
        first = SquareSection(0, last, Squares(last), entries[..., :-1])
        return [first, SquareSection(last, self.dim, Squares(1), entries[..., -1:])] if last else []

    def of(self, a: Tensor) -> Tensor:
        return a.square()

    def apply(self, entries: Tensor, x: Tensor, out: Tensor) -> Tensor:
        return torch.mul(x, entries.unsqueeze(-1), out=out)

    def into(self, entries: Tensor, out: Tensor) -> Callable[[Tensor], object]:
        return partial(torch.mul, entries.unsqueeze(-1), out=out)

"""The two combinators: structures of structures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ingot.structures.base import Structure


@dataclass(frozen=True)
class _Block(Structure):
    """Two structures on the diagonal and a dense block B beside them.

    B takes the columns of one part to the rows of the other; call them ``source`` and ``target``. Both
    combinators then obey the same formulas. Entries are stored as first, B, second.
    """

    first: Structure
    second: Structure
    _upper: ClassVar[bool]

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.first.dim + self.second.dim

    @property
    def numel(self) -> int:
        return self.first.numel + self.first.dim * self.second.dim + self.second.numel

    @property
    def _parts(self) -> tuple[Structure, Structure]:
        """Target and source."""
        return (self.first, self.second) if self._upper else (self.second, self.first)

    def _order(self, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """(target, source) to (first, second), and back."""
        return (target, source) if self._upper else (source, target)

    def _split(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The entries of the target, B as a matrix, the entries of the source."""
        sizes = (self.first.numel, self.first.dim * self.second.dim, self.second.numel)
        first, b, second = a.split(sizes, dim=-1)
        target, source = self._order(first, second)
        return target, b.unflatten(-1, tuple(part.dim for part in self._parts)), source

    def _join(self, target: Tensor, b: Tensor, source: Tensor) -> Tensor:
        first, second = self._order(target, source)
        return torch.cat((first, b.flatten(-2), second), dim=-1)

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the target and of the source."""
        first, second = x.split((self.first.dim, self.second.dim), dim=-2)
        return self._order(first, second)

    def identity(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        target, source = (part.identity(dtype=dtype, device=device) for part in self._parts)
        return self._join(target, target.new_zeros(self._parts[0].dim, self._parts[1].dim), source)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        (target, source) = self._parts
        (a_t, a_b, a_s), (b_t, b_b, b_s) = self._split(a), self._split(b)
        beside = target.apply(a_t, b_b) + source.apply_t(b_s, a_b.mT).mT
        return self._join(target.matmul(a_t, b_t), beside, source.matmul(a_s, b_s))

    def apply(self, a: Tensor, x: Tensor) -> Tensor:
        (target, source), (a_t, b, a_s), (x_t, x_s) = self._parts, self._split(a), self._rows(x)
        rows = self._order(target.apply(a_t, x_t) + b @ x_s, source.apply(a_s, x_s))
        return torch.cat(rows, dim=-2)

    def apply_t(self, a: Tensor, x: Tensor) -> Tensor:
        (target, source), (a_t, b, a_s), (x_t, x_s) = self._parts, self._split(a), self._rows(x)
        rows = self._order(target.apply_t(a_t, x_t), source.apply_t(a_s, x_s) + b.mT @ x_t)
        return torch.cat(rows, dim=-2)

    def gram(self, x: Tensor) -> Tensor:
        (target, source), (x_t, x_s) = self._parts, self._rows(x)
        return self._join(target.gram(x_t), 2 * x_t @ x_s.mT, source.gram(x_s))

    def self_gram(self, a: Tensor) -> Tensor:
        (target, source), (a_t, b, a_s) = self._parts, self._split(a)
        in_source = source.self_gram(a_s) + source.gram(b.mT)
        return self._join(target.self_gram(a_t), 2 * target.apply_t(a_t, b), in_source)

    @property
    def repeats(self) -> bool:
        return self.first.repeats or self.second.repeats

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        if not self.repeats:
            return super().inner(a, b)
        (target, source) = self._parts
        (a_t, a_b, a_s), (b_t, b_b, b_s) = self._split(a), self._split(b)
        beside = (a_b * b_b).sum((-2, -1)).unsqueeze(-1)
        return target.inner(a_t, b_t) + beside + source.inner(a_s, b_s)

    def trace(self, a: Tensor) -> Tensor:
        (target, source), (a_t, _, a_s) = self._parts, self._split(a)
        return target.trace(a_t) + source.trace(a_s)

    def add_identity_(self, a: Tensor, value: float) -> Tensor:
        (target, source), (a_t, _, a_s) = self._parts, self._split(a)
        target.add_identity_(a_t, value)
        source.add_identity_(a_s, value)
        return a

    def flops(self, columns: int) -> int:
        beside = 2 * self.first.dim * self.second.dim * columns
        return self.first.flops(columns) + beside + self.second.flops(columns)

    @property
    def product_flops(self) -> int:
        target, source = self._parts
        beside = target.flops(source.dim) + source.flops(target.dim)
        return self.first.product_flops + beside + self.second.product_flops

    def __str__(self) -> str:
        return f"{self.name}({self.first},{self.second})"


class Upper(_Block):
    """[[first, B], [0, second]]."""

    _upper = True


class Lower(_Block):
    """[[first, 0], [B, second]]."""

    _upper = False

"""The two combinators: structures of structures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ingot.structures.base import Square, Structure, beside
from ingot.structures.dense import Dense, fourth_root


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

    # With G for S and T for the target's own matrix, Kᵀ G K is [[Tᵀ G T, Tᵀ (G B + Y)], [.., M + Sᵀ G S]] for
    # Y = (beside) S: all of it follows from Π̂ where the target is dense and the source's part does.

    def gram_first(self, n: int) -> bool:
        target, source = self._parts
        return isinstance(target, Dense) and target.gram_first(n) and source.gram_first(n)

    def sandwich(self, a: Tensor, gram: Tensor) -> Tensor:
        if not isinstance(self._parts[0], Dense):
            return super().sandwich(a, gram)
        (target, source), (a_t, b, a_s), (g_t, g_beside, g_s) = self._parts, self._split(a), self._split(gram)
        g_b = target.apply(g_t, b)
        y = source.apply_t(a_s, g_beside.mT).mT  # twice what stands beside G in the rows of the target
        in_source = source.cross_gram(b.mT, (g_b + y).mT) + source.sandwich(a_s, g_s)
        in_b = target.apply_t(a_t, 2 * g_b + y)
        return self._join(target.sandwich(a_t, g_t), in_b, in_source)

    def cross_gram(self, x: Tensor, y: Tensor) -> Tensor:
        (target, source), (x_t, x_s), (y_t, y_s) = self._parts, self._rows(x), self._rows(y)
        b = x_t @ y_s.mT + y_t @ x_s.mT
        return self._join(target.cross_gram(x_t, y_t), b, source.cross_gram(x_s, y_s))

    def gram_beside(self, x: Tensor, constant: float | None) -> Tensor:
        if constant is None:
            return self.gram(x)
        target, source = self._parts
        first, second = x.split((self.first.dim, self.second.dim - 1), dim=-2)
        if self._upper:
            b = torch.cat((first @ second.mT, constant * first.sum(-1, keepdim=True)), dim=-1)
            return self._join(target.gram(first), 2 * b, source.gram_beside(second, constant))
        second = beside(second, constant)
        return self._join(target.gram(second), 2 * second @ first.mT, source.gram(first))

    def norm_bound(self, a: Tensor) -> Tensor:
        """That of the 2 x 2 matrix of bounds on the parts."""
        (target, source), (a_t, b, a_s) = self._parts, self._split(a)
        of_b = fourth_root(b if b.shape[-2] < b.shape[-1] else b.mT).square()
        of_t, of_s = target.norm_bound(a_t).square(), source.norm_bound(a_s).square()
        half = (of_t + of_s + of_b) / 2
        return (half + (half.square() - of_t * of_s).clamp_min(0).sqrt()).sqrt()

    def flops(self, columns: int) -> int:
        beside = 2 * self.first.dim * self.second.dim * columns
        return self.first.flops(columns) + beside + self.second.flops(columns)

    @property
    def product_flops(self) -> int:
        target, source = self._parts
        beside = target.flops(source.dim) + source.flops(target.dim)
        return self.first.product_flops + beside + self.second.product_flops

    @property
    def square(self) -> Square | None:
        """The target's rows of A Aᵀ are full; those of the source are its own A Aᵀ beside them."""
        (target, source) = self._parts
        if not isinstance(target, Dense) or source.square is None:
            return None
        inner = source.square
        first, middle, last = 0, inner, 0
        if isinstance(inner, _Bordered):
            first, middle, last = inner.first, inner.middle, inner.last
        above, below = (target.dim, 0) if self._upper else (0, target.dim)
        return _Bordered(self, first + above, middle, last + below)

    def __str__(self) -> str:
        return f"{self.name}({self.first},{self.second})"


class Upper(_Block):
    """[[first, B], [0, second]]."""

    _upper = True


class Lower(_Block):
    """[[first, 0], [B, second]]."""

    _upper = False


@dataclass(frozen=True)
class _Bordered(Square):
    """A Aᵀ with ``first`` and ``last`` full rows and columns, and a square of its own between them.

    That is what hierarchical structures have. The full rows are stored first, then what is in the middle.
    """

    structure: _Block
    first: int
    middle: Square
    last: int

    @property
    def _border(self) -> int:
        return self.first + self.last

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self._border * self.structure.dim + self.middle.numel

    def of(self, a: Tensor) -> Tensor:
        s = self.structure
        ones = torch.eye(s.dim, self.first, dtype=a.dtype, device=a.device)
        lasts = torch.eye(self.last, dtype=a.dtype, device=a.device)
        lasts = torch.nn.functional.pad(lasts, (0, 0, s.dim - self.last, 0))
        rows = s.apply(a, s.apply_t(a, torch.cat((ones, lasts), dim=1))).mT
        return torch.cat((rows.flatten(-2), self.middle.of(_core(s, a))), dim=-1)

    def apply(self, entries: Tensor, x: Tensor, out: Tensor) -> Tensor:
        dim, first, inner = self.structure.dim, self.first, slice(self.first, self.structure.dim - self.last)
        rows, middle = entries.split((self._border * dim, self.middle.numel), dim=-1)
        rows = rows.unflatten(-1, (self._border, dim))
        border = torch.cat((x[..., :first, :], x[..., dim - self.last :, :]), dim=-2)
        full = rows @ x
        self.middle.apply(middle, x[..., inner, :], out[..., inner, :])
        if out.ndim == 2:
            out[inner].addmm_(rows[:, inner].mT, border)
        else:
            out[..., inner, :] += rows[..., inner].mT @ border
        out[..., :first, :] = full[..., :first, :]
        out[..., dim - self.last :, :] = full[..., first:, :]
        return out


def _core(structure: Structure, a: Tensor) -> Tensor:
    """The entries of the innermost source, which no border crosses."""
    while isinstance(structure, _Block) and structure.square is not None:
        a = structure._split(a)[2]
        structure = structure._parts[1]
    return a

"""A structure with full rows around it: what the paper's hierarchical and rank-k ones are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ingot.structures.base import Square, Structure, beside
from ingot.structures.dense import fourth_root


@dataclass(frozen=True)
class Hierarchical(Structure):
    """[[A, B, E], [0, middle, 0], [0, B', J]]: ``first`` full rows above the middle, ``last`` below it.

    It is ``upper(dense,lower(middle,dense))`` with fewer operations: with the last rows and columns moved to
    the first ones, it is [[T, B], [0, middle]] for T = [[A, E], [0, J]], the border. Entries are stored as A,
    E, J, B, middle.
    """

    first: int
    middle: Structure
    last: int

    @property
    def border(self) -> int:
        """How many rows are full."""
        return self.first + self.last

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.border + self.middle.dim

    @property
    def _sizes(self) -> tuple[int, int, int, int, int]:
        f, r = self.first, self.last
        return f * f, f * r, r * r, self.border * self.middle.dim, self.middle.numel

    @property
    def numel(self) -> int:
        return sum(self._sizes)

    def _split(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """T and B as matrices, and the entries of the middle."""
        corner, e, j, b, middle = a.split(self._sizes, dim=-1)
        t = corner.unflatten(-1, (self.first, self.first))
        if self.last:
            above = torch.cat((t, e.unflatten(-1, (self.first, self.last))), dim=-1)
            t = torch.cat((above, pad(j.unflatten(-1, (self.last, self.last)), (self.first, 0))), dim=-2)
        return t, b.unflatten(-1, (self.border, self.middle.dim)), middle

    def _join(self, t: Tensor, b: Tensor, middle: Tensor, *, symmetric: bool = False) -> Tensor:
        """Back from these; of a symmetric T, E counts double."""
        f, e = self.first, t[..., : self.first, self.first :]
        parts = (t[..., :f, :f], 2 * e if symmetric else e, t[..., f:, f:], b)
        return torch.cat((*(part.flatten(-2) for part in parts), middle), dim=-1)

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the border and of the middle."""
        above, middle, below = x.split((self.first, self.middle.dim, self.last), dim=-2)
        return torch.cat(
            (above, below), dim=-2
        ) if self.first and self.last else above if self.first else below, middle

    def _in_order(self, border: Tensor, middle: Tensor, dim: int) -> Tensor:
        above, below = border.split((self.first, self.last), dim=dim)
        return torch.cat((above, middle, below), dim=dim)

    def identity(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        t = torch.eye(self.border, dtype=dtype, device=device)
        return self._join(
            t, t.new_zeros(self.border, self.middle.dim), self.middle.identity(dtype=dtype, device=device)
        )

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        (a_t, a_b, a_m), (b_t, b_b, b_m) = self._split(a), self._split(b)
        right = self.middle.apply_t(b_m, a_b.mT).mT
        return self._join(a_t @ b_t, a_t @ b_b + right, self.middle.matmul(a_m, b_m))

    def apply(self, a: Tensor, x: Tensor) -> Tensor:
        (t, b, middle), (x_r, x_m) = self._split(a), self._rows(x)
        return self._in_order(t @ x_r + b @ x_m, self.middle.apply(middle, x_m), -2)

    def apply_t(self, a: Tensor, x: Tensor) -> Tensor:
        (t, b, middle), (x_r, x_m) = self._split(a), self._rows(x)
        return self._in_order(t.mT @ x_r, b.mT @ x_r + self.middle.apply_t(middle, x_m), -2)

    def gram(self, x: Tensor) -> Tensor:
        x_r, x_m = self._rows(x)
        return self._join(x_r @ x_r.mT, 2 * x_r @ x_m.mT, self.middle.gram(x_m), symmetric=True)

    def self_gram(self, a: Tensor) -> Tensor:
        t, b, middle = self._split(a)
        in_middle = self.middle.self_gram(middle) + self.middle.gram(b.mT)
        return self._join(t.mT @ t, 2 * t.mT @ b, in_middle, symmetric=True)

    @property
    def repeats(self) -> bool:
        return self.middle.repeats

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        if not self.repeats:
            return super().inner(a, b)
        (*of_a, a_m), (*of_b, b_m) = a.split(self._sizes, dim=-1), b.split(self._sizes, dim=-1)
        around = sum((p * q).sum(-1, keepdim=True) for p, q in zip(of_a, of_b, strict=True))
        return around + self.middle.inner(a_m, b_m)

    def _diagonals(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The diagonals of A and J, and the middle."""
        corner, _, j, _, middle = a.split(self._sizes, dim=-1)
        return corner[..., :: self.first + 1], j[..., :: self.last + 1], middle

    def trace(self, a: Tensor) -> Tensor:
        above, below, middle = self._diagonals(a)
        return above.sum(-1, keepdim=True) + below.sum(-1, keepdim=True) + self.middle.trace(middle)

    def add_identity_(self, a: Tensor, value: float) -> Tensor:
        above, below, middle = self._diagonals(a)
        above.add_(value)
        below.add_(value)
        self.middle.add_identity_(middle, value)
        return a

    def norm_bound(self, a: Tensor) -> Tensor:
        """That of the 2 x 2 matrix of bounds on T, B and the middle."""
        t, b, middle = self._split(a)
        of_b = fourth_root(b if b.shape[-2] < b.shape[-1] else b.mT).square()
        of_t, of_m = fourth_root(t).square(), self.middle.norm_bound(middle).square()
        half = (of_t + of_m + of_b) / 2
        return (half + (half.square() - of_t * of_m).clamp_min(0).sqrt()).sqrt()

    def flops(self, columns: int) -> int:
        return 2 * self.border * self.dim * columns + self.middle.flops(columns)

    @property
    def product_flops(self) -> int:
        r = self.border
        return 2 * r * r * self.dim + self.middle.flops(r) + self.middle.product_flops

    # --- From the Gram matrix alone: with G for S among the border, its rows beside, and Y = (beside) middle,
    # Kᵀ S K is [[Tᵀ G T, Tᵀ (G B + Y)], [.., Bᵀ G B + Bᵀ Y + Yᵀ B + Kᵀ S K of the middle]].

    def gram_first(self, n: int) -> bool:
        return n > 1.6 * self.border and self.middle.gram_first(n)

    def sandwich(self, a: Tensor, gram: Tensor) -> Tensor:
        (t, b, middle), (g, g_beside, g_m) = self._split(a), self._split(gram)
        f = self.first
        if self.last and f:  # the upper half of G, doubled, stands for both
            corner = g[..., :f, f:] / 2
            g = torch.cat(
                (torch.cat((g[..., :f, :f], corner), -1), torch.cat((corner.mT, g[..., f:, f:]), -1)), -2
            )
        g_b, y = g @ b, self.middle.apply_t(middle, g_beside.mT).mT  # twice the Y above
        in_middle = self.middle.cross_gram(b.mT, (g_b + y).mT) + self.middle.sandwich(middle, g_m)
        return self._join(t.mT @ g @ t, t.mT @ (2 * g_b + y), in_middle, symmetric=True)

    def cross_gram(self, x: Tensor, y: Tensor) -> Tensor:
        (x_r, x_m), (y_r, y_m) = self._rows(x), self._rows(y)
        t = x_r @ y_r.mT
        b = x_r @ y_m.mT + y_r @ x_m.mT
        return self._join((t + t.mT) / 2, b, self.middle.cross_gram(x_m, y_m), symmetric=True)

    def gram_beside(self, x: Tensor, constant: float | None) -> Tensor:
        if constant is None or not self.gram_first(x.shape[-1]):
            return super().gram_beside(x, constant)
        if self.last:
            above, x_m, below = x.split((self.first, self.middle.dim, self.last - 1), dim=-2)
            x_r = torch.cat((above, beside(below, constant)), dim=-2)
            b, in_middle = x_r @ x_m.mT, self.middle.gram(x_m)
        else:
            x_r, x_m = x.split((self.first, self.middle.dim - 1), dim=-2)
            b = torch.cat((x_r @ x_m.mT, constant * x_r.sum(-1, keepdim=True)), dim=-1)
            in_middle = self.middle.gram_beside(x_m, constant)
        return self._join(x_r @ x_r.mT, 2 * b, in_middle, symmetric=True)

    @property
    def square(self) -> Square | None:
        inner = self.middle.square
        return None if inner is None else _Bordered(self, inner)

    def __str__(self) -> str:
        text = f"lower({self.middle},dense({self.last}))" if self.last else str(self.middle)
        return f"upper(dense({self.first}),{text})" if self.first else text


@dataclass(frozen=True)
class _Bordered(Square):
    """A Aᵀ has the same full rows, and columns, around a square of the middle."""

    structure: Hierarchical
    middle: Square

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.structure.border * self.structure.dim + self.middle.numel

    def of(self, a: Tensor) -> Tensor:
        s = self.structure
        t, b, middle = s._split(a)
        in_border, beside_it = t @ t.mT + b @ b.mT, s.middle.apply(middle, b.mT).mT
        rows = s._in_order(in_border, beside_it, -1)
        return torch.cat((rows.flatten(-2), self.middle.of(middle)), dim=-1)

    def apply(self, entries: Tensor, x: Tensor, out: Tensor) -> Tensor:
        s = self.structure
        dim, first, inner = s.dim, s.first, slice(s.first, s.dim - s.last)
        rows, middle = entries.split((s.border * dim, self.middle.numel), dim=-1)
        rows = rows.unflatten(-1, (s.border, dim))
        border, full = s._rows(x)[0], rows @ x
        self.middle.apply(middle, x[..., inner, :], out[..., inner, :])
        if out.ndim == 2:
            out[inner].addmm_(rows[:, inner].mT, border)
        else:
            out[..., inner, :] += rows[..., inner].mT @ border
        out[..., :first, :] = full[..., :first, :]
        out[..., dim - s.last :, :] = full[..., first:, :]
        return out

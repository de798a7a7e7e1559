"""Block-diagonal matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from ingot.structures.base import Square, SquareSection, Structure, beside, power_start
from ingot.structures.dense import Dense, add_product
from ingot.structures.diagonal import Diagonal, Squares


@dataclass(frozen=True)
class BlockDiagonal(Structure):
    """Dense blocks of ``block`` rows along the diagonal.

    The last block is smaller where ``block`` does not divide ``dim``; a block larger than ``dim`` shrinks.
    Entries are stored block after block, each row by row.
    """

    dim: int
    block: int = 32
    invertible = True

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"a block-diagonal structure needs blocks of at least 1 row; got {self.block}")
        object.__setattr__(self, "block", min(self.block, self.dim))

    @property
    def numel(self) -> int:
        return self._full * self.block**2 + self._tail**2

    @cached_property
    def _full(self) -> int:
        """How many blocks have the full size."""
        return self.dim // self.block

    @cached_property
    def _tail(self) -> int:
        """The size of the last, smaller block, or 0."""
        return self.dim % self.block

    # Factors are small, and what takes time is the number of calls: views are the cheapest there are, and
    # nothing is done for a last block that does not exist.

    def _blocks(self, a: Tensor) -> list[Tensor]:
        """Full blocks ``[..., count, block, block]``, and the last ``[..., tail, tail]`` if there is any."""
        tail = self._tail
        if not tail:
            return [a.view(*a.shape[:-1], self._full, self.block, self.block)]
        lead, full = a.shape[:-1], self._full * self.block**2
        blocks = a.narrow(-1, 0, full).view(*lead, self._full, self.block, self.block)
        return [blocks, a.narrow(-1, full, tail**2).view(*lead, tail, tail)]

    def _rows(self, x: Tensor) -> list[Tensor]:
        """The rows of a dense matrix, cut as the blocks are."""
        *lead, _, n = x.shape
        tail = self._tail
        if not tail:
            return [x.view(*lead, self._full, self.block, n)]
        full = self._full * self.block
        return [x.narrow(-2, 0, full).view(*lead, self._full, self.block, n), x.narrow(-2, full, tail)]

    def _join_blocks(self, full: Tensor, *tail: Tensor) -> Tensor:
        full = full.flatten(-3)
        return torch.cat((full, tail[0].flatten(-2)), dim=-1) if tail else full

    def _join_rows(self, full: Tensor, *tail: Tensor) -> Tensor:
        full = full.flatten(-3, -2)
        return torch.cat((full, *tail), dim=-2) if tail else full

    def identity(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        full = Dense(self.block).identity(dtype=dtype, device=device).repeat(self._full)
        return torch.cat((full, Dense(self._tail).identity(dtype=dtype, device=device)))

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self._join_blocks(
            *(_product(p, q) for p, q in zip(self._blocks(a), self._blocks(b), strict=True))
        )

    def apply(self, a: Tensor, x: Tensor) -> Tensor:
        return self._join_rows(*(_product(p, q) for p, q in zip(self._blocks(a), self._rows(x), strict=True)))

    def apply_t(self, a: Tensor, x: Tensor) -> Tensor:
        return self._join_rows(
            *(_product(p.mT, q) for p, q in zip(self._blocks(a), self._rows(x), strict=True))
        )

    def gram(self, x: Tensor) -> Tensor:
        return self._join_blocks(*(_product(p, p.mT) for p in self._rows(x)))

    def self_gram(self, a: Tensor) -> Tensor:
        return self._join_blocks(*(_product(p.mT, p) for p in self._blocks(a)))

    def add_matmul(self, c: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
        blocks = zip(self._blocks(c), self._blocks(a), self._blocks(b), strict=True)
        return self._join_blocks(*(add_product(r, p, q, 1.0, alpha) for r, p, q in blocks))

    def add_self_gram(self, c: Tensor, a: Tensor, beta: float, alpha: float) -> Tensor:
        blocks = zip(self._blocks(c), self._blocks(a), strict=True)
        return self._join_blocks(*(add_product(r, p.mT, p, beta, alpha) for r, p in blocks))

    def inverse(self, a: Tensor) -> Tensor:
        return self._join_blocks(*(torch.linalg.inv_ex(p).inverse for p in self._blocks(a)))

    def gram_beside(self, x: Tensor, constant: float | None) -> Tensor:
        if constant is None:
            return self.gram(x)
        whole = (self.dim - 1) // self.block * self.block  # rows of the blocks without the constant
        first = x.narrow(-2, 0, whole).unflatten(-2, (whole // self.block, self.block))
        of_first = _product(first, first.mT).flatten(-3)
        if whole == self.dim - 1:
            return pad(of_first, (0, 1), value=x.shape[-1] * constant**2)
        last = beside(x.narrow(-2, whole, self.dim - 1 - whole), constant)
        return torch.cat((of_first, (last @ last.mT).flatten(-2)), dim=-1)

    def add_identity_(self, a: Tensor, value: float) -> Tensor:
        for blocks in self._blocks(a):
            blocks.diagonal(dim1=-2, dim2=-1).add_(value)
        return a

    def norm(self, a: Tensor) -> Tensor:
        """The largest of the blocks' norms, each by three steps of power iteration."""
        full, *tail = self._blocks(a)
        norms = _norms(full).amax(-1, keepdim=True)
        if not tail:
            return norms
        of_tail = _norms(tail[0]).unsqueeze(-1) if self._tail > 1 else tail[0].squeeze(-1).abs()
        return torch.maximum(norms, of_tail)

    def norm_bound(self, a: Tensor) -> Tensor:
        """The largest of the blocks' Frobenius norms."""
        full, *tail = self._blocks(a)
        norms = torch.linalg.vector_norm(full.flatten(-2), dim=-1).amax(-1, keepdim=True)
        if not tail:
            return norms
        return torch.maximum(norms, torch.linalg.vector_norm(tail[0].flatten(-2), dim=-1, keepdim=True))

    def trace(self, a: Tensor) -> Tensor:
        full, *tail = (blocks.diagonal(dim1=-2, dim2=-1) for blocks in self._blocks(a))
        trace = full.sum((-2, -1)).unsqueeze(-1)
        return trace + tail[0].sum(-1, keepdim=True) if tail else trace

    def cross_gram(self, x: Tensor, y: Tensor) -> Tensor:
        products = [_product(p, q.mT) for p, q in zip(self._rows(x), self._rows(y), strict=True)]
        return self._join_blocks(*((p + p.mT) / 2 for p in products))

    def gram_first(self, n: int) -> bool:
        return n > 1.6 * self.block

    def sandwich(self, a: Tensor, gram: Tensor) -> Tensor:
        pairs = zip(self._blocks(a), self._blocks(gram), strict=True)
        return self._join_blocks(*(_product(_product(p.mT, s), p) for p, s in pairs))

    @property
    def square(self) -> Square:
        return _BlockSquares(self)

    def __str__(self) -> str:
        return f"{self.name}({self.block},{self.dim})"

    def mixed_at(self, row: int) -> tuple[int, int]:
        start = row // self.block * self.block
        return (row, row) if row in (start, self.dim) else (start, min(start + self.block, self.dim))

    def section(self, start: int, stop: int) -> tuple[Structure, slice]:
        if start == stop:
            return Diagonal(0), slice(0, 0)
        rows, end = stop - start, self.numel if stop == self.dim else stop * self.block
        section = Diagonal(1) if rows == 1 else BlockDiagonal(rows, self.block)
        return section, slice(start * self.block, end)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A B of blocks; those of a single matrix without the views that ``matmul`` makes for all cases."""
    return torch.bmm(a, b) if a.ndim == b.ndim == 3 else a @ b


def _norms(blocks: Tensor) -> Tensor:
    """Spectral norms of small matrices ``[..., rows, rows]``; rows times matrices are faster than columns."""
    tiny = torch.finfo(blocks.dtype).tiny
    y = (blocks @ power_start(blocks)).unsqueeze(-2)
    for _ in range(3):
        y = y / torch.linalg.vector_norm(y, dim=-1, keepdim=True).clamp_min(tiny)
        x = _product(y, blocks)
        y = _product(x, blocks.mT)
    return torch.linalg.vector_norm(x.squeeze(-2), dim=-1)


@dataclass(frozen=True)
class _BlockSquares(Square):
    """The squares of the blocks."""

    structure: BlockDiagonal

    @property
    def numel(self) -> int:  # type: ignore[override]
        return self.structure.numel

    def sections(self, entries: Tensor) -> list[SquareSection]:
        last = self.structure.dim - (self.structure._tail or self.structure.block)
        return self._cut(entries, [0, last]) if last else []

    def parts(self, entries: Tensor, count: int) -> list[SquareSection]:
        s = self.structure
        blocks = -(-s.dim // s.block)
        return self._cut(entries, list(range(0, s.dim, -(-blocks // count) * s.block)))

    def _cut(self, entries: Tensor, starts: list[int]) -> list[SquareSection]:
        found = []
        for start, stop in pairwise([*starts, self.structure.dim]):
            section, place = self.structure.section(start, stop)
            square: Square = _BlockSquares(section) if isinstance(section, BlockDiagonal) else Squares(1)
            found.append(SquareSection(start, stop, square, entries[..., place]))
        return found

    def of(self, a: Tensor) -> Tensor:
        return self.structure._join_blocks(*(_product(p, p.mT) for p in self.structure._blocks(a)))

    def apply(self, entries: Tensor, x: Tensor, out: Tensor) -> Tensor:
        return self.ready(entries)(x, out)

    def ready(self, entries: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        rows, blocks = self.structure._rows, self.structure._blocks(entries)

        def apply(x: Tensor, out: Tensor) -> Tensor:
            for p, q, r in zip(blocks, rows(x), rows(out), strict=True):
                if p.ndim != 3:
                    torch.matmul(p, q, out=r)
                elif r.stride(2) != 1 and r.stride(1) == 1:
                    # Batched products are slow to write columns: what is laid out by these is multiplied
                    # from the right, which symmetric blocks may be, and put in its place afterwards.
                    torch.bmm(q.mT, p, out=r.mT)
                else:
                    torch.bmm(p, q, out=r)
            return out

        return apply

    def into(self, entries: Tensor, out: Tensor) -> Callable[[Tensor], object]:
        s = self.structure
        if out.ndim != 2 or entries.ndim != 1 or out.stride(-1) != 1 or s._tail:
            return super().into(entries, out)
        (blocks,), (place,), shape = s._blocks(entries), s._rows(out), (s._full, s.block, -1)
        if out.shape[-1] == 1:  # a row times symmetric blocks takes a third of the time of a column
            shape, place = (s._full, 1, s.block), place.mT
            return lambda x: torch.bmm(x.view(shape), blocks, out=place)
        return lambda x: torch.bmm(blocks, x.view(shape), out=place)

    def in_place_of(self, entries: Tensor, x: Tensor, room: Tensor) -> tuple[Callable[[], object], Tensor]:
        s = self.structure
        if x.ndim != 2 or entries.ndim != 1 or x.stride(-1) != 1 or s._tail:
            return super().in_place_of(entries, x, room)
        # Batched products are slow to write columns: each block's are by themselves.
        (blocks,), columns = s._blocks(entries), x.unflatten(1, (s._full, s.block)).transpose(0, 1)
        result = room.view(s._full, len(x), s.block)
        return partial(torch.bmm, columns, blocks, out=result), result.transpose(0, 1)

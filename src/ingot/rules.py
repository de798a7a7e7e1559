"""The paper's mathematics as pure functions, to be read beside its Figures 3 and 4.

Letters are the paper's: a layer has weight W ``[d_o, d_i]``, inputs ``a`` with U = mean(a aᵀ), output
gradients ``g`` with G = mean(g gᵀ), and factors K ``[d_i, d_i]`` and C ``[d_o, d_o]`` such that K Kᵀ ⊗ C Cᵀ
approximates the inverse of U ⊗ G. All tensors carry any number of leading batch dimensions. Numbers of a
matrix such as its trace are ``[..., 1]``, or Python's where these are at hand (``scalars``); traces are
divided by the dimension to keep their range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ingot.precision import computable, computing
from ingot.scalars import Number, coefficient, number
from ingot.structures import Square, Structure
from ingot.structures.base import SquareSection, multiplied_in, written_to

Pair: TypeAlias = tuple[Structure, Structure]
"""The structures of K and C."""


class Factor(NamedTuple):
    """One side of a layer: a structure and the entries of K or C."""

    structure: Structure
    entries: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """The product with the columns of X ``[..., dim, n]``, without a dense matrix."""
        return self.structure.apply(self.entries, x)

    def dense(self) -> Tensor:
        """All of it, ``[..., dim, dim]``."""
        return self.structure.dense(self.entries)


@dataclass(frozen=True, eq=False)
class Product:
    """K Kᵀ or C Cᵀ (KFAC: an inverse), as gradients are multiplied with it."""

    square: Square
    entries: Tensor

    @cached_property
    def apply(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Its product with X, and with a place for it: ``apply(x, out)``."""
        square, entries = self.square, self.entries
        if entries.dtype == computing(entries.dtype):
            return square.ready(entries)
        return lambda x, out: square.apply(computable(entries), x, out)  # nothing longer is kept

    def apply_right(self, x: Tensor) -> Tensor:
        """The product of X with it, in the place of X if that is possible."""
        out = x if self.square.works_in_place else torch.empty_like(x)
        return self.apply(x.mT, out.mT).mT

    def into(self, out: Tensor) -> Callable[[Tensor], object]:
        """What writes the product with any X to ``out``, which stays where it is."""
        if self.entries.dtype == out.dtype:
            return self.square.into(self.entries, out)
        return written_to(out, self.apply)

    def in_place_of(self, x: Tensor, room: Tensor) -> tuple[Callable[[], object], Tensor]:
        """The product of an X that stays where it is with it: what to call, and the result."""
        if self.entries.dtype == x.dtype:
            return self.square.in_place_of(self.entries, x, room)
        return multiplied_in(room, x, self.apply)

    @property
    def sections(self) -> list[Section]:
        """Those of the rows that do not mix with the last one, and of the others, if not all mix."""
        return [Section.of(found) for found in self.square.sections(self.entries)]

    def parts(self, count: int) -> list[Section]:
        """Those of about so many equal parts of the rows that do not mix, nothing if all mix."""
        return [Section.of(found) for found in self.square.parts(self.entries, count)]


class Section(NamedTuple):
    """The product of some rows, and where these are."""

    start: int
    stop: int
    product: Product

    @classmethod
    def of(cls, section: SquareSection) -> Section:
        """That of a section of a square."""
        start, stop, square, entries = section
        return cls(start, stop, Product(square, entries))


class Curvature(NamedTuple):
    """Π̂(H) of one side for the inverse-free rules, Π̂(U) or Π̂(G) for KFAC.

    What it is to be multiplied with stands beside it: it costs nothing where entries are scaled anyway.
    """

    entries: Tensor
    scale: Number = 1.0

    @property
    def value(self) -> Tensor:
        """The entries, multiplied."""
        return self.entries * self.scale


# --- The inverse-free family ----------------------------------------------------------------------------


def curvature(factor: Factor, x: Tensor) -> Tensor:
    """Π̂(H) with H = Kᵀ X Xᵀ K, for the columns ``x [..., dim, n]`` whose X Xᵀ is U or G."""
    return factor.structure.gram(factor.structure.apply_t(factor.entries, x))


def direction(factor: Factor, h: Curvature, weight: Number, damping: Number) -> Tensor:
    """½ Π̂(w H + λ KᵀK - I): where the factor should move, in its logarithm space."""
    s, entries = factor
    weight, damping = coefficient(0.5 * weight * h.scale, entries), coefficient(0.5 * damping, entries)
    if isinstance(weight, Tensor) or isinstance(damping, Tensor):
        weight = torch.as_tensor(weight, dtype=entries.dtype, device=entries.device)
        m = s.self_gram(entries).mul_(damping).addcmul_(h.entries, weight)
    else:
        m = s.add_self_gram(h.entries, entries, weight, damping)
    return s.add_identity_(m, -0.5)


def ingd(k: Factor, c: Factor, h_k: Curvature, h_c: Curvature, damping: Number) -> tuple[Tensor, Tensor]:
    """Both directions of INGD and SINGD: each factor weighs its terms with the other one's traces."""
    (trace_k, square_k), (trace_c, square_c) = _traces(k, h_k), _traces(c, h_c)
    return direction(k, h_k, trace_c, damping * square_c), direction(c, h_c, trace_k, damping * square_k)


def _traces(factor: Factor, h: Curvature) -> tuple[Number, Number]:
    """tr(H) / d and tr(KᵀK) / d."""
    s, entries = factor
    return number(s.trace(h.entries)) * h.scale / s.dim, number(s.inner(entries, entries)) / s.dim


def ikfac(
    k: Factor, c: Factor, h_k: Curvature, h_c: Curvature, damping_k: Number, damping_c: Number
) -> tuple[Tensor, Tensor]:
    """Both directions of IKFAC: the traces of INGD replaced by those of the identity."""
    return direction(k, h_k, 1.0, damping_k), direction(c, h_c, 1.0, damping_c)


def move(factor: Factor, m: Tensor, lr: Number) -> Tensor:
    """K (I - β₁ m): the exponential map, cut off after its linear term."""
    s, entries = factor
    if isinstance(lr, Tensor):
        return s.matmul(entries, m).mul_(-lr).add_(entries)
    return s.add_matmul(entries, entries, m, -lr)


def natural_gradient(k: Product, c: Product, gradient: Tensor) -> Tensor:
    """C Cᵀ ∇W K Kᵀ, or S_C⁻¹ ∇W S_K⁻¹ for KFAC."""
    return k.apply_right(c.apply(gradient, torch.empty_like(gradient)))


# --- KFAC, which inverts --------------------------------------------------------------------------------


def moving_average(s: Tensor, u: Curvature, rate: float) -> Tensor:
    """S ← (1 - β₁) S + β₁ U."""
    scale = coefficient(rate * u.scale, s)
    s = s * (1 - rate)
    return s.addcmul_(u.entries, scale) if isinstance(scale, Tensor) else s.add_(u.entries, alpha=scale)


def damped_inverse(structure: Structure, s: Tensor, damping: Number) -> Tensor:
    """(S + λ I)⁻¹."""
    return structure.inverse(s + damping * structure.identity_like(s))

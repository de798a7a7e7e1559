"""The structures that come with a name: the leaves, the combinators, the paper's compositions."""

from __future__ import annotations

from functools import partial

from ingot.structures.base import Structure
from ingot.structures.block import Lower, Upper
from ingot.structures.block_diagonal import BlockDiagonal
from ingot.structures.dense import Dense
from ingot.structures.diagonal import Diagonal
from ingot.structures.hierarchical import Hierarchical
from ingot.structures.registry import Factory, Named, register
from ingot.structures.toeplitz import LowerToeplitz, UpperToeplitz
from ingot.structures.triangular import LowerTriangular, UpperTriangular


def _combine(combinator: type[Upper] | type[Lower], dim: int, first: Factory, second: Factory) -> Structure:
    """Share the rows between two parts: those that ask for a size get it while rows last.

    A part for which no row is left drops out, so one text serves layers of every size.
    """
    wants_first, wants_second = getattr(first, "size", None), getattr(second, "size", None)
    if wants_first is None and wants_second is None:
        raise ValueError(
            f"{combinator.name!r} does not know where to split: give one part a size, as in "
            f"'{combinator.name}(dense(16),diagonal)'."
        )
    rows = min(dim, wants_first) if wants_first is not None else dim - min(dim, wants_second or 0)
    if rows in (0, dim):
        return (first if rows else second)(dim)
    return _normal(combinator, first(rows), second(dim - rows))


def _normal(combinator: type[Upper] | type[Lower], first: Structure, second: Structure) -> Structure:
    """Two parts as one structure: that for full rows around another one if it can be."""
    if combinator is Upper and isinstance(first, Dense):
        if isinstance(second, Hierarchical) and not second.first:
            return Hierarchical(first.dim, second.middle, second.last)
        return Hierarchical(first.dim, second, 0)
    if combinator is Lower and isinstance(second, Dense):
        return Hierarchical(0, first, second.dim)
    return combinator(first, second)


@register("upper")
def upper(dim: int, first: Factory, second: Factory) -> Structure:
    """[[first, B], [0, second]]."""
    return _combine(Upper, dim, first, second)


@register("lower")
def lower(dim: int, first: Factory, second: Factory) -> Structure:
    """[[first, 0], [B, second]]."""
    return _combine(Lower, dim, first, second)


Upper.name, Lower.name = "upper", "lower"

for _name, _class in {
    "dense": Dense,
    "diagonal": Diagonal,
    "block_diagonal": BlockDiagonal,
    "tril": LowerTriangular,
    "triu": UpperTriangular,
    "tril_toeplitz": LowerToeplitz,
    "triu_toeplitz": UpperToeplitz,
}.items():
    register(_name)(_class)


# The paper's composed structures, each one line. "rank_triu" has its dense block first and the
# diagonal one last; the mirrored variant has them the other way round.


@register("rank_triu")
def rank_triu(dim: int, rank: int = 1) -> Structure:
    """[[dense, B], [0, diagonal]]: the inverse of K Kᵀ is diagonal plus a matrix of that rank."""
    return upper(dim, Named("dense", size=rank), Diagonal)


@register("rank_tril")
def rank_tril(dim: int, rank: int = 1) -> Structure:
    """[[dense, 0], [B, diagonal]]: K Kᵀ is diagonal plus a matrix of that rank."""
    return lower(dim, Named("dense", size=rank), Diagonal)


@register("rank_triu_mirrored")
def rank_triu_mirrored(dim: int, rank: int = 1) -> Structure:
    """[[diagonal, B], [0, dense]]: K Kᵀ is diagonal plus a matrix of that rank."""
    return upper(dim, Diagonal, Named("dense", size=rank))


@register("rank_tril_mirrored")
def rank_tril_mirrored(dim: int, rank: int = 1) -> Structure:
    """[[diagonal, 0], [B, dense]]: the inverse of K Kᵀ is diagonal plus a matrix of that rank."""
    return lower(dim, Diagonal, Named("dense", size=rank))


@register("hierarchical")
def hierarchical(dim: int, first: int = 16, last: int = 16) -> Structure:
    """[[dense, B, B'], [0, diagonal, 0], [0, B'', dense]]."""
    inner = partial(rank_tril_mirrored, rank=last)
    return upper(dim, Named("dense", size=first), inner)

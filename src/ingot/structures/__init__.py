"""Structured matrices: leaves, two combinators, and names for them."""

from ingot.structures.base import Structure
from ingot.structures.block import Lower, Upper
from ingot.structures.block_diagonal import BlockDiagonal
from ingot.structures.catalogue import (
    hierarchical,
    lower,
    rank_tril,
    rank_tril_mirrored,
    rank_triu,
    rank_triu_mirrored,
    upper,
)
from ingot.structures.dense import Dense
from ingot.structures.diagonal import Diagonal
from ingot.structures.registry import Factory, bind, parse, register, registered, resolve
from ingot.structures.toeplitz import LowerToeplitz, UpperToeplitz
from ingot.structures.triangular import LowerTriangular, UpperTriangular

__all__ = [
    "BlockDiagonal",
    "Dense",
    "Diagonal",
    "Factory",
    "Lower",
    "LowerToeplitz",
    "LowerTriangular",
    "Structure",
    "Upper",
    "UpperToeplitz",
    "UpperTriangular",
    "bind",
    "hierarchical",
    "lower",
    "parse",
    "rank_tril",
    "rank_tril_mirrored",
    "rank_triu",
    "rank_triu_mirrored",
    "register",
    "registered",
    "resolve",
    "upper",
]

"""Structured matrices: leaves, two combinators, and names for them."""

from ingot.structures import catalogue
from ingot.structures.base import Square, SquareSection, Structure
from ingot.structures.block import Lower, Upper
from ingot.structures.block_diagonal import BlockDiagonal
from ingot.structures.dense import Dense
from ingot.structures.diagonal import Diagonal
from ingot.structures.hierarchical import Hierarchical
from ingot.structures.registry import Factory, bind, parse, register, registered, resolve
from ingot.structures.toeplitz import LowerToeplitz, UpperToeplitz
from ingot.structures.triangular import LowerTriangular, UpperTriangular

__all__ = [
    "BlockDiagonal",
    "Dense",
    "Diagonal",
    "Factory",
    "Hierarchical",
    "Lower",
    "LowerToeplitz",
    "LowerTriangular",
]
__all__ += ["Square", "SquareSection", "Structure", "Upper", "UpperToeplitz", "UpperTriangular"]
__all__ += ["bind", "catalogue", "parse", "register", "registered", "resolve"]

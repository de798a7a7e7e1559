"""The paper's tables of iteration cost and storage as formulas of d, and exponents fitted to measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from statistics import linear_regression
from typing import NamedTuple, TypeAlias

Formula: TypeAlias = Callable[[float], float]


class Term(NamedTuple):
    """A term of the paper's tables for a square layer, d_i = d_o = d, as text and as a function."""

    text: str
    value: Formula


D = Term("d", lambda d: d)
D_LOG = Term("d log d", lambda d: d * log(d))
D2 = Term("d²", lambda d: d**2)
D2_LOG = Term("d² log d", lambda d: d**2 * log(d))
D3 = Term("d³", lambda d: d**3)

KINDS: Mapping[str, str] = {
    "gradient": "step of a d x d layer: the factors, which stay as they are, applied to its gradient",
    "statistics": "statistics of a batch",
    "factors": "update of both factors",
}
"""What is timed, by its key. In the paper's table the last two are one column, as a sum."""

PAPER: Mapping[str, Mapping[str, Term]] = {
    "dense": {"gradient": D3, "statistics": D2, "factors": D3, "storage": D2},
    "block_diagonal(30)": {"gradient": D2, "statistics": D, "factors": D, "storage": D},
    "hierarchical(15,15)": {"gradient": D2, "statistics": D, "factors": D, "storage": D},
    "triu_toeplitz": {"gradient": D2_LOG, "statistics": D_LOG, "factors": D_LOG, "storage": D},
    "rank_triu(1)": {"gradient": D2, "statistics": D, "factors": D, "storage": D},
    "diagonal": {"gradient": D2, "statistics": D, "factors": D, "storage": D},
}
"""How cost grows with d, at a fixed number of rows and fixed parameters of the structure.

Diagonal factors are not in the paper's tables: they cost what rank-1 triangular ones do.
"""


def exponent(dims: Sequence[float], values: Sequence[float]) -> float:
    """The slope of a straight line through the points in a log-log plot, by least squares."""
    return linear_regression([log(d) for d in dims], [log(value) for value in values]).slope


def expected_exponent(dims: Sequence[float], term: Term) -> float:
    """The exponent that would be fitted to the formula itself: with a logarithm it is no pure power."""
    return exponent(dims, [term.value(d) for d in dims])

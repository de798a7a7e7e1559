"""What a layer saw: sums over the uses of its weight until the next step, and their scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ingot.family import Rule, Statistics
from ingot.layers import LayerAdapter, columns
from ingot.rules import Curvature, Factor
from ingot.scalars import Number, coefficient, greatest, is_finite, number, where
from ingot.stability import at_least_tiny
from ingot.structures import Diagonal, Structure
from ingot.structures.base import beside

CHUNK = 1 << 21
"""Inputs that grow when they are unfolded are taken in parts of about so many numbers, to save memory."""


class Sums(NamedTuple):
    """Unscaled sums over uses, for both sides of the layer's matrix; the scales come last.

    One side has the inputs of the uses and is a mean over their rows, the other the output gradients.
    """

    k: Tensor
    c: Tensor
    square_k: Tensor
    square_c: Tensor
    rows: Number  # as a tensor [..., 1] where not all of the layer's matrices were used alike

    def plus(self, other: Sums | None) -> Sums:
        """Both together."""
        if other is None:
            return self
        pairs: Any = zip(self, other, strict=True)
        return Sums(*(a + b for a, b in pairs))

    def scaled(self, of_k: Number, of_c: Number, d_i: int, d_o: int) -> Statistics:
        """The statistics for given scales of both sides."""
        traces = number(self.square_k) * (of_k / d_i), number(self.square_c) * (of_c / d_o)
        trace_k, trace_c = (coefficient(trace, self.k) for trace in traces)
        return Statistics(Curvature(self.k, of_k), Curvature(self.c, of_c), trace_k, trace_c)


class Use:
    """One use of a layer's weight in a forward and backward pass."""

    def __init__(
        self,
        adapter: LayerAdapter,
        module: Any,
        x: Tensor,
        g: Tensor,
        *,
        start: int,
        flipped: bool,
        constant: float | None,
        max_rows: int | None = None,
        turn: int = 0,
    ) -> None:
        self.adapter, self.module, self.x, self.g = adapter, module, x, g
        self.start = start  # the first of the layer's matrices that were used
        self.flipped = flipped  # whether the inputs stand on the layer's C side
        self.constant = constant  # what the layer's bias is multiplied with, if it has one
        self.gradients = adapter.output_gradients(module, x, g)
        self.batch, self.places = self.gradients.shape[-3:-1]
        # Of every so many rows one is taken, another one at each turn.
        self.skip = 1 if max_rows is None else -(-self.batch * self.places // max_rows)
        self.turn = turn % self.skip

    def gradient_columns(self, approx: str) -> Tensor:
        """The columns whose outer products sum up to G, but for the scale of the loss, ``[..., d_o, n]``."""
        return self._some(columns(self.gradients)) if approx == "expand" else self.gradients.sum(-2).mT

    def _some(self, x: Tensor) -> Tensor:
        return x if self.skip == 1 else x[..., min(self.turn, x.shape[-1] - 1) :: self.skip]

    def input_columns(self, approx: str) -> Iterator[Tensor]:
        """The columns whose mean outer product is U, ``[..., d_i, n]``, in one or several parts."""
        if approx == "reduce":
            return iter([self.adapter.mean_inputs(self.module, self.x, self.g).mT])
        parts = [(self.x, self.g)]
        growth = self.adapter.growth(self.module)
        if growth > 1 and (size := self.x.numel() * growth) > CHUNK and len(self.x) == self.batch:
            samples = max(1, CHUNK * self.batch // size)
            parts = list(zip(self.x.split(samples), self.g.split(samples), strict=True))
        return (self._some(columns(self.adapter.inputs(self.module, x, g))) for x, g in parts)


class Pending:
    """The statistics of a layer since the last step.

    Gradients of a loss that is a mean carry 1 / (number of its terms) each. Scaling the sum of their outer
    products by the total number of terms gives the same G for one batch and for its micro-batches. Several
    uses of a weight in one backward pass are places that share it: they belong to the same terms.
    """

    def __init__(self) -> None:
        self.sums: dict[bool, Sums] = {}
        self.terms: int | Tensor = 0
        self.power: int | None = None
        self._pass: object = None
        self._terms_of_pass = 0

    def add(
        self, sums: Sums, flipped: bool, terms: int, backward_pass: object, power: int | None = None
    ) -> None:
        """Add a use; ``flipped`` where its inputs stand on the layer's C side.

        With what power of the number of terms G scales follows from the loss, unless it is given: -1 where
        the gradients are those of single terms, of which G is the mean.
        """
        self.power = power
        self.sums[flipped] = sums.plus(self.sums.get(flipped))
        if backward_pass != self._pass:
            self._pass, self._terms_of_pass = backward_pass, 0
        new = max(0, terms - self._terms_of_pass)
        self._terms_of_pass += new
        self.terms += new

    def replace(
        self, sums: Mapping[bool, Sums], terms: int | Tensor, processes: int, power: int | None
    ) -> None:
        """Take sums over processes in the place of one's own.

        Gradients are averaged over processes, so that each has those of the whole loss times their number;
        where G is a mean over terms, it is one over all of them already.
        """
        self.power, self.terms = power, terms
        square = 1.0 if power == -1 else processes**-2.0
        for side, found in sums.items():
            if side:
                found = found._replace(k=found.k * square, square_k=found.square_k * square)
            else:
                found = found._replace(c=found.c * square, square_c=found.square_c * square)
            self.sums[side] = found

    @property
    def _count(self) -> Number:
        return self.terms if isinstance(self.terms, Tensor) else float(self.terms)

    def scaled(self, d_i: int, d_o: int, loss_is_mean: bool, scale: Tensor | None = None) -> Statistics:
        """U as a mean, G in the scale of the whole loss, of all uses together.

        ``scale`` is what the loss was multiplied with for the backward pass, if it was.
        """
        power = int(loss_is_mean) if self.power is None else self.power
        of_g: Number = self._count**power
        if scale is not None:
            of_g = of_g / number(scale.to(next(iter(self.sums.values())).c.device).square())
        straight, flipped = (self.sums.get(side) for side in (False, True))
        found = []
        if straight is not None:
            found.append(straight.scaled(_mean(straight.rows), of_g, d_i, d_o))
        if flipped is not None:
            found.append(flipped.scaled(of_g, _mean(flipped.rows), d_i, d_o))
        return found[0] if len(found) == 1 else _added(*found)


def _mean(rows: Number) -> Number:
    return 1 / greatest(rows, 1)


def _added(a: Statistics, b: Statistics) -> Statistics:
    """Two Kronecker products as one: factors are added after their scales were split alike.

    U₁ ⊗ G₁ + U₂ ⊗ G₂ does not change with a factor that moves from U₂ to G₂, but (U₁ + U₂) ⊗ (G₁ + G₂)
    does. It is chosen so that the second product weighs as much beside the first on both sides.
    """
    this, other = a.trace_u * b.trace_g, a.trace_g * b.trace_u
    squared = where(this > 0, other / at_least_tiny(this), 0.0)
    move = where(is_finite(squared) & (squared > 0), squared, 1.0) ** 0.5
    k, c = Curvature(a.k.value + b.k.value / move), Curvature(a.c.value + b.c.value * move)
    return Statistics(k, c, a.trace_u + b.trace_u / move, a.trace_g + b.trace_g * move)


def sums_of_use(rule: Rule, factors: tuple[Factor, Factor], use: Use, approx: str, grams: Grams) -> Sums:
    """The statistics of one use, not yet divided by anything."""
    all_matrices, (of_k, of_c) = factors[0].entries.shape[:-1], factors
    used = slice(use.start, use.start + use.gradients.shape[0]) if all_matrices else slice(None)
    if all_matrices:
        of_k, of_c = (Factor(s, entries[used]) for s, entries in factors)
    of_inputs, of_gradients = (of_c, of_k) if use.flipped else (of_k, of_c)
    of_bias = (None, use.constant) if use.flipped else (use.constant, None)
    count = use.batch * use.places if approx == "expand" else use.batch
    inputs = _scaled(_inputs(rule, of_inputs, use, approx, of_bias[0], grams), count)
    gradients = _scaled(_side(rule, of_gradients, use.gradient_columns(approx), of_bias[1]), count)
    (k, square_k), (c, square_c) = (gradients, inputs) if use.flipped else (inputs, gradients)
    sums = Sums(k, c, square_k, square_c, count)
    if not all_matrices or used.stop - used.start == all_matrices[0]:
        return sums
    # Only some of the layer's matrices were used: zeros for the others, and counts of their own.
    sums = sums._replace(rows=torch.full_like(sums.square_k, count))
    around = (0, 0, use.start, all_matrices[0] - used.stop)
    return Sums(*(pad(value, around) for value in sums if isinstance(value, Tensor)))


class Side(NamedTuple):
    """One side's statistic and the sum of its squares, ``[..., 1]``, of so many rows."""

    statistic: Tensor
    squares: Tensor
    rows: int


def _scaled(side: Side, count: int) -> tuple[Tensor, Tensor]:
    """The same as if all rows had been taken."""
    if side.rows == count:
        return side.statistic, side.squares
    return side.statistic * (count / side.rows), side.squares * (count / side.rows)


def _side(rule: Rule, factor: Factor, x: Tensor, constant: float | None) -> Side:
    structure = factor.structure
    if rule.takes_gram(structure, x.shape[-1]):
        return _of_gram(rule, factor, structure.gram_beside(x, constant), x.shape[-1])
    x = x if constant is None else beside(x, constant)
    return Side(rule.statistic(factor, x), _sum_of_squares(x), x.shape[-1])


def _sum_of_squares(x: Tensor) -> Tensor:
    """Of each matrix, ``[..., 1]``."""
    rows = x if x.is_contiguous() else x.mT
    if x.ndim > 2 or not rows.is_contiguous():
        return x.square().sum((-2, -1)).unsqueeze(-1)
    return torch.dot(rows.reshape(-1), rows.reshape(-1)).view(1)


def _of_gram(rule: Rule, factor: Factor, gram: Tensor, rows: int) -> Side:
    structure = factor.structure
    return Side(rule.statistic_of_gram(factor, gram), structure.trace(gram), rows)


def _inputs(rule: Rule, factor: Factor, use: Use, approx: str, constant: float | None, grams: Grams) -> Side:
    """The side of the inputs, by the cheapest way there is."""
    if isinstance(factor.structure, Diagonal):
        squares = use.adapter.input_squares(use.module, use.x, use.g, approx)
        if squares is not None:
            rows = use.batch * (use.places if approx == "expand" else 1)
            squares = squares if constant is None else pad(squares, (0, 1), value=rows * constant**2)
            return _of_gram(rule, factor, squares, rows)
    chunks = use.input_columns(approx)
    x = next(chunks)
    rest = [_side(rule, factor, chunk, constant) for chunk in chunks]
    if rest:
        found, total, rows_of_each = zip(_side(rule, factor, x, constant), *rest, strict=True)
        return Side(torch.stack(found).sum(0), torch.stack(total).sum(0), sum(rows_of_each))
    if not rule.takes_gram(factor.structure, x.shape[-1]):
        return _side(rule, factor, x, constant)
    return _of_gram(rule, factor, grams.of(factor.structure, x, constant), x.shape[-1])


class Grams:
    """The Gram matrix of the last inputs: layers beside each other, such as q, k and v, share it."""

    def __init__(self) -> None:
        self._last: tuple[Any, Tensor, Tensor] | None = None

    def forget(self) -> None:
        """Let go of the inputs, which are kept so that no others take their place in memory."""
        self._last = None

    def of(self, structure: Structure, x: Tensor, constant: float | None) -> Tensor:
        """Π̂(X Xᵀ), which is taken once for the same X, and once for matrices that share it."""
        key = structure, constant, x.data_ptr(), x.shape, x.stride(), x._version, x.dtype
        if self._last is None or self._last[0] != key:
            shared = x.ndim == 3 and x.stride(0) == 0
            gram = structure.gram_beside(x[:1] if shared else x, constant)
            self._last = key, x, gram.expand(x.shape[0], -1) if shared else gram
        return self._last[2]

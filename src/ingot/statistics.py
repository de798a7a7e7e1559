"""What a layer saw: sums over the uses of its weight until the next step, and their scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ingot.layers import LayerAdapter, gradient_rows, input_rows
from ingot.rules import Factor, Statistics
from ingot.structures import Diagonal


class Sums(NamedTuple):
    """Unscaled sums over uses, for both sides of the layer's matrix; the scales come last.

    One side has the inputs of the uses and is a mean over their rows, the other the output gradients.
    """

    k: Tensor
    c: Tensor
    square_k: Tensor
    square_c: Tensor
    rows: int | Tensor  # as a tensor [..., 1] where not all of the layer's matrices were used alike

    def plus(self, other: Sums | None) -> Sums:
        """Both together."""
        if other is None:
            return self
        pairs: Any = zip(self, other, strict=True)
        return Sums(*(a + b for a, b in pairs))

    def scaled(self, of_k: Tensor | float, of_c: Tensor | float, d_i: int, d_o: int) -> Statistics:
        """The statistics for given scales of both sides."""
        trace_k, trace_c = self.square_k * (of_k / d_i), self.square_c * (of_c / d_o)
        return Statistics(self.k * of_k, self.c * of_c, trace_k, trace_c)


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
    ) -> None:
        self.adapter, self.module, self.x, self.g = adapter, module, x, g
        self.start = start  # the first of the layer's matrices that were used
        self.flipped = flipped  # whether the inputs stand on the layer's C side
        self.constant = constant  # what the layer's bias is multiplied with, if it has one
        self.gradients = adapter.output_gradients(module, x, g)
        self.batch, self.places = self.gradients.shape[-3:-1]


class Pending:
    """The statistics of a layer since the last step.

    Gradients of a loss that is a mean carry 1 / (number of its terms) each. Scaling the sum of their outer
    products by the total number of terms gives the same G for one batch and for its micro-batches. Several
    uses of a weight in one backward pass are places that share it: they belong to the same terms.
    """

    def __init__(self) -> None:
        self._sums: dict[bool, Sums] = {}
        self._terms = 0
        self._power: int | None = None
        self._pass: object = None
        self._terms_of_pass = 0

    def add(
        self, sums: Sums, flipped: bool, terms: int, backward_pass: object, power: int | None = None
    ) -> None:
        """Add a use; ``flipped`` where its inputs stand on the layer's C side.

        With what power of the number of terms G scales follows from the loss, unless it is given: -1 where
        the gradients are those of single terms, of which G is the mean.
        """
        self._power = power
        self._sums[flipped] = sums.plus(self._sums.get(flipped))
        if backward_pass != self._pass:
            self._pass, self._terms_of_pass = backward_pass, 0
        new = max(0, terms - self._terms_of_pass)
        self._terms_of_pass += new
        self._terms += new

    def scaled(self, d_i: int, d_o: int, loss_is_mean: bool, scale: Tensor | None = None) -> Statistics:
        """U as a mean, G in the scale of the whole loss, of all uses together.

        ``scale`` is what the loss was multiplied with for the backward pass, if it was.
        """
        power = int(loss_is_mean) if self._power is None else self._power
        of_g: Tensor | float = float(self._terms) ** power
        if scale is not None:
            of_g = of_g / scale.to(next(iter(self._sums.values())).c.device).square()
        straight, flipped = (self._sums.get(side) for side in (False, True))
        found = []
        if straight is not None:
            found.append(straight.scaled(_mean(straight.rows), of_g, d_i, d_o))
        if flipped is not None:
            found.append(flipped.scaled(of_g, _mean(flipped.rows), d_i, d_o))
        return found[0] if len(found) == 1 else _added(*found)


def _mean(rows: int | Tensor) -> Tensor | float:
    return 1 / rows.clamp_min(1) if isinstance(rows, Tensor) else 1 / rows


def _added(a: Statistics, b: Statistics) -> Statistics:
    """Two Kronecker products as one: factors are added after their scales were split alike.

    U₁ ⊗ G₁ + U₂ ⊗ G₂ does not change with a factor that moves from U₂ to G₂, but (U₁ + U₂) ⊗ (G₁ + G₂)
    does. It is chosen so that the second product weighs as much beside the first on both sides.
    """
    squared = (a.trace_g * b.trace_u) / (a.trace_u * b.trace_g)
    move = torch.where(squared.isfinite() & (squared > 0), squared, 1).sqrt()
    return Statistics(
        a.k + b.k / move, a.c + b.c * move, a.trace_u + b.trace_u / move, a.trace_g + b.trace_g * move
    )


def sums_of_use(
    statistic: Callable[[Factor, Tensor], Tensor], factors: tuple[Factor, Factor], use: Use, approx: str
) -> Sums:
    """The statistics of one use, not yet divided by anything."""
    of_k, of_c = factors
    gradients = gradient_rows(use.gradients, approx)
    count = use.batch * use.places if approx == "expand" else use.batch
    inputs = _input_rows(use, approx, of_c if use.flipped else of_k)
    in_k, in_c = (gradients, inputs) if use.flipped else (inputs, gradients)
    if use.constant is not None:
        # The bias is the weight of a constant input, which is 1 in each of the rows or of those they sum up.
        one = use.constant * (count / in_k.shape[-2]) ** 0.5
        in_k = torch.cat((in_k, in_k.new_full((*in_k.shape[:-1], 1), one)), dim=-1)
    all_matrices = of_k.entries.shape[:-1]
    used = slice(use.start, use.start + in_k.shape[0]) if all_matrices else slice(None)
    (s_k, k), (s_c, c) = of_k, of_c
    sums = Sums(
        k=statistic(Factor(s_k, k[used]), in_k.mT),
        c=statistic(Factor(s_c, c[used]), in_c.mT),
        square_k=in_k.square().sum((-2, -1)).unsqueeze(-1),
        square_c=in_c.square().sum((-2, -1)).unsqueeze(-1),
        rows=count,
    )
    if not all_matrices or in_k.shape[0] == all_matrices[0]:
        return sums
    # Only some of the layer's matrices were used: zeros for the others, and counts of their own.
    sums = sums._replace(rows=torch.full_like(sums.square_k, count))
    around = (0, 0, use.start, all_matrices[0] - used.stop)
    return Sums(*(pad(value, around) for value in sums if isinstance(value, Tensor)))


def _input_rows(use: Use, approx: str, factor: Factor) -> Tensor:
    """The inputs; one row of root sums of squares where that is all a diagonal factor needs."""
    if isinstance(factor.structure, Diagonal):
        squares = use.adapter.input_squares(use.module, use.x, approx, use.g.dtype)
        if squares is not None:
            return squares.sqrt().unsqueeze(-2)
    return input_rows(use.adapter.inputs(use.module, use.x, use.g), approx)

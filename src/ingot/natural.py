"""Natural gradients on their way to momenta, by products K Kᵀ and C Cᵀ that are kept between updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ingot import adamw as adamw_steps
from ingot import rules
from ingot.groups import Group
from ingot.model import Layer
from ingot.precision import keeping
from ingot.rules import Pair, Product
from ingot.scalars import Number, number

CHUNK = 1 << 17
"""On a CPU so many numbers go through several operations at a time: new memory for more takes time to map."""

LARGE = 1 << 20
"""With diagonal factors, so many still go through at once: what they need is mapped already."""


class Kept(NamedTuple):
    """The products of a layer's factors, and what they were made from."""

    structures: Pair
    kept_for: int
    sources: tuple[Tensor, Tensor]
    versions: tuple[int, int]
    k: Product
    c: Product

    def is_of(self, structures: Pair, kept_for: int, k: Tensor, c: Tensor) -> bool:
        """Whether the factors are still the same."""
        same = self.structures is structures and self.kept_for == kept_for
        same = same and self.sources[0] is k and self.sources[1] is c
        return same and self.versions == (k._version, c._version)


class Part(NamedTuple):
    """A parameter of a layer in its step."""

    p: nn.Parameter
    state: dict[str, Any]
    group: Group

    def begin(self) -> None:
        """Make sure that there is a momentum, if there is to be one."""
        if "exp_avg" in self.state:  # AdamW trained it for a while
            for key in adamw_steps.KEYS & self.state.keys():
                del self.state[key]
        if self.group["momentum"] and "momentum_buffer" not in self.state:
            self.state["momentum_buffer"] = torch.zeros_like(self.p, dtype=keeping(self.p.dtype))

    @property
    def gradient(self) -> Tensor:
        """Its gradient, which it has."""
        assert self.p.grad is not None
        return self.p.grad

    @property
    def lr(self) -> Number:
        """Its learning rate."""
        return number(self.group["lr"])

    @property
    def decay(self) -> float:
        """The weight decay where the paper has it: in the natural gradient."""
        return 0.0 if self.group["decoupled_weight_decay"] else self.group["weight_decay"]

    def momentum(self, natural: Tensor) -> Tensor:
        """The momentum after this natural gradient; with no momentum, the gradient itself."""
        if self.decay:
            natural.add_(self.p, alpha=self.decay)
        if not self.group["momentum"]:
            return natural
        return accumulate(self.state["momentum_buffer"], natural, self.group["momentum"])


def accumulate(momentum: Tensor, update: Tensor, rate: float) -> Tensor:
    """The momentum α₂ m + update, in place and rounded once."""
    if momentum.dtype == update.dtype:
        return torch.add(update, momentum, alpha=rate, out=momentum)
    return momentum.copy_(torch.add(update, momentum, alpha=rate))


# --- A whole layer at once ------------------------------------------------------------------------------


def natural_gradient(layer: Layer, kept: Kept, gradients: list[Tensor]) -> list[Tensor]:
    """C Cᵀ ∇W K Kᵀ of the weight and of its bias, from their gradients."""
    weight, *bias = (gradient.to(kept.k.entries.dtype) for gradient in gradients)
    matrix = weight_matrix(layer, weight)
    if not bias:
        return [_as_weight(layer, rules.natural_gradient(kept.k, kept.c, matrix))]
    both = _beside(matrix, bias[0].view(*matrix.shape[:-1], 1))
    natural, last = rules.natural_gradient(kept.k, kept.c, both).split((matrix.shape[-1], 1), dim=-1)
    return [_as_weight(layer, natural), last.reshape(bias[0].shape)]


def weight_matrix(layer: Layer, tensor: Tensor) -> Tensor:
    """The weight or what has its shape as a matrix."""
    return layer.adapter.weight_matrix(layer.module, tensor)


def _as_weight(layer: Layer, matrix: Tensor) -> Tensor:
    return layer.adapter.matrix_weight(layer.module, matrix, layer.weight)


def _beside(matrix: Tensor, column: Tensor) -> Tensor:
    """A matrix and one column more, stored by columns where the matrix is."""
    if matrix.stride(-1) != 1 and matrix.mT.is_contiguous():
        return torch.cat((matrix.mT, column.mT), dim=-2).mT
    return torch.cat((matrix, column), dim=-1)


# --- Row by row -----------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A parameter by the rows of its layer's matrix: its gradient, its momentum and itself."""

    part: Part
    gradient: Tensor
    momentum: Tensor
    value: Tensor

    def add(self, natural: Tensor, squares: list[Tensor] | None) -> None:
        """Add a natural gradient to the momentum."""
        if squares is not None:
            squares.append(torch.linalg.vector_norm(natural).square())
        if self.part.decay:
            natural.add_(self.value, alpha=self.part.decay)
        accumulate(self.momentum, natural, self.part.group["momentum"])

    def split(self, size: int) -> Iterator[Rows]:
        """The same, a few rows at a time."""
        if size >= len(self.gradient):
            return iter([self])
        _, *tensors = self
        return (Rows(self.part, *some) for some in zip(*(t.split(size) for t in tensors), strict=True))


def rows_of(layer: Layer, parts: list[Part], gradients: list[Tensor]) -> list[Rows] | None:
    """Weight and bias by the rows of the layer's matrix, if these are parts of what is stored."""
    if len(parts) != len(layer.parameters):
        return None
    found = []
    for part, gradient in zip(parts, gradients, strict=True):
        if not part.group["momentum"] or not part.p.is_contiguous() or not gradient.is_contiguous():
            return None
        stored: tuple[Tensor, Tensor, Tensor] = gradient, part.state["momentum_buffer"], part.p
        if part.p is not layer.weight:
            stored = stored[0].view(-1, 1), stored[1].view(-1, 1), stored[2].view(-1, 1)
        elif len(part.p) != layer.structures[1].dim or part.p.ndim != 2:
            matrices = [weight_matrix(layer, tensor) for tensor in stored]
            if matrices[1].ndim != 2 or matrices[1].data_ptr() != stored[1].data_ptr():
                return None  # several matrices, or a copy
            stored = matrices[0], matrices[1], matrices[2]
        elif layer.adapter.transposed:
            stored = stored[0].mT, stored[1].mT, stored[2].mT
        found.append(Rows(part, *stored))
    return found


def move_momenta(rows: list[Rows], kept: Kept, squares: list[Tensor] | None) -> None:
    """Add natural gradients to momenta, a few rows of the layer's matrix at a time.

    The sums of the squares of natural gradients are collected on the way, if they are asked for.
    """
    k, c, dtype = kept.k, kept.c, kept.c.entries.dtype
    weight, mixes = rows[0], c.square.mixes
    d_i = weight.gradient.shape[1]
    last = _product(c, _as(rows[1].gradient, dtype)) if len(rows) > 1 else None  # of the bias
    of_columns = k.entries if k.square.mixes == 1 else None  # K Kᵀ multiplies each column for itself
    if of_columns is not None and last is not None:
        last.mul_(of_columns[d_i])
        of_columns = of_columns[:d_i]
    if not mixes:  # C Cᵀ needs all rows at once
        whole = _product(c, _as(weight.gradient, dtype))
        by_columns = whole.stride(-1) != 1 and weight.gradient.stride(-1) == 1
        weight = weight._replace(gradient=whole.contiguous() if by_columns else whole)
    start = 0
    is_light = mixes == 1 and of_columns is not None
    for some in weight.split(_chunk_rows(weight.gradient, mixes, LARGE if is_light else CHUNK)):
        natural, stop = _as(some.gradient, dtype), start + len(some.gradient)
        if mixes:
            is_all = len(natural) == len(weight.gradient)
            natural = _product(c if is_all else c.rows(start, stop), natural)
        if of_columns is not None:
            natural.mul_(of_columns)
        elif last is not None:
            both = k.apply_right(_beside(natural, last[start:stop]))
            natural = both.narrow(1, 0, d_i)
            last[start:stop] = both.narrow(1, d_i, 1)
        else:
            natural = k.apply_right(natural)
        some.add(natural, squares)
        start = stop
    if last is not None:
        rows[1].add(last, squares)


def _product(product: Product, x: Tensor) -> Tensor:
    if product.square.mixes == 1:
        return x * product.entries.unsqueeze(-1)
    return product.apply(x, torch.empty_like(x))


def _chunk_rows(matrix: Tensor, mixes: int, limit: int) -> int:
    """How many rows to take at a time: whole groups of those that are mixed."""
    if matrix.device.type != "cpu" or matrix.numel() <= limit:
        return len(matrix)
    groups = limit // (max(1, mixes) * matrix.shape[1])
    return max(1, groups) * max(1, mixes)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)

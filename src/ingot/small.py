"""The usual step of a small layer: the same as in ``stepping``, in few calls and in memory that layers share.

Where a product takes a tenth of a millisecond, calls, views and new memory take as long as what is calculated.
What does not change from step to step is therefore made once, as a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ingot import stability
from ingot.model import Layer
from ingot.natural import Kept, Part, columns_of, fused_descent
from ingot.precision import computing
from ingot.rules import Section
from ingot.structures.base import is_by_columns, multiplied_in, place_in

SMALL = 1 << 20
"""Weights of no more entries than this are small."""


class Scratch:
    """Memory in which layers of one dtype make their natural gradients in turn.

    It is there while it is lent, and views of it, which plans are made of, stay good from step to step.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size = size
        self.spare, self.natural = (torch.empty(size, dtype=dtype) for _ in range(2))

    def resize(self, size: int) -> None:
        """Have memory for so many numbers, or none."""
        for tensor in (self.spare, self.natural):
            tensor.untyped_storage().resize_(size * tensor.itemsize)


ByDtype: TypeAlias = dict[torch.dtype, Scratch]


@contextmanager
def lent(scratch: ByDtype, layers: list[Layer]) -> Iterator[ByDtype]:
    """Within this context there is memory that is large enough for each of these layers."""
    needed: dict[torch.dtype, int] = {}
    for layer in layers:
        size = sum(p.numel() for p in layer.parameters)
        needed[layer.weight.dtype] = max(size, needed.get(layer.weight.dtype, 0))
    for dtype, size in needed.items():
        if dtype not in scratch or scratch[dtype].size < size:
            scratch[dtype] = Scratch(size, dtype)
        scratch[dtype].resize(scratch[dtype].size)
    try:
        yield scratch
    finally:
        for dtype in needed:
            scratch[dtype].resize(0)


def has_stepped(layer: Layer, parts: list[Part], kept: Kept, scratch: ByDtype) -> bool:
    """Take a layer's step, unless it is not the usual one after all: then nothing has changed."""
    (weight, state, *_), rates = parts[0], [part.rates for part in parts]
    if computing(kept.k.entries.dtype) != weight.dtype:
        return False
    plan = layer.plan
    if plan is None or not plan.is_for(parts, kept, scratch[weight.dtype]):
        plan = layer.plan = Plan(layer, parts, kept, scratch[weight.dtype])
    plan.make_natural_gradient()
    natural_size, usual = plan.natural_size(), state["size"].item()
    if not stability.is_usual(natural_size, usual, state["steps"]):
        return False
    rate = float(rates[0].momentum)
    plan.move_momenta(rate)
    size = plan.momentum_size()
    noise = stability.noise_size(state["noise"].item(), natural_size, size, rate)
    agreement, d_i = stability.agreement(size, noise, rate), layer.structures[0].dim
    lengths = stability.step_lengths(rates, size, agreement, d_i, plan.weight_size)
    plan.descend([float(length) for length in lengths], [float(its.decay) for its in rates])
    state["size"].fill_(stability.usual_size(usual, size, True))
    state["noise"].fill_(noise)
    state["steps"] += 1
    return True


class Piece(NamedTuple):
    """Columns of a natural gradient that are made by themselves, and where."""

    start: int
    stop: int
    together: Tensor  # these columns of weight and bias, where both are among them
    spare: Tensor  # C Cᵀ times these
    times_k: Callable[[], object]  # makes them the natural gradient


class Plan:
    """How a layer takes its steps, with views of all that stays where it is from step to step."""

    def __init__(self, layer: Layer, parts: list[Part], kept: Kept, scratch: Scratch) -> None:
        self._kept, self._scratch = kept, scratch
        self._adapter, self._module = layer.adapter, layer.module
        self._params: list[Tensor] = [part.p for part in parts]
        self._momenta: list[Tensor] = [part.state["momentum_buffer"] for part in parts]
        self._count = sum(p.numel() for p in self._params)
        self.natural = scratch.natural[: self._count]
        self._matrix = layer.adapter.weight_matrix(layer.module, self._momenta[0])
        self._by_columns = is_by_columns(self._matrix)
        # The matrices of a few layers are not views of their weights.
        self._is_view = self._matrix.data_ptr() == self._momenta[0].data_ptr()
        self._pieces: list[Piece] = []
        self._moves: list[tuple[Tensor, Tensor]] = []  # natural gradients, and the momenta that they are for
        if kept.scales is not None:
            self._plan_scaling()
        else:
            sections = kept.sections if self._is_view else [Section(0, layer.structures[0].dim, kept.k)]
            for section in sections:
                self._plan_section(section)
        both = [*self._params, *self._momenta]
        self._can_fuse = all(tensor.is_contiguous() for tensor in both)

    def _plan_scaling(self) -> None:
        places = self.natural.split([p.numel() for p in self._params])
        shapes = [self._matrix.shape, *(p.shape for p in self._params[1:])]
        self._scaled = [place_in(places[0], shapes[0], by_columns=self._by_columns)]
        self._scaled += [place.view(shape) for place, shape in zip(places[1:], shapes[1:], strict=True)]
        targets = [self._matrix if self._is_view else self._momenta[0], *self._momenta[1:]]
        self._moves = list(zip(self._scaled, targets, strict=True))

    def _plan_section(self, section: Section) -> None:
        start, stop, product = section
        *lead, width = self._matrix.shape
        rows, shape = math.prod(lead), (*lead, stop - start)
        room = self.natural[rows * start : rows * stop]
        spare = place_in(self._scratch.spare[: room.numel()], shape, by_columns=self._by_columns)
        has_bias = stop > width
        if has_bias or not self._is_view:
            times_k, natural = multiplied_in(room, spare, product.apply)
        else:
            times_k, natural = product.in_place_of(spare, room)
        together = place_in(room, shape, by_columns=self._by_columns)
        self._pieces.append(Piece(start, stop, together, spare, times_k))
        if start < width:
            momentum = self._matrix[..., start : min(stop, width)] if self._is_view else self._momenta[0]
            if natural.ndim > len(shape):
                momentum = momentum.unflatten(-1, natural.shape[-2:])
            self._moves.append((natural[..., :-1] if has_bias else natural, momentum))
        if has_bias:
            self._moves.append((natural[..., -1], self._momenta[1].view(lead)))

    def is_for(self, parts: list[Part], kept: Kept, scratch: Scratch) -> bool:
        """Whether all of it is still where it was."""
        if self._kept is not kept or self._scratch is not scratch:
            return False
        pairs = zip(parts, self._momenta, strict=True)
        return all(part.state["momentum_buffer"] is momentum for part, momentum in pairs)

    def make_natural_gradient(self) -> None:
        """Make it of what the gradients are now, in ``natural``."""
        gradient, *bias = (p.grad for p in self._params)
        assert gradient is not None
        matrix, kept = self._adapter.weight_matrix(self._module, gradient), self._kept
        if kept.scales is not None:
            rows, columns, of_bias = kept.scales
            torch.mul(matrix, rows, out=self._scaled[0]).mul_(columns)
            if bias:
                torch.mul(bias[0], of_bias, out=self._scaled[1])
            return
        column = bias[0].view(*matrix.shape[:-1], 1) if bias else None
        for start, stop, together, spare, times_k in self._pieces:
            product = kept.c.apply(columns_of(matrix, column, start, stop, together), spare)
            if product is not spare:
                spare.copy_(product)
            times_k()

    def move_momenta(self, rate: float) -> None:
        """m ← α₂ m + n."""
        for natural, momentum in self._moves:
            if not self._is_view and momentum is self._momenta[0]:
                natural = self._adapter.matrix_weight(self._module, natural, self._params[0])
            torch.add(natural, momentum, alpha=rate, out=momentum)

    def natural_size(self) -> float:
        """How long the natural gradient is, in root mean square."""
        return _root_mean_square([self.natural])

    def momentum_size(self) -> float:
        """How long the momentum is."""
        return _root_mean_square(self._momenta)

    def weight_size(self) -> float:
        """How large the weight is."""
        return _root_mean_square(self._params[:1])

    def descend(self, lengths: list[float], decays: list[float]) -> None:
        """W ← (1 - decay) W - length m, for weight and bias."""
        fuses = self._can_fuse and all(lengths) and all(decays)
        if fuses and lengths[0] == lengths[-1] and decays[0] == decays[-1]:
            fused_descent(self._params, self._momenta, lengths[0], decays[0])
            return
        for p, momentum, length, decay in zip(self._params, self._momenta, lengths, decays, strict=True):
            if fuses:
                fused_descent([p], [momentum], length, decay)
            else:
                p.mul_(1 - decay).sub_(momentum, alpha=length)


def _root_mean_square(tensors: list[Tensor]) -> float:
    total, count = 0.0, 0
    for t in tensors:
        flat = t.view(-1) if t.is_contiguous() else t.reshape(-1)
        total += torch.dot(flat, flat).item()
        count += flat.numel()
    return math.sqrt(total / count)

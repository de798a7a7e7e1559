"""The usual step of a small layer: the same as in ``stepping``, in few calls and in memory that layers share.

Where a product takes a tenth of a millisecond, calls, views and new memory take as long as what is
calculated. What does not change from step to step is therefore made once, as a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ingot import stability
from ingot.family import Rule
from ingot.groups import Group
from ingot.model import Layer
from ingot.natural import Kept, Part, columns_of, fused_descent
from ingot.rules import Section
from ingot.scalars import is_at_hand
from ingot.stability import Rates
from ingot.structures.base import is_by_columns, multiplied_in, place_in

Settings: TypeAlias = tuple[Any, ...]

SMALL = 1 << 20
"""Weights of no more entries than this are small."""

PART = 1 << 17
"""Products are made of no more rows at once than have so many entries, if structures let rows be apart.

What one product leaves is then in the caches when the next one takes it up, and a step asks for so little
memory that the system's allocator has it at hand, and need not get it page by page each time.
"""

SETTINGS = (
    "normalize_step",
    "decoupled_weight_decay",
    "maximize",
    "cache_products",
    "precond_every",
    "compile",
)
"""The settings of a group that make a plan another one; rates are read at each step."""


class Scratch:
    """Memory in which layers of one dtype make their natural gradients in turn.

    It is there while it is lent, and views of it, which plans are made of, stay good from step to step.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self._spare_size = size, 0
        self._spare, self.natural = (torch.empty(size, dtype=dtype) for _ in range(2))
        self._is_lent = True
        self.take_back()

    def lend(self) -> None:
        """Have the memory."""
        if not self._is_lent:
            self._is_lent = True
            _resize(self.natural, self.size)
            _resize(self._spare, self._spare_size)

    def take_back(self) -> None:
        """Have it no longer."""
        if self._is_lent:
            self._is_lent = False
            _resize(self.natural, 0)
            _resize(self._spare, 0)

    def spare(self, size: int) -> Tensor:
        """So many numbers that are no natural gradient yet; only while the memory is lent."""
        if size > self._spare_size:
            self._spare_size = size
            _resize(self._spare, size)
        return self._spare[:size]


def _resize(tensor: Tensor, size: int) -> None:
    """Let the memory behind a tensor be that of so many numbers."""
    tensor.untyped_storage().resize_(size * tensor.itemsize)


def scratch_for(layer: Layer, layers: Iterable[Layer], known: dict[torch.dtype, Scratch]) -> Scratch:
    """What is known for a layer, or new memory in which all small ones of these layers have room."""
    dtype, needed = layer.weight.dtype, sum(p.numel() for p in layer.parameters)
    if dtype not in known or known[dtype].size < needed:
        alike = [other for other in layers if other.weight.dtype == dtype and is_small(other)]
        sizes = [sum(p.numel() for p in other.parameters) for other in alike]
        known[dtype] = Scratch(max([needed, *sizes]), dtype)
    return known[dtype]


def is_small(layer: Layer) -> bool:
    """Whether a layer may have a plan."""
    return layer.layout is None and layer.weight.numel() <= SMALL and is_at_hand(layer.weight)


class Piece(NamedTuple):
    """Rows and columns of a natural gradient that are made by themselves, and where."""

    first: int  # row
    height: int
    start: int
    stop: int
    together: Tensor  # these columns of weight and bias, where both are among them
    times_c: Callable[[Tensor], object]  # multiplies them
    times_k: Callable[[], object]  # makes them the natural gradient


class Sizes(NamedTuple):
    """Root mean squares that the length of a step depends on."""

    natural: float
    momentum: float
    usual: float  # of momenta before


class Plan:
    """How a layer takes its steps, with views of all that stays where it is from step to step."""

    def __init__(
        self, layer: Layer, parts: list[Part], groups: list[int], kept: Kept, scratch: Scratch
    ) -> None:
        self.scratch, self._layer = scratch, layer
        self._adapter, self._module = layer.adapter, layer.module
        self._params: list[Tensor] = [part.p for part in parts]
        self._states = [part.state for part in parts]
        self._momenta: list[Tensor] = [part.state["momentum_buffer"] for part in parts]
        self._groups = groups
        self._settings = [settings_of(part.group) for part in parts]
        self._count = sum(p.numel() for p in self._params)
        self._natural = scratch.natural[: self._count]
        self._matrix = layer.adapter.weight_matrix(layer.module, self._momenta[0])
        self._by_columns = is_by_columns(self._matrix)
        # The matrices of a few layers are not views of their weights.
        self._is_view = self._matrix.data_ptr() == self._momenta[0].data_ptr()
        layout = self._matrix.shape, self._matrix.stride()
        self._is_same = self._is_view and layout == (self._momenta[0].shape, self._momenta[0].stride())
        in_order = all(momentum.is_contiguous() for momentum in self._momenta)
        self._flat_momenta = [_flat(momentum) for momentum in self._momenta] if in_order else None
        self._plan(kept)

    def _plan(self, kept: Kept) -> None:
        """Make the views of what is multiplied with these products."""
        self._kept = kept
        self._pieces: list[Piece] = []
        self._moves: list[tuple[Tensor, Tensor]] = []  # natural gradients, and the momenta that they are for
        if kept.scales is not None:
            self._plan_scaling()
            return
        rows = math.prod(self._matrix.shape[:-1])
        for section in kept.sections if self._is_view else [Section(0, kept.structures[0].dim, kept.k)]:
            room = self._natural[rows * section.start : rows * section.stop]
            parts = self._row_parts(room.numel())
            sizes = [room.numel() * (part.stop - part.start) // self._matrix.shape[-2] for part in parts]
            for part, its_room in zip(parts, room.split(sizes), strict=True):
                self._plan_piece(part, section, its_room)

    def _plan_scaling(self) -> None:
        places = self._natural.split([p.numel() for p in self._params])
        shapes = [self._matrix.shape, *(p.shape for p in self._params[1:])]
        self._scaled = [place_in(places[0], shapes[0], by_columns=self._by_columns)]
        self._scaled += [place.view(shape) for place, shape in zip(places[1:], shapes[1:], strict=True)]
        targets = [self._matrix if self._is_view else self._momenta[0], *self._momenta[1:]]
        self._moves = list(zip(self._scaled, targets, strict=True))

    def _row_parts(self, size: int) -> list[Section]:
        """Parts of C Cᵀ that meet so many entries one after the other."""
        can_be_apart = self._is_view and self._matrix.ndim == 2 and not self._by_columns
        apart = self._kept.c.parts(-(-size // PART)) if can_be_apart and size > PART else []
        return apart or [Section(0, self._matrix.shape[-2], self._kept.c)]

    def _plan_piece(self, rows: Section, columns: Section, room: Tensor) -> None:
        """How these rows and columns are made, and where."""
        start, stop, _ = columns
        matrix = self._matrix.narrow(-2, rows.start, rows.stop - rows.start)
        *lead, width = matrix.shape
        shape = (*lead, stop - start)
        spare = place_in(self.scratch.spare(room.numel()), shape, by_columns=self._by_columns)
        together = place_in(room, shape, by_columns=self._by_columns)
        times_k, natural = self._times_k(columns, spare, together)
        times_c = rows.product.into(spare)
        self._pieces.append(Piece(rows.start, lead[-1], start, stop, together, times_c, times_k))
        has_bias = stop > width
        if start < width:
            momentum = matrix[..., start : min(stop, width)] if self._is_view else self._momenta[0]
            if natural.ndim > len(shape):
                momentum = momentum.unflatten(-1, natural.shape[-2:])
            self._moves.append((natural[..., :-1] if has_bias else natural, momentum))
        if has_bias:
            momentum = self._momenta[1].view(self._matrix.shape[:-1]).narrow(-1, rows.start, lead[-1])
            self._moves.append((natural[..., -1], momentum))

    def _times_k(
        self, section: Section, spare: Tensor, together: Tensor
    ) -> tuple[Callable[[], object], Tensor]:
        """What multiplies some columns with K Kᵀ, and where these are then: all in the same memory."""
        room = (together.mT if self._by_columns else together).view(-1)
        times_k, natural = section.product.in_place_of(spare, room)
        if natural.ndim == spare.ndim or (section.stop <= self._matrix.shape[-1] and self._is_view):
            return times_k, natural
        # What is taken apart, or copied, must not be folded.
        if natural.shape[-2] == 1:
            return times_k, natural.squeeze(-2)
        return multiplied_in(room, spare, section.product.apply)

    def is_good(self, states: Mapping[Tensor, Any], settings: list[Settings], rates: list[Rates]) -> bool:
        """Whether the coming step can be taken so: all is where it was, but for the factors.

        ``settings`` and ``rates`` are those of all groups now.
        """
        layer = self._layer
        if layer.natural is not None or layer.layout is not None:
            return False
        if [settings[group] for group in self._groups] != self._settings:
            return False
        for p, state, momentum in zip(self._params, self._states, self._momenta, strict=True):
            if states[p] is not state or state.get("momentum_buffer") is not momentum or p.grad is None:
                return False
        if layer.structures is not self._kept.structures:
            return False
        rate = self._momentum_rate(rates)
        return bool(rate) and rate == float(rates[self._groups[-1]].momentum)

    def has_factors(self, rule: Rule) -> bool:
        """Whether the factors are those that the plan was made with."""
        (state, *_), (k, c), (of_k, of_c) = self._states, rule.applied, self._kept.sources
        same = state[k] is of_k and state[c] is of_c
        return same and self._kept.versions == (of_k._version, of_c._version)

    def take_factors(self, kept: Kept) -> None:
        """Go on with other factors of the same structures; the memory must be lent."""
        assert (kept.scales is None) == bool(self._pieces), "the structures are the same"
        if kept.k is self._kept.k and kept.c is self._kept.c:
            self._kept = kept  # whose products are where the others were
        else:
            self._plan(kept)

    def move_momenta(self, rates: list[Rates]) -> Sizes | None:
        """Make the natural gradient and the momenta of it: m ← α₂ m + n.

        If the step is not the usual one after all, nothing has changed. ``rates`` are those of all groups,
        and the memory must be lent.
        """
        self._make_natural_gradient()
        rate, state, natural = self._momentum_rate(rates), self._states[0], self._natural
        natural_size = math.sqrt(torch.dot(natural, natural).item() / self._count)
        usual = state["size"].item()
        if not stability.is_usual(natural_size, usual, state["steps"]):
            return None
        for part, momentum in self._moves:
            if not self._is_view and momentum is self._momenta[0]:
                part = self._adapter.matrix_weight(self._module, part, self._params[0])
            torch.add(part, momentum, alpha=rate, out=momentum)
        flat = self._flat_momenta or [_flat(momentum) for momentum in self._momenta]
        squared = sum([torch.dot(m, m).item() for m in flat])
        return Sizes(natural_size, math.sqrt(squared / self._count), usual)

    def descend(self, sizes: Sizes, rates: list[Rates]) -> None:
        """Move the weights by the momenta, and note how large these were."""
        rate, its = self._momentum_rate(rates), [rates[group] for group in self._groups]
        state = self._states[0]
        noise = stability.noise_size(state["noise"].item(), sizes.natural, sizes.momentum, rate)
        agreement, d_i = stability.agreement(sizes.momentum, noise, rate), self._kept.structures[0].dim
        lengths = stability.step_lengths(its, sizes.momentum, agreement, d_i, self._weight_size)
        self._move_weights([float(length) for length in lengths], [float(of.decay) for of in its])
        state["size"].fill_(stability.usual_size(sizes.usual, sizes.momentum, True))
        state["noise"].fill_(noise)
        state["steps"] += 1

    def _momentum_rate(self, rates: list[Rates]) -> float:
        """α₂, which weight and bias have in common in a usual step."""
        return float(rates[self._groups[0]].momentum)

    def _make_natural_gradient(self) -> None:
        """Make it of what the gradients are now, in ``natural``."""
        gradient, *bias = [p.grad for p in self._params if p.grad is not None]
        kept = self._kept
        if self._is_same:
            matrix = gradient
        elif self._is_view and gradient.stride() == self._momenta[0].stride():  # as nearly always
            matrix = gradient.as_strided(self._matrix.shape, self._matrix.stride(), gradient.storage_offset())
        else:
            matrix = self._adapter.weight_matrix(self._module, gradient)
        if kept.scales is not None:
            rows, columns, of_bias = kept.scales
            torch.mul(matrix, rows, out=self._scaled[0]).mul_(columns)
            if of_bias is not None:
                torch.mul(bias[0], of_bias, out=self._scaled[1])
            return
        column = bias[0].view(*matrix.shape[:-1], 1) if bias else None
        for first, height, start, stop, together, times_c, times_k in self._pieces:
            if height == matrix.shape[-2]:
                times_c(columns_of(matrix, column, start, stop, together))
            else:
                beside = None if column is None else column.narrow(-2, first, height)
                times_c(columns_of(matrix.narrow(-2, first, height), beside, start, stop, together))
            times_k()

    def _weight_size(self) -> float:
        """How large the weight is."""
        weight = _flat(self._params[0])
        return math.sqrt(torch.dot(weight, weight).item() / len(weight))

    def _move_weights(self, lengths: list[float], decays: list[float]) -> None:
        """W ← (1 - decay) W - length m, for weight and bias."""
        # How a weight is stored may change at any time, by ``model.to(memory_format=...)``.
        in_order = self._flat_momenta is not None and all(p.is_contiguous() for p in self._params)
        fuses = in_order and all(lengths) and all(decays)
        if fuses and lengths[0] == lengths[-1] and decays[0] == decays[-1]:
            fused_descent(self._params, self._momenta, lengths[0], decays[0])
            return
        for p, momentum, length, decay in zip(self._params, self._momenta, lengths, decays, strict=True):
            if fuses:
                fused_descent([p], [momentum], length, decay)
            else:
                p.mul_(1 - decay).sub_(momentum, alpha=length)


def settings_of(group: Group) -> Settings:
    """Those of a group that plans depend on."""
    return tuple([group[name] for name in SETTINGS])


def _flat(tensor: Tensor) -> Tensor:
    """All numbers of a tensor, a copy of them where they are not stored one after another."""
    return tensor.detach().reshape(-1)

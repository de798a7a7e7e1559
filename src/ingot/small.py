"""The usual step of a small layer: the same as in ``stepping``, in few calls and in memory that layers share.

Where a product takes a tenth of a millisecond, calls and new memory take as long as what is calculated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ingot import stability
from ingot.model import Layer
from ingot.natural import Kept, Part, Room, fused_descent, natural_matrix
from ingot.precision import computing

SMALL = 1 << 20
"""Weights of no more entries than this are small."""


def rooms(layers: Iterable[Layer]) -> dict[torch.dtype, Room]:
    """For each dtype two places that are large enough for the gradient of any layer."""
    largest: dict[torch.dtype, int] = {}
    for layer in layers:
        dtype = layer.weight.dtype
        largest[dtype] = max(layer.weight.numel(), largest.get(dtype, 0))
    return {d: (torch.empty(n, dtype=d), torch.empty(n, dtype=d)) for d, n in largest.items()}


def has_stepped(layer: Layer, parts: list[Part], kept: Kept, room: Room) -> bool:
    """Take a layer's step, unless it is not the usual one after all: then nothing has changed."""
    (weight, state, *_), rates = parts[0], [part.rates for part in parts]
    if computing(kept.k.entries.dtype) != weight.dtype:
        return False
    natural = _natural_gradient(layer, parts, kept, room)
    natural_size, usual = _root_mean_square(natural), state["size"].item()
    if not stability.is_usual(natural_size, usual, state["steps"]):
        return False
    rate, momenta = float(rates[0].momentum), [part.state["momentum_buffer"] for part in parts]
    for n, momentum in zip(natural, momenta, strict=True):
        torch.add(n, momentum, alpha=rate, out=momentum)
    size = _root_mean_square(momenta)
    noise = stability.noise_size(state["noise"].item(), natural_size, size, rate)
    agreement, d_i = stability.agreement(size, noise, rate), layer.structures[0].dim
    lengths = stability.step_lengths(rates, size, agreement, d_i, lambda: _root_mean_square([weight]))
    for part, momentum, length, its in zip(parts, momenta, lengths, rates, strict=True):
        _descend(part.p, momentum, float(length), float(its.decay))
    state["size"].fill_(stability.usual_size(usual, size, True))
    state["noise"].fill_(noise)
    state["steps"] += 1
    return True


def _natural_gradient(layer: Layer, parts: list[Part], kept: Kept, room: Room) -> list[Tensor]:
    weight, adapter, module = parts[0].p, layer.adapter, layer.module
    gradient, *bias = [part.p.grad for part in parts if part.p.grad is not None]
    numel, shape = weight.numel(), weight.shape
    matrix = adapter.weight_matrix(module, gradient)
    spare, out = room[0].narrow(0, 0, numel), room[1].narrow(0, 0, numel)
    if matrix.is_contiguous():
        places = spare.view(matrix.shape), out.view(matrix.shape)
    else:  # laid out as the matrix is
        places = (
            adapter.weight_matrix(module, spare.view(shape)),
            adapter.weight_matrix(module, out.view(shape)),
        )
    natural = natural_matrix(kept, (matrix, *bias), places)
    natural[0] = adapter.matrix_weight(module, natural[0], weight)
    return natural


def _root_mean_square(tensors: list[Tensor]) -> float:
    total, count = 0.0, 0
    for t in tensors:
        flat = t.view(-1) if t.is_contiguous() else t.reshape(-1)
        total += torch.dot(flat, flat).item()
        count += flat.numel()
    return math.sqrt(total / count)


def _descend(p: Tensor, momentum: Tensor, length: float, decay: float) -> None:
    if decay and length and p.is_contiguous() and momentum.is_contiguous():
        fused_descent(p, momentum, length, decay)
    else:
        p.mul_(1 - decay).sub_(momentum, alpha=length)

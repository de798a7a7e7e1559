"""The steps of many weights as one compiled function: fewer passes over memory, and one call.

It makes the same steps as ``stepping`` makes one operation after the other, for layers with diagonal factors;
only that of a gradient which is refused has about the usual length, not exactly that of its momentum.
(With others, nearly all time is that of matrix products, which no compiler makes faster.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ingot import stability
from ingot.model import Layer
from ingot.natural import Part, Scales
from ingot.scalars import Number

Bounds: TypeAlias = tuple[float | None, ...]
"""What the code is compiled for, of one layer: the bounds on the steps of its weight, and of its bias."""


class Moving(NamedTuple):
    """What changes from step to step: matrices of the weight, vectors of its bias.

    Numbers that a schedule may change are tensors, so that the code need not be compiled anew.
    """

    scales: Scales
    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    momenta: tuple[Tensor, ...]
    lrs: tuple[Tensor, ...]
    peaks: tuple[Tensor, ...]
    shrinking: tuple[Tensor, ...]
    rate: Tensor
    usual: Tensor
    noise: Tensor


class Sizes(NamedTuple):
    """What is known of a momentum after its step: its usual size, that of noise, and if it was trusted."""

    usual: Tensor
    noise: Tensor
    trusted: Tensor


Found: TypeAlias = list[Sizes]
Function: TypeAlias = Callable[[list[Moving]], Found]


def take_steps(layers: list[tuple[Layer, list[Part], Scales]]) -> Found:
    """Move these layers' weights; returns the sizes of each momentum."""
    function = _function(tuple(_bounds(layer, parts) for layer, parts, _ in layers))
    return function([_moving(*one) for one in layers])


def _bounds(layer: Layer, parts: list[Part]) -> Bounds:
    return tuple(_bound(part, layer.structures[0].dim) for part in parts)


def _bound(part: Part, d_i: int) -> float | None:
    """The bound on a relative step, if the learning rate may exceed it."""
    rates = part.rates
    return rates.max_relative if stability.may_bind(rates.longest, d_i, rates.max_relative) else None


def _moving(layer: Layer, parts: list[Part], scales: Scales) -> Moving:
    def shaped(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return layer.adapter.weight_matrix(layer.module, tensors[0]), *tensors[1:]

    return Moving(
        scales,
        shaped([part.p.detach() for part in parts]),
        shaped([part.p.grad for part in parts if part.p.grad is not None]),
        shaped([part.state["momentum_buffer"] for part in parts]),
        tuple(_beside(part, part.rates.lr) for part in parts),
        tuple(_beside(part, part.rates.peak_lr) for part in parts),
        tuple(_beside(part, 1 - part.rates.decay) for part in parts),
        _beside(parts[0], parts[0].rates.momentum),
        parts[0].state["size"],
        parts[0].state["noise"],
    )


def _beside(part: Part, value: Number) -> Tensor:
    return torch.as_tensor(value, dtype=part.p.dtype, device=part.p.device)


@lru_cache(maxsize=64)
def _function(layers: tuple[Bounds, ...]) -> Function:
    """The compiled function for these layers, which is made when they are met for the first time."""

    def step(movings: list[Moving]) -> Found:
        return [_step(*pair) for pair in zip(layers, movings, strict=True)]

    # The compiler counts how often it meets the same code in another form, and gives up at some number.
    step.__code__ = step.__code__.replace()
    return torch.compile(step, dynamic=False)


def _step(bounds: Bounds, moving: Moving) -> Sizes:
    rows, columns, of_bias = moving.scales
    matrix, *bias = moving.gradients
    natural = [matrix * rows * columns, *(g * of_bias for g in bias if of_bias is not None)]
    old = [moving.rate * m for m in moving.momenta]
    new = [m + n for m, n in zip(old, natural, strict=True)]
    size, usual = _root_mean_square(new), moving.usual
    natural_size = _root_mean_square(natural)
    trusted: Any = stability.is_usual(natural_size, usual, stability.SETTLED_STEPS)
    new = [torch.where(trusted, m, o) for m, o in zip(new, old, strict=True)]
    size_taken = torch.where(trusted, size, usual)  # about that of the old momentum, without another pass
    natural_size = torch.where(trusted, natural_size, 0.0)
    noise: Any = stability.noise_size(moving.noise, natural_size, size_taken, moving.rate)
    agreement = stability.agreement(size_taken, noise, moving.rate)
    d_i = matrix.shape[-1] + len(bias)
    is_bounded = any(bound is not None for bound in bounds)
    weight_size = _root_mean_square([moving.weights[0]]) if is_bounded else 0.0
    rates = zip(moving.lrs, moving.peaks, moving.shrinking, bounds, strict=True)
    for w, m, momentum, (lr, peak, shrinking, bound) in zip(
        moving.weights, new, moving.momenta, rates, strict=True
    ):
        length = stability.step_length(lr, peak, size_taken, agreement, weight_size, d_i, bound)
        w.mul_(shrinking).sub_(length * m)
        momentum.copy_(m)
    new_usual: Any = stability.usual_size(usual, size, trusted)
    return Sizes(new_usual, noise, trusted)


def _root_mean_square(tensors: list[Tensor]) -> Tensor:
    # Not as a sum of squares, which the compiler adds up one after the other.
    total: Any = sum(torch.dot(t.reshape(-1), t.reshape(-1)) for t in tensors)
    found: Tensor = (total / sum(t.numel() for t in tensors)).sqrt()
    return found

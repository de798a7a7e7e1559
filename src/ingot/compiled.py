"""The steps of many weights as one compiled function: fewer passes over memory, and one call.

It makes the same steps as ``stepping`` makes one operation after the other, for layers with diagonal factors;
only that of a gradient which is refused has about the usual length, not exactly that of its momentum.
(With others, nearly all time is that of matrix products, which no compiler makes faster.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ingot import stability
from ingot.model import Layer
from ingot.natural import Part, Scales


class Fixed(NamedTuple):
    """What the code is compiled for, of one layer: numbers of the weight, and of its bias if there is one."""

    momentum: float
    decays: tuple[float, ...]
    bounds: tuple[float | None, ...]


class Moving(NamedTuple):
    """What changes from step to step: matrices of the weight, vectors of its bias."""

    scales: Scales
    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    momenta: tuple[Tensor, ...]
    lrs: tuple[Tensor, ...]
    usual: Tensor


Found = list[tuple[Tensor, Tensor]]
Function = Callable[[list[Moving]], Found]


def take_steps(layers: list[tuple[Layer, list[Part], Scales]]) -> Found:
    """Move these layers' weights; returns the usual size of each momentum, and whether it was trusted."""
    function = _function(tuple(_fixed(layer, parts) for layer, parts, _ in layers))
    return function([_moving(*one) for one in layers])


def _fixed(layer: Layer, parts: list[Part]) -> Fixed:
    groups, d_i = [part.group for part in parts], layer.structures[0].dim
    return Fixed(
        float(groups[0]["momentum"]),
        tuple(float(group["weight_decay"]) for group in groups),
        tuple(_bound(part, d_i) for part in parts),
    )


def _bound(part: Part, d_i: int) -> float | None:
    """The bound on a relative step, if the learning rate may exceed it."""
    bound: float | None = part.group["max_relative_step"]
    lr = part.lr
    return bound if bound is None or isinstance(lr, Tensor) or stability.may_bind(lr, d_i, bound) else None


def _moving(layer: Layer, parts: list[Part], scales: Scales) -> Moving:
    def shaped(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return layer.adapter.weight_matrix(layer.module, tensors[0]), *tensors[1:]

    return Moving(
        scales,
        shaped([part.p.detach() for part in parts]),
        shaped([part.p.grad for part in parts if part.p.grad is not None]),
        shaped([part.state["momentum_buffer"] for part in parts]),
        tuple(torch.as_tensor(part.lr, dtype=part.p.dtype, device=part.p.device) for part in parts),
        parts[0].state["size"],
    )


@lru_cache(maxsize=64)
def _function(layers: tuple[Fixed, ...]) -> Function:
    """The compiled function for these layers, which is made when they are met for the first time."""

    def step(movings: list[Moving]) -> Found:
        return [_step(*pair) for pair in zip(layers, movings, strict=True)]

    # The compiler counts how often it meets the same code in another form, and gives up at some number.
    step.__code__ = step.__code__.replace()
    return torch.compile(step, dynamic=False)


def _step(fixed: Fixed, moving: Moving) -> tuple[Tensor, Tensor]:
    rows, columns, of_bias = moving.scales
    matrix, *bias = moving.gradients
    natural = [matrix * rows * columns, *(g * of_bias for g in bias if of_bias is not None)]
    old = [fixed.momentum * m for m in moving.momenta]
    new = [m + n for m, n in zip(old, natural, strict=True)]
    size, usual = _root_mean_square(new), moving.usual
    trusted: Any = stability.is_usual(size, usual, stability.SETTLED_STEPS)
    new = [torch.where(trusted, m, o) for m, o in zip(new, old, strict=True)]
    size_taken = torch.where(trusted, size, usual)  # about that of the old momentum, without another pass
    d_i = matrix.shape[-1] + len(bias)
    is_bounded = any(bound is not None for bound in fixed.bounds)
    weight_size = _root_mean_square([moving.weights[0]]) if is_bounded else 0.0
    for w, m, momentum, lr, decay, bound in zip(
        moving.weights, new, moving.momenta, moving.lrs, fixed.decays, fixed.bounds, strict=True
    ):
        length = stability.step_length(lr, size_taken, weight_size, d_i, bound)
        w.mul_(1 - lr * decay).sub_(length * m)
        momentum.copy_(m)
    found: Any = stability.usual_size(usual, size, trusted)
    return found, trusted


def _root_mean_square(tensors: list[Tensor]) -> Tensor:
    # Not as a sum of squares, which the compiler adds up one after the other.
    total: Any = sum(torch.dot(t.reshape(-1), t.reshape(-1)) for t in tensors)
    found: Tensor = (total / sum(t.numel() for t in tensors)).sqrt()
    return found

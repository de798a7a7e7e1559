"""The step of a large weight with diagonal factors, some of its rows at a time.

Each part goes through all operations while the processor's caches hold it, and nothing of the weight's size
is allocated: new memory takes more time than to calculate with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.natural import Scales, fused_descent

LARGE = 1 << 23
"""Weights of more entries than this take their steps in parts: the C library gives so much memory back."""

CHUNK = 1 << 17
"""About how many entries a part has."""


class Chunk(NamedTuple):
    """Some rows of the weight, of its gradient and momentum, and what the gradient is multiplied with."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    scales: Tensor


class RowSteps:
    """A weight matrix in parts of rows."""

    def __init__(self, weight_gradient_momentum: list[Tensor], scales: Scales, rate: float) -> None:
        self._columns, self._rate = scales.columns, rate
        self._all = *weight_gradient_momentum, scales.rows
        self._scratch = scales.rows.new_empty(max(CHUNK, scales.columns.numel()))

    def _chunks(self) -> Iterator[Chunk]:
        rows = max(1, CHUNK // self._columns.numel())
        return (Chunk(*parts) for parts in zip(*(whole.split(rows) for whole in self._all), strict=True))

    def _natural(self, chunk: Chunk) -> Tensor:
        out = self._scratch[: chunk.gradient.numel()].view(chunk.gradient.shape)
        return torch.mul(chunk.gradient, chunk.scales, out=out).mul_(self._columns)

    def sums_of_squares(self, *, with_gradient: bool = True) -> tuple[float, float]:
        """That of what the momentum will be, and that of the natural gradient in it."""
        of_momentum, of_natural = [], []
        for chunk in self._chunks():
            if with_gradient:
                momentum = self._natural(chunk)
                of_natural.append(torch.dot(momentum.view(-1), momentum.view(-1)))
                momentum.add_(chunk.momentum, alpha=self._rate)
            else:
                momentum = torch.mul(chunk.momentum, self._rate)
            of_momentum.append(torch.dot(momentum.view(-1), momentum.view(-1)))
        return float(torch.stack(of_momentum).sum()), float(sum(of_natural))

    def descend(self, length: float, decay: float, *, with_gradient: bool = True) -> None:
        """Take the step, of momentum and weight."""
        for chunk in self._chunks():
            chunk.momentum.mul_(self._rate)
            if with_gradient:
                chunk.momentum.add_(self._natural(chunk))
            if length:
                fused_descent([chunk.weight], [chunk.momentum], length, decay)
            elif decay:  # there is no momentum
                chunk.weight.mul_(1 - decay)

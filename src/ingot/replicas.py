"""Replicas of a model in several processes: what each saw becomes what all saw, before the factors move."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist

from ingot.model import Layer
from ingot.rules import Factor
from ingot.statistics import Pending, Sums

Group: TypeAlias = Any  # dist.ProcessGroup, which is not there on every platform


def share_statistics(layers: Iterable[tuple[Layer, tuple[Factor, Factor]]], group: Group) -> None:
    """Sum the statistics of these layers over all replicas, in one message for each dtype.

    All replicas name the same layers; what one of them has not seen counts for nothing there. Gradients are
    averaged over replicas, so each replica's own are those of the whole loss times the number of replicas.
    """
    shared = [_Shared(layer, factors) for layer, factors in layers]
    tensors = [tensor for one in shared for tensor in one.tensors]
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        alike = [tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.all_reduce(flat, group=group)
        for tensor, summed in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(summed.view(tensor.shape))
    for one in shared:
        one.put_back(group.size())


class _Shared:
    """A layer's statistics as tensors that are the same for all replicas but for their values."""

    def __init__(self, layer: Layer, factors: tuple[Factor, Factor]) -> None:
        self.layer = layer
        self.pending = layer.pending or Pending()
        k, c = (factor.entries for factor in factors)
        one = k[..., :1]
        nothing = Sums(*(torch.zeros_like(t) for t in (k, c, one, one, one)))
        sides = sorted({tap.flipped for tap in layer.taps})
        self.sums = {side: _as_tensors(self.pending.sums.get(side), nothing) for side in sides}
        self.terms = torch.full_like(k.reshape(-1)[:1], float(self.pending.terms))

    @property
    def tensors(self) -> list[Tensor]:
        return [self.terms, *(t for sums in self.sums.values() for t in sums if isinstance(t, Tensor))]

    def put_back(self, replicas: int) -> None:
        """The sums of all replicas in the place of one's own."""
        terms = int(self.terms.item()) if self.terms.is_cpu else self.terms
        self.pending.replace(self.sums, terms, replicas)
        seen = any(torch.is_tensor(s.rows) and bool((s.rows > 0).any()) for s in self.sums.values())
        self.layer.pending = self.pending if seen else None


def _as_tensors(sums: Sums | None, nothing: Sums) -> Sums:
    if sums is None:
        return nothing
    rows = sums.rows if isinstance(sums.rows, Tensor) else torch.full_like(nothing.square_k, float(sums.rows))
    values = (sums.k, sums.c, sums.square_k, sums.square_c, rows)
    shapes = (nothing.k, nothing.c, nothing.square_k, nothing.square_c, nothing.square_k)
    return Sums(*(v.to(n.dtype).reshape(n.shape).clone() for v, n in zip(values, shapes, strict=True)))

"""Single numbers that a step depends on: Python's where they are at hand, tensors elsewhere.

On a CPU a number is read in less time than one operation of torch takes. On other devices, and in compiled
code, to look at it would mean to wait, so that it stays a tensor. What is written with these functions and
with operators serves both.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ingot.precision import computing

Number: TypeAlias = float | Tensor
Flag: TypeAlias = bool | Tensor


def number(value: Number) -> Number:
    """The value of a tensor of one entry, if it is at hand."""
    if isinstance(value, Tensor) and _at_hand(value):
        found: Any = value.tolist() if value.ndim == 0 else value.reshape(()).tolist()
        return found
    return value


def is_known(flags: Tensor) -> bool:
    """Whether all of several flags are up, where that can be seen without waiting for a device."""
    return _at_hand(flags) and all(flags.flatten().tolist())


def is_any(flags: Tensor) -> bool:
    """Whether any of several flags is up, where that can be seen without waiting for a device."""
    return _at_hand(flags) and any(flags.flatten().tolist())


def _at_hand(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def where(condition: Flag, this: Number, other: Number) -> Number:
    """One of two numbers."""
    if isinstance(condition, Tensor):
        return torch.where(condition, this, other)
    return this if condition else other


def no(flag: Flag) -> Flag:
    """Whether a flag is not up."""
    return ~flag if isinstance(flag, Tensor) else not flag


def is_finite(value: Number) -> Flag:
    """Whether a number is neither infinite nor undefined."""
    return value.isfinite() if isinstance(value, Tensor) else math.isfinite(value)


def least(value: Number, bound: float) -> Number:
    """The smaller of a number and a bound."""
    return value.clamp_max(bound) if isinstance(value, Tensor) else min(value, bound)


def greatest(value: Number, bound: float) -> Number:
    """The larger of a number and a bound."""
    return value.clamp_min(bound) if isinstance(value, Tensor) else max(value, bound)


def root_mean_square(tensors: list[Tensor]) -> Number:
    """The root mean square of all entries together."""
    return root_mean_squares([tensors])[0]


def root_mean_squares(sets: list[list[Tensor]]) -> list[Number]:
    """The root mean square of all entries of each of several sets of tensors on one device."""
    sums = torch.stack([_sum_of_squares(tensor) for tensors in sets for tensor in tensors])
    found: Any = iter(sums.tolist() if _at_hand(sums) else sums.unbind())
    means = [sum(next(found) for _ in ts) / sum([t.numel() for t in ts]) for ts in sets]
    return [mean.sqrt() if isinstance(mean, Tensor) else math.sqrt(mean) for mean in means]


def _sum_of_squares(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.float64):
        flat = tensor if tensor.is_contiguous() else tensor.mT if tensor.ndim > 1 else tensor
        if flat.is_contiguous():  # a dot product takes half the time of a norm
            flat = flat.view(-1)
            return torch.dot(flat, flat)
    return torch.linalg.vector_norm(tensor, dtype=computing(tensor.dtype)).square()

"""Single numbers that a step depends on: Python's where they are at hand, tensors elsewhere.

On a CPU a number is read in less time than one operation of torch takes. On other devices, and in compiled
code, to look at it would mean to wait, so that it stays a tensor. What is written with these functions and
with operators serves both.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ingot.precision import computing

Number: TypeAlias = float | Tensor
Flag: TypeAlias = bool | Tensor


def number(value: Number) -> Number:
    """The value of a tensor of one entry, if it is at hand; other tensors stay as they are."""
    if isinstance(value, Tensor) and value.numel() == 1 and is_at_hand(value):
        found: Any = value.tolist()  # faster than item
        while isinstance(found, list):
            found = found[0]
        return found
    return value


def flag(value: Tensor) -> Flag:
    """The same of a tensor of one flag."""
    found: Any = number(value)
    return found


def coefficient(value: Number, like: Tensor) -> Number:
    """A number as torch calculates with it beside such tensors: infinite if it is beyond their range."""
    if isinstance(value, Tensor) or not abs(value) > torch.finfo(like.dtype).max:
        return value
    return math.copysign(math.inf, value)


def is_known(flags: Flag) -> bool:
    """Whether all of several flags are up, where that can be seen without waiting for a device."""
    return is_at_hand(flags) and all(flags.flatten().tolist()) if isinstance(flags, Tensor) else flags


def is_any(flags: Flag) -> bool:
    """Whether any of several flags is up, where that can be seen without waiting for a device."""
    return is_at_hand(flags) and any(flags.flatten().tolist()) if isinstance(flags, Tensor) else flags


def is_at_hand(tensor: Tensor) -> bool:
    """Whether to look at a tensor's entries takes no time."""
    return tensor.is_cpu and not torch.compiler.is_compiling()


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


def smaller(one: Number, other: Number) -> Number:
    """The smaller of two numbers."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.minimum(one, other)
    if isinstance(one, Tensor):
        return one.clamp_max(other)
    return other.clamp_max(one) if isinstance(other, Tensor) else min(one, other)


def greatest(value: Number, bound: float) -> Number:
    """The larger of a number and a bound."""
    return value.clamp_min(bound) if isinstance(value, Tensor) else max(value, bound)


class Squares(NamedTuple):
    """The sum of some numbers' squares, and how many these are."""

    total: Number
    size: Number

    @property
    def root_mean(self) -> Number:
        """Their root mean square."""
        return (self.total / self.size) ** 0.5


def squares(tensors: list[Tensor]) -> Squares:
    """Those of all entries together."""
    total = sum([number(_sum_of_squares(t)) for t in _joined(tensors)])
    return Squares(total, sum([t.numel() for t in tensors]))


def root_mean_square(tensors: list[Tensor]) -> Number:
    """The root mean square of all entries together."""
    return squares(tensors).root_mean


def _joined(tensors: list[Tensor]) -> list[Tensor]:
    """What tensors are the parts of, where that is one: a weight and its bias in the same memory."""
    whole = tensors[0]._base if len(tensors) > 1 else None
    if whole is None or any(t._base is not whole for t in tensors):
        return tensors
    return [whole] if whole.numel() == sum([t.numel() for t in tensors]) else tensors


def _sum_of_squares(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.float64):
        flat = tensor if tensor.is_contiguous() else tensor.mT if tensor.ndim > 1 else tensor
        if flat.is_contiguous():  # a dot product takes half the time of a norm
            flat = flat.view(-1)
            return torch.dot(flat, flat)
    return torch.linalg.vector_norm(tensor, dtype=computing(tensor.dtype)).square()

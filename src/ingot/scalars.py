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
    total: Number = sum(map(_sum_of_squares, tensors))
    mean = total / sum(tensor.numel() for tensor in tensors)
    return mean.sqrt() if isinstance(mean, Tensor) else math.sqrt(mean)


def _sum_of_squares(tensor: Tensor) -> Number:
    if tensor.dtype == computing(tensor.dtype) and not tensor.is_complex():
        for flat in (tensor, tensor.mT) if tensor.ndim > 1 else (tensor,):
            if flat.is_contiguous():  # a dot product takes half the time of a norm
                return number(torch.dot(flat.view(-1), flat.view(-1)))
    norm = number(torch.linalg.vector_norm(tensor, dtype=computing(tensor.dtype)))
    return norm * norm

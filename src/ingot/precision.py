"""Which dtypes numbers are kept in and computed with, and how they are rounded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor


def computing(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products and norms are taken in: float32 for the shorter ones, then rounded."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def computable(tensor: Tensor) -> Tensor:
    """A tensor in the dtype that products are taken in."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def keeping(dtype: torch.dtype) -> torch.dtype:
    """The dtype that state of parameters is kept in: float16's range is too small for curvature."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


def put(target: Tensor, value: Tensor, generator: torch.Generator | None = None) -> None:
    """Round a float32 value into a tensor of a shorter dtype.

    With a generator, bfloat16 is rounded up or down at random so that the value is right in the mean:
    a change that is too small to be seen by one rounding is then not lost.
    """
    if generator is not None and target.dtype == torch.bfloat16:
        # bfloat16 is the upper half of float32: noise in the lower half carries over with the right chance.
        noise = torch.randint(
            1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator
        )
        rounded = (value.view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
        value = torch.where(value.isfinite(), rounded, value)
    target.copy_(value)


def autocast_is_on(device: str) -> bool:
    """Whether products on a kind of device are taken in other dtypes than those of their factors."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(devices: Iterable[torch.device]) -> AbstractContextManager[object]:
    """Products are taken in the dtypes of their factors here, even if the caller wants others."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    stack = ExitStack()
    for device in {device.type for device in devices}:
        if autocast_is_on(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack

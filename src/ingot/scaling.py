"""What a GradScaler multiplied the loss with."""

from __future__ import annotations

import sys

from torch import Tensor
from torch.amp import GradScaler

_STEP = GradScaler.step.__code__


def loss_scale() -> Tensor | None:
    """The scale of the GradScaler that is just calling an optimizer's step, if one is.

    A scaler unscales the gradients of parameters, but not those that statistics were taken from, and it tells
    its scale only to optimizers that unscale gradients themselves, and not after ``unscale_``. So we look for
    it among our callers, which works within every framework.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            scaler = frame.f_locals["self"]
            return scaler._get_scale_async() if scaler.is_enabled() else None
        frame = frame.f_back  # type: ignore[assignment]
    return None

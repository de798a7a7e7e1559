"""Learning rates over a training."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi

SCHEDULES = ("cosine", "step", "constant")


def scheduled(schedule: str, decay_every: int, steps_per_epoch: int, steps: int) -> Callable[[int], float]:
    """The learning rate after so many steps, as a share of the first."""
    if schedule == "cosine":
        return lambda step: 0.5 + 0.5 * cos(pi * min(step, steps) / max(1, steps))
    if schedule == "step":
        return lambda step: 0.1 ** (step // (decay_every * steps_per_epoch))
    if schedule == "constant":
        return lambda step: 1.0
    raise ValueError(f"there is no schedule {schedule!r}: choose {', '.join(SCHEDULES)}")

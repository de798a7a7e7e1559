"""What keeps long runs stable, and bad numbers out of them; the paper's step uses none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ingot import scalars
from ingot.scalars import Flag, Number, greatest, least, no, number, smaller, where

# --- The step of the factors ----------------------------------------------------------------------------


TINY = torch.finfo(torch.float32).tiny

WILD = 2.0
"""A step of a factor so many times its own size leaves nothing of it; such steps are told of."""


def bounded_rate(norm: Number, lr: float, max_step: float | None) -> Number:
    """β₁, lowered where β₁ |m|₂ would exceed ``max_step``, so that I - β₁ m stays well inside the group."""
    return lr if max_step is None else least(max_step / at_least_tiny(norm), lr)


def may_be_too_far(bound: float, lr: float, max_step: float | None) -> bool:
    """Whether a step by a direction of at most this norm may exceed the bound, or what is told of."""
    return lr * bound > (WILD if max_step is None else max_step)


def warmed_rate(lr: float, updates: int) -> float:
    """β₁ after so many updates: like a running mean in the beginning, then constant."""
    return max(lr, 1 / (updates + 2))


# --- The step of the weights ----------------------------------------------------------------------------


def noise_size(noise: Number, natural_rms: Number, momentum_rms: Number, rate: Number) -> Number:
    """The size that a momentum would have if the natural gradients in it had nothing to do with each other.

    Then their squares would add up. Where no gradient was counted so far, it is that of the momentum itself.
    """
    return where(noise > 0, ((rate * noise) ** 2 + natural_rms**2) ** 0.5, momentum_rms)


def agreement(momentum_rms: Number, noise: Number, rate: Number) -> Number:
    """How much longer a momentum is than gradients that had nothing to do with each other would make it.

    It is 1 for noise, below 1 where gradients go to and fro, and at its greatest where all are the same.
    """
    return smaller(momentum_rms / at_least_tiny(noise), greatest_agreement(rate))


def greatest_agreement(rate: Number) -> Number:
    """That of equal gradients: 1 / (1 - α₂) is the size of their momentum, 1 / (1 - α₂²)^½ that of noise."""
    return ((1 + rate) / (1 - rate)) ** 0.5


def may_bind(longest: Number, d_i: int, max_relative: float | None) -> bool:
    """Whether the bound on a step may be below the longest one, for weights of no matter what size."""
    if max_relative is None or isinstance(longest, Tensor):
        return max_relative is not None
    return longest > max_relative * (3 * d_i) ** -0.5


class Rates(NamedTuple):
    """What a parameter's step depends on in its group."""

    lr: Number
    peak_lr: Number  # the highest so far
    momentum: Number
    decay: Number  # of the parameter itself, by one step
    max_relative: float | None

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Rates:
        """The numbers that a group has now."""
        lr, decay = number(group["lr"]), group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
        bound = group["max_relative_step"] if group["normalize_step"] else None
        return cls(lr, number(group["peak_lr"]), number(group["momentum"]), lr * decay, bound)

    @property
    def longest(self) -> Number:
        """How much entries may change by at the highest learning rate so far, in root mean square."""
        return self.peak_lr * greatest_agreement(self.momentum)


def step_lengths(
    rates: Iterable[Rates],
    momentum_rms: Number,
    agreement: Number,
    d_i: int,
    weight_rms: Callable[[], Number],
) -> list[Number]:
    """Those of a layer's weight and bias; how large the weight is, is asked for if it matters."""
    lengths: list[Number] = []
    size, last = None, None
    for its in rates:
        if its is last:  # weight and bias are nearly always in one group
            lengths.append(lengths[-1])
            continue
        last = its
        bound = its.max_relative if may_bind(its.peak_lr * agreement, d_i, its.max_relative) else None
        if bound is not None and size is None:
            size = weight_rms()
        of_weight = 0.0 if size is None else size
        lengths.append(step_length(its.lr, its.peak_lr, momentum_rms, agreement, of_weight, d_i, bound))
    return lengths


def step_length(
    lr: Number,
    peak: Number,
    momentum_rms: Number,
    agreement: Number,
    weight_rms: Number,
    d_i: int,
    max_relative: float | None,
) -> Number:
    """What a layer's momentum is multiplied with so that its weights change by about ``lr``, as AdamW's do.

    The root mean square of the change is ``lr`` where gradients are mostly noise, as those of small batches
    are, and ``lr`` times their ``agreement`` in general: steps are longer while gradients point the same way,
    and become shorter when little but noise is left. At the peak of a schedule the change is at most
    ``max_relative`` of the weights themselves (or of PyTorch's initial weights, if these are larger), and
    below the peak it falls with the schedule: a bound that did not would hold the last steps at the length
    of the first.
    """
    if max_relative is not None:
        bound = max_relative * greatest(weight_rms, (3 * d_i) ** -0.5)
        agreement = smaller(agreement, bound / at_least_tiny(peak))
    return lr * agreement / at_least_tiny(momentum_rms)


def at_least_tiny(value: Number) -> Number:
    """A size to divide by."""
    return value.clamp_min(torch.finfo(value.dtype).tiny) if isinstance(value, Tensor) else max(value, TINY)


# --- What must not enter the factors or the weights -----------------------------------------------------

EXPLOSION = 1e6
"""A batch whose tr(U) or tr(G) is so many times its moving average says nothing of the curvature."""

OUTLIER = 300
"""A natural gradient so many times the momentum's usual size says nothing of where to go."""

NO_CURVATURE = 1e-30
"""Traces below this are round-off. The factors that fit them could not be squared in float32."""

SETTLED_UPDATES, SETTLED_STEPS = 3, 10
"""From so many on there is an average to compare with: branches that begin at zero grow fast at first."""

PATIENCE = 3
"""After so many refused updates in a row it is the factors that are wrong: they start anew."""

MIN_DAMPING = 1e-6
"""Relative damping is at least this, which bounds the condition of the factors even for λ = 0."""


def are_finite(*entries: Tensor) -> Tensor:
    """Whether all entries of these elements are finite, with squares that float32 can hold, ``[..., 1]``."""
    sizes = [e if e.shape[-1] == 1 else torch.linalg.vector_norm(e, dim=-1, keepdim=True) for e in entries]
    return torch.cat(sizes, dim=-1).float().square().sum(-1, keepdim=True).isfinite()


def has_exploded(average: Number, new: Number) -> Flag:
    """Whether a trace is beyond all that was seen, if anything was."""
    return (average > 0) & (new > EXPLOSION * average)


def is_usual(size: Number, usual: Number, steps: int) -> Flag:
    """Whether a natural gradient can be trusted: finite, and not far beyond the momentum's usual size."""
    is_outlier = (usual > 0) & (size > OUTLIER * usual) & (steps >= SETTLED_STEPS)
    return scalars.is_finite(size) & no(is_outlier)


def usual_size(usual: Number, size: Number, trusted: Flag) -> Number:
    """The moving average of sizes, which follows slowly where they fall: a layer may rest for a while.

    A size that is not trusted makes more usual, since the next may be like it. No gradient has no size.
    """
    risen = least(100 * usual, torch.finfo(torch.float32).max / 2 / OUTLIER)
    rate = where(size > usual, 0.1, 0.01)
    average = where(usual > 0, usual + rate * (size - usual), size)
    return where(trusted, where(size > 0, average, usual), risen)

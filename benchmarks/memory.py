"""Memory: every allocation of torch is seen, wherever an optimizer makes it, from the model's birth on.

So what is kept from step to step counts wherever it is kept, and peaks include what operations need for a
moment.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import record_function

from benchmarks.contenders import Maker
from benchmarks.measured import Memory
from benchmarks.workloads import Batch, training_loss
from ingot.lab.memory import Span, spans_of


def measure(
    model: Callable[[], nn.Module],
    batch: Callable[[], Batch],
    make: Maker,
    dtype: torch.dtype = torch.float32,
    splits: bool = True,
) -> Memory:
    """What an optimizer takes that updates its factors at every second step, beginning with the first.

    Where nobody can tell which steps are those (``splits`` is False), peaks are of both kinds together.
    """
    spans = training(model, batch, make, dtype)
    peak, update_peak = max(spans["plain"].totals), max(spans["update"].totals)
    if not splits:
        peak = update_peak = max(peak, update_peak)
    return Memory(kept_bytes(spans), peak, update_peak)


def training(
    model: Callable[[], nn.Module],
    batch: Callable[[], Batch],
    make: Maker,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Span]:
    """The making of a model and three iterations with an optimizer, of which the first makes its state."""

    def run() -> None:
        with record_function("model"):
            trained = model().to(dtype)
        optimizer = make(trained)
        for name in ("first", "plain", "update"):
            with record_function(name):
                inputs, labels = batch()
                inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
                training_loss(trained, (inputs, labels)).backward()
                optimizer.step()
                optimizer.zero_grad()
                del inputs, labels

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(singd|pytorch_optimizer|heavyball)\b")
        return spans_of(run, ("model", "plain", "update"))


def kept_bytes(spans: dict[str, Span]) -> int:
    """What is allocated at the end, the model left out."""
    return spans["update"].totals[-1] - spans["model"].totals[-1]

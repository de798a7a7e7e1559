"""The paper's Table 1 for any task: peak memory and time of training, relative to SGD."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ingot.lab.loading import training_batches
from ingot.lab.memory import state_bytes, training_peak
from ingot.lab.optimizers import Chosen, choose
from ingot.lab.task import Task

REFERENCE = "SGD"
COLUMNS = (
    "optimizer",
    "peak (MiB)",
    f"/ {REFERENCE}'s",
    "state (MiB)",
    "step (ms)",
    f"/ {REFERENCE}'s",
    "spread",
)


@dataclass
class Contestant:
    """An optimizer on a model of its own, and the seconds of its turns so far."""

    chosen: Chosen
    model: nn.Module
    optimizer: Optimizer
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """What one optimizer takes."""

    label: str
    peak_bytes: int
    state_bytes: int
    seconds: list[float]  # of one step, round by round


def measure(
    task: Task,
    chosen: Sequence[Chosen],
    batch_size: int,
    every: int,
    rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Let all take turns in one process, so that what slows the machine down slows all of them.

    Factors are updated after every so many steps; a round has that many.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if REFERENCE not in (one.label for one in chosen):
        chosen = [choose(REFERENCE), *chosen]
    settled = [_settled(one, every) for one in chosen]
    loading, _ = training_batches(task.train, batch_size, 0, 0, 1, 0)
    batch = tuple(part.to(device) if hasattr(part, "to") else part for part in next(iter(loading)))
    contestants = []
    for one in settled:
        progress(f"memory of {one.label}")
        torch.manual_seed(0)
        model = task.model().to(device)
        contestants.append(Contestant(one, model, one.make(model, task.training.common)))
    peaks = [training_peak(task, one, batch_size, device) for one in settled]
    for contestant in contestants:
        _turn(task, contestant, batch, max(2, every), device)  # allocations and plans are made by then
        contestant.seconds.clear()
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        random.Random(number).shuffle(contestants)
        for contestant in contestants:
            _turn(task, contestant, batch, every, device)
    order = {one.label: index for index, one in enumerate(chosen)}
    contestants.sort(key=lambda contestant: order[contestant.chosen.label])
    return [
        Row(c.chosen.label, peak, state_bytes(c.optimizer), c.seconds)
        for c, peak in zip(contestants, peaks, strict=True)
    ]


def _settled(chosen: Chosen, every: int) -> Chosen:
    """Ingot's optimizers past their first steps, in which factors are updated every time."""
    given: dict[str, Any] = {"precond_every": every, "precond_warmup": 0}
    return chosen.with_settings(given | dict(chosen.settings)) if chosen.kind.structured else chosen


def _turn(task: Task, contestant: Contestant, batch: Any, steps: int, device: torch.device) -> None:
    gc.collect()
    _wait(device)
    start = perf_counter()
    for _ in range(steps):
        contestant.optimizer.zero_grad()
        task.objective.loss(contestant.model, task.batch(batch, training=True)).backward()
        contestant.optimizer.step()
    _wait(device)
    contestant.seconds.append((perf_counter() - start) / steps)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """One row of text for each optimizer, under ``COLUMNS``; ratios are medians over rounds."""
    reference = next(row for row in rows if row.label == REFERENCE)
    found: list[tuple[str, ...]] = []
    for row in rows:
        ratios = [mine / its for mine, its in zip(row.seconds, reference.seconds, strict=True)]
        found.append(
            (
                row.label,
                _mebibytes(row.peak_bytes),
                f"{row.peak_bytes / reference.peak_bytes:.2f}",
                _mebibytes(row.state_bytes),
                f"{1e3 * median(row.seconds):.1f}",
                f"{median(ratios):.2f}",
                f"{min(ratios):.2f}–{max(ratios):.2f}",
            )
        )
    return found


def _mebibytes(count: int) -> str:
    size = count / 2**20
    return f"{size:.2f}" if size < 10 else f"{size:.1f}"

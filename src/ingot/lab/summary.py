"""What runs have to tell, as numbers: one row for each optimizer, seeds taken together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from ingot.lab.records import Run
from ingot.lab.tables import mean_and_spread

BASELINES = ("SGD", "AdamW")
"""What others are compared with; state and memory are told relative to AdamW, time to SGD."""


@dataclass(frozen=True)
class Group:
    """All seeds of one optimizer on one task.

    Where its settings come from several searches, equally many runs of each follow each other.
    """

    label: str
    runs: list[Run]
    searches: int = 1

    @property
    def finished(self) -> list[Run]:
        """Those that did not diverge."""
        return [run for run in self.runs if run.state != "diverged" and isfinite(run.records[-1].test_loss)]

    @property
    def lost(self) -> int:
        """How many diverged."""
        return len(self.runs) - len(self.finished)

    @property
    def lr(self) -> float:
        """The first learning rate."""
        return float(self.runs[0].settings["learning rate"])

    def last(self, name: str) -> list[float]:
        """A number of the last record of each run that did not diverge."""
        return [getattr(run.records[-1], name) for run in self.finished]

    @property
    def best_errors(self) -> list[float]:
        """The lowest error that each run passed through."""
        return [min(error for error in run.column("error") if isfinite(error)) for run in self.finished]

    @property
    def seconds_per_step(self) -> float:
        """Of training, without evaluation."""
        steps = sum(run.records[-1].step for run in self.runs)
        return sum(run.records[-1].seconds for run in self.runs) / max(1, steps)

    def mean_bytes(self, name: str) -> float:
        """The mean of ``state_bytes`` or ``peak_bytes``."""
        return fmean(getattr(run, name) for run in self.runs)


def by_task(runs: Sequence[Run]) -> dict[str, list[Group]]:
    """Runs by their task, and then by their optimizer. Those that have no evaluation yet are left out."""
    found: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        if run.records:
            found.setdefault(run.task, {}).setdefault(run.label, []).append(run)
    return {task: [Group(label, its) for label, its in groups.items()] for task, groups in found.items()}


SHORT = (0, 1, 2, 4, 5, 7)
"""The columns that a terminal has room for."""


def columns(groups: Sequence[Group]) -> tuple[str, ...]:
    """The head of ``rows``."""
    error = groups[0].runs[0].error_name
    time, memory = (_reference(groups, name) for name in BASELINES)
    lost = ("diverged",) if any(group.lost for group in groups) else ()
    return (
        "optimizer",
        "lr",
        error,
        "best",
        "test loss",
        "seconds",
        f"step{_relative(time)}",
        f"state{_relative(memory)}",
        f"peak{_relative(memory)}",
        *lost,
    )


def rows(groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """One row of text for each optimizer."""
    time, memory = (_reference(groups, name) for name in BASELINES)
    some_lost = any(group.lost for group in groups)
    found: list[tuple[str, ...]] = []
    for group in groups:
        ended = bool(group.finished)
        lost = f"{group.lost} of {len(group.runs)}" if group.lost else "–"
        found.append(
            (
                group.label,
                f"{group.lr:g}",
                mean_and_spread(group.last("error")) if ended else "–",
                mean_and_spread(group.best_errors) if ended else "–",
                mean_and_spread(group.last("test_loss"), 3) if ended else "–",
                f"{fmean(group.last('seconds')):.1f}" if ended else "–",
                _ratio(group.seconds_per_step, time.seconds_per_step if time else None, "ms", 1e3),
                *(
                    _ratio(group.mean_bytes(name), memory.mean_bytes(name) if memory else None, "MiB", 2**-20)
                    for name in ("state_bytes", "peak_bytes")
                ),
                *((lost,) if some_lost else ()),
            )
        )
    return found


def _reference(groups: Sequence[Group], name: str) -> Group | None:
    return next((group for group in groups if group.label.split()[0] == name), None)


def _relative(reference: Group | None) -> str:
    return f" / {reference.label}'s" if reference else ""


def _ratio(value: float, reference: float | None, unit: str, factor: float) -> str:
    if not value:
        return "–"
    return f"{value * factor:.1f} {unit}" if not reference else f"{value / reference:.2f}"

"""Which optimizer is ahead, on which task and by how much: numbers from the suite's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log, nan, sqrt
from statistics import fmean, stdev

from ingot.lab.summary import Group

REFERENCE = "AdamW"
"""What others are measured by."""

Board = Mapping[str, Sequence[Group]]
"""The groups of each task, the reference first."""


@dataclass(frozen=True)
class Standing:
    """An optimizer on a task, beside the reference.

    Attributes:
        loss: The mean of the last test losses; infinite if a run diverged.
        loss_error: The standard error of this mean: of runs, or of searches where settings come from several.
        error: The mean of the last errors, such as the share of wrong classes.
        error_error: Its standard error.
        steps: Steps to the reference's best loss, as a share of those that the reference takes to it.
        seconds: The same in time.
        step_seconds: The time of a step, as a share of the reference's.
        state: Bytes of state, as a share of the reference's.
        diverged: How many runs did.
    """

    loss: float
    loss_error: float
    error: float
    error_error: float
    steps: float
    seconds: float
    step_seconds: float
    state: float
    diverged: int


def standing(group: Group, reference: Group) -> Standing:
    """The numbers of one optimizer on one task."""
    steps, seconds = (share_to_best(group, reference, axis) for axis in ("step", "seconds"))
    losses, errors = (
        [getattr(run.records[-1], name) for run in group.runs] for name in ("test_loss", "error")
    )
    if group.lost:
        losses, errors = [inf], [inf]
    return Standing(
        fmean(losses),
        standard_error(_by_search(losses, group.searches)),
        fmean(errors),
        standard_error(_by_search(errors, group.searches)),
        steps,
        seconds,
        group.seconds_per_step / reference.seconds_per_step,
        group.mean_bytes("state_bytes") / max(1.0, reference.mean_bytes("state_bytes")),
        sum(run.has_diverged for run in group.runs),
    )


def standings(board: Board) -> dict[str, dict[str, Standing]]:
    """Those of all optimizers on all tasks."""
    return {
        task: {group.label: standing(group, groups[0]) for group in groups} for task, groups in board.items()
    }


def _by_search(values: Sequence[float], searches: int) -> Sequence[float]:
    """One value for each search, if there are several: runs with the same settings share its luck."""
    if searches == 1:
        return values
    each = len(values) // searches
    return [fmean(values[first : first + each]) for first in range(0, len(values), each)]


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; a single value has none."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else nan


def share_to_best(group: Group, reference: Group, axis: str) -> float:
    """How far it is to the reference's best loss, as a share of the reference's own way; inf if never.

    Curves are means over the seeds. Between two evaluations they are straight lines.
    """
    target = min(loss for loss in _mean_curve(reference, "test_loss") if isfinite(loss))
    return _reached(group, target, axis) / _reached(reference, target, axis)


def _mean_curve(group: Group, name: str) -> list[float]:
    columns = [run.column(name) for run in group.runs]
    return [fmean(values) for values in zip(*columns, strict=False)]


def _reached(group: Group, target: float, axis: str) -> float:
    """Where the mean loss first comes down to a target."""
    places, losses = _mean_curve(group, axis), _mean_curve(group, "test_loss")
    for index, (place, loss) in enumerate(zip(places, losses, strict=True)):
        if loss <= target:
            if index == 0:
                return place
            before, above = places[index - 1], losses[index - 1]
            return before + (place - before) * (above - target) / (above - loss)
    return inf


def geometric_mean(values: Sequence[float]) -> float:
    """Infinite if one of them is."""
    return inf if inf in values else exp(fmean(log(max(value, 1e-12)) for value in values))


@dataclass(frozen=True)
class Verdict:
    """An optimizer on all tasks, beside another.

    Attributes:
        ahead: Tasks with a lower mean loss.
        level: Tasks within one standard error of the difference, or ahead.
        ahead_in_error: Tasks with an error that is no higher.
        tasks: All of them.
        loss_ratio: The geometric mean of the losses' ratios.
        steps, seconds: Geometric means of the shares of steps and time to the reference's best loss.
        diverged: Runs.
    """

    ahead: list[str]
    level: list[str]
    ahead_in_error: list[str]
    tasks: list[str]
    loss_ratio: float
    steps: float
    seconds: float
    step_seconds: float
    diverged: int


def verdict(found: Mapping[str, Mapping[str, Standing]], label: str, other: str) -> Verdict:
    """How one optimizer stands beside another on all tasks that both have."""
    pairs = {t: (of[label], of[other]) for t, of in found.items() if label in of and other in of}
    return Verdict(
        [t for t, (a, b) in pairs.items() if a.loss < b.loss],
        [t for t, (a, b) in pairs.items() if a.loss <= b.loss + _spread(a.loss_error, b.loss_error)],
        [t for t, (a, b) in pairs.items() if a.error <= b.error],
        list(pairs),
        geometric_mean([a.loss / b.loss for a, b in pairs.values()]),
        geometric_mean([a.steps for a, _ in pairs.values()]),
        geometric_mean([a.seconds for a, _ in pairs.values()]),
        geometric_mean([a.step_seconds / b.step_seconds for a, b in pairs.values()]),
        sum(a.diverged for a, _ in pairs.values()),
    )


def _spread(a: float, b: float) -> float:
    """The standard error of a difference."""
    return sqrt(a * a + b * b) if isfinite(a) and isfinite(b) else 0.0


# --- Tables -----------------------------------------------------------------------------------------------

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, columns and rows."""


def tables(found: Mapping[str, Mapping[str, Standing]], name: str) -> list[Table]:
    """Losses and errors of all optimizers on all tasks, and how each stands beside the reference."""
    labels = list(dict.fromkeys(label for of in found.values() for label in of))
    columns = ("task", *labels)
    losses = [(task, *(_number(of.get(label), "loss", 3) for label in labels)) for task, of in found.items()]
    errors = [(task, *(_number(of.get(label), "error", 2) for label in labels)) for task, of in found.items()]
    reference = labels[0]
    beside = []
    for label in labels[1:]:
        v = verdict(found, label, reference)
        beside.append(
            (
                label,
                f"{len(v.ahead)} of {len(v.tasks)}",
                f"{len(v.level)} of {len(v.tasks)}",
                f"{len(v.ahead_in_error)} of {len(v.tasks)}",
                *(_share(x) for x in (v.loss_ratio, v.steps, v.seconds, v.step_seconds)),
                str(v.diverged),
            )
        )
    return [
        (f"Test loss, {name}", columns, losses),
        (f"Test error, {name}", columns, errors),
        (
            f"Beside {reference}, {name}",
            (
                "optimizer",
                "ahead in loss",
                "or level",
                "ahead in error",
                "loss",
                f"steps to {reference}'s best",
                "time to it",
                "time of a step",
                "diverged",
            ),
            beside,
        ),
    ]


def _number(standing: Standing | None, name: str, digits: int) -> str:
    if standing is None:
        return "–"
    value, spread = getattr(standing, name), getattr(standing, f"{name}_error")
    if not isfinite(value):
        return "diverged"
    return f"{value:.{digits}f}" + (f" ± {spread:.{digits}f}" if isfinite(spread) else "")


def _share(value: float) -> str:
    return "never" if value == inf else f"{value:.2f}"

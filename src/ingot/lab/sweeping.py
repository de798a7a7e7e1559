"""How much a setting matters: the suite's tasks with one value after another of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from matplotlib.figure import Figure
from rich.console import Console

from ingot.lab.evaluating import Evaluation, train_suite
from ingot.lab.optimizers import Chosen, choose, ingot_settings
from ingot.lab.plot import colour, tidy
from ingot.lab.scoreboard import geometric_mean
from ingot.lab.summary import Group

VALUES: Mapping[str, Sequence[float]] = {
    "lr": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "damping": (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    "precond_lr": (0.01, 0.03, 0.1, 0.3, 0.6),
    "precond_every": (1, 2, 5, 10, 20, 50, 100),
}
"""What is tried of a setting unless told otherwise."""


class Point(NamedTuple):
    """One value of a setting on one task."""

    setting: str
    optimizer: str
    value: float
    task: str
    loss: float  # as a share of the reference's; infinite if a run diverged
    error: float


def values_of(text: str) -> tuple[str, Sequence[float]]:
    """A setting and its values, from text such as ``lr`` or ``lr=1e-3,1e-2``."""
    name, _, given = text.partition("=")
    if given:
        try:
            return name, [int(word) if word.isdigit() else float(word) for word in given.split(",")]
        except ValueError:
            raise ValueError(
                f"{text!r}: values are numbers with commas between, as in {name}=0.1,0.3"
            ) from None
    if name not in VALUES:
        raise ValueError(
            f"say which values of {name}: --over {name}=0.1,0.3 (there are some of {', '.join(VALUES)})"
        )
    return name, VALUES[name]


def sweep(evaluation: Evaluation, settings: Mapping[str, Sequence[float]], console: Console) -> list[Point]:
    """Train with each value, all else as it comes. Optimizers that do not have a setting sit it out."""
    optimizers = evaluation.chosen
    tried = [
        (setting, chosen, value, choose(f"{text} {setting}={value:g}"))
        for setting, values in settings.items()
        for text, chosen in zip(evaluation.optimizers, optimizers, strict=True)
        if _has(chosen, setting)
        for value in values
    ]
    reference = optimizers[0]
    each = [reference, *(variant for *_, variant in tried)]
    distinct = list({variant.label: variant for variant in each}.values())
    found = train_suite(evaluation, "sweep", dict.fromkeys(evaluation.tasks, distinct), 0, console)
    points = []
    for task, groups in found.items():
        by_label = {group.label: group for group in groups}
        unit = _loss(by_label[reference.label])
        for setting, chosen, value, variant in tried:
            group = by_label[variant.label]
            points.append(Point(setting, chosen.label, value, task, _loss(group) / unit, _error(group)))
    return points


def _has(chosen: Chosen, setting: str) -> bool:
    return setting == "lr" or (chosen.kind.structured and setting in ingot_settings())


def _loss(group: Group) -> float:
    return inf if group.lost else sum(group.last("test_loss")) / len(group.runs)


def _error(group: Group) -> float:
    return inf if group.lost else sum(group.last("error")) / len(group.runs)


def plot_sweep(points: Sequence[Point], reference: str) -> Figure:
    """A panel for each setting: the loss of each task, thin, and their geometric mean, thick."""
    settings = list(dict.fromkeys(point.setting for point in points))
    columns = min(2, len(settings))
    rows = -(-len(settings) // columns)
    figure = Figure(figsize=(5.2 * columns, 0.7 + 3.1 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    optimizers = list(dict.fromkeys(point.optimizer for point in points))
    for axes, setting in zip(grid.flat, settings, strict=False):
        for optimizer in optimizers:
            mine = [p for p in points if p.setting == setting and p.optimizer == optimizer]
            if not mine:
                continue
            color = colour(optimizers.index(optimizer))
            values = sorted({p.value for p in mine})
            tasks = list(dict.fromkeys(p.task for p in mine))
            of = {(p.task, p.value): p.loss for p in mine}
            for task in tasks:
                axes.plot(values, [of[task, v] for v in values], color=color, linewidth=0.7, alpha=0.35)
            means = [geometric_mean([of[task, v] for task in tasks]) for v in values]
            axes.plot(values, means, "o-", color=color, linewidth=2, markersize=4, label=optimizer)
        axes.axhline(1, color="grey", linewidth=0.8, linestyle=":")
        axes.set_xscale("log")
        axes.set(xlabel=setting)
        tidy(axes)
    for axes in grid.flat[len(settings) :]:
        axes.set_visible(False)
    finite = [p.loss for p in points if p.loss < 3]
    grid[0, 0].set_ylim(0.9 * min(finite), min(2.0, 1.1 * max(finite)))
    for axes in grid[:, 0]:
        axes.set_ylabel(f"test loss / {reference}'s")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure

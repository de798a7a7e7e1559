"""Figures. They are drawn without pyplot, so no display is needed and no global state is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
from numpy.typing import ArrayLike, NDArray

from ingot.lab.summary import BASELINES, Group

# Okabe and Ito's colours, which colour-blind eyes can tell apart, and a few more.
COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#0072B2", "#808080", "#E69F00", "#56B4E9", "#882255", "#999933")


def colour(index: int) -> str:
    """That of the optimizer in this place."""
    return COLOURS[index % len(COLOURS)]


def is_baseline(label: str) -> bool:
    """Whether an optimizer is drawn as what others are compared with."""
    return label.split()[0] in BASELINES


class Curves:
    """One number of all runs of an optimizer, at the evaluations that all of them reached."""

    def __init__(self, group: Group, name: str) -> None:
        runs = group.finished or group.runs
        length = min(len(run.records) for run in runs)
        self.epochs = np.array(runs[0].column("epoch")[:length])
        self.seconds = np.mean([run.column("seconds")[:length] for run in runs], axis=0)
        self.values: NDArray[Any] = np.array([run.column(name)[:length] for run in runs], dtype=float)

    @property
    def mean(self) -> NDArray[Any]:
        """Over the seeds."""
        found: NDArray[Any] = self.values.mean(axis=0)
        return found


AXES = {"epochs": "epochs", "seconds": "seconds of training (evaluation not counted)"}
"""What curves are drawn against."""


def plot_curves(
    groups: Sequence[Group], name: str, y_title: str, title: str, against: Sequence[str] = tuple(AXES)
) -> Figure:
    """A number against epochs and seconds: the mean over seeds, in a band from lowest to highest."""
    figure = Figure(figsize=(10 if len(against) > 1 else 7.5, 4.8), layout="constrained")
    panels = dict(zip(against, figure.subplots(1, len(against), sharey=True, squeeze=False)[0], strict=True))
    lowest, highest = np.inf, 0.0
    for index, group in enumerate(groups):
        curves = Curves(group, name)
        style = "--" if is_baseline(group.label) else "-"
        for axes, x in ((panel, getattr(curves, axis)) for axis, panel in panels.items()):
            draw_band(
                axes, x, curves.mean, curves.values, style=style, color=colour(index), label=group.label
            )
            axes.plot(x[-1], curves.mean[-1], "o", color=colour(index), markersize=5, clip_on=False)
        finite = curves.values[np.isfinite(curves.values) & (curves.values > 0)]
        if finite.size:
            lowest, highest = min(lowest, finite.min()), max(highest, finite.max())
    first = panels[against[0]]
    first.set_ylabel(y_title)
    if np.isfinite(lowest):
        logarithmic(first, 0.85 * lowest, 1.05 * highest)
    for axis, axes in panels.items():
        axes.set_xlabel(AXES[axis])
        axes.set_xlim(left=0)
        tidy(axes)
    seeds = max(len(group.runs) for group in groups)
    note = f"mean over {seeds} seeds, band from lowest to highest" if seeds > 1 else "one seed"
    figure.suptitle(f"{title}\n({note})", fontsize=11)
    handles, labels = first.get_legend_handles_labels()
    columns = min(len(labels), 4 if len(against) > 1 else 3)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def plot_memory(groups: Sequence[Group], title: str) -> Figure:
    """Bars of what optimizers keep, and of the most that training takes."""
    measured = [group for group in groups if group.mean_bytes("peak_bytes")]
    figure = Figure(figsize=(10, 1.2 + 0.36 * len(groups)), layout="constrained")
    panels = figure.subplots(1, 2 if measured else 1, sharey=True, squeeze=False)[0]
    titles = {"state_bytes": "state of the optimizer", "peak_bytes": "peak of a training step"}
    for axes, (name, heading) in zip(panels, titles.items(), strict=False):
        values = [group.mean_bytes(name) / 2**20 for group in groups]
        places = np.arange(len(groups))
        axes.barh(places, values, color=[colour(index) for index in range(len(groups))], height=0.7)
        axes.bar_label(axes.containers[0], [f" {value:.3g}" for value in values], fontsize=8)
        axes.set_yticks(places, [group.label for group in groups])
        axes.set_xlim(0, 1.15 * max(values) or 1)
        axes.set(xlabel="MiB", title=heading)
        axes.title.set_fontsize(10)
        tidy(axes)
        axes.grid(visible=False, axis="y")
    panels[0].invert_yaxis()  # and with it the other, which shares the axis
    figure.suptitle(title, fontsize=11)
    return figure


def plot_layers(group: Group, title: str) -> Figure:
    """The diagnostics of each layer while the first seed was trained, a panel for each kind."""
    lines = group.runs[0].diagnostics
    layers, kinds = (
        list(dict.fromkeys(parts)) for parts in zip(*map(split_key, keys_of(lines)), strict=True)
    )
    rows = -(-len(kinds) // 3)
    figure = Figure(figsize=(10, 0.6 + 2.4 * rows), layout="constrained")
    grid = figure.subplots(rows, 3, squeeze=False)
    for axes, kind in zip(grid.flat, kinds, strict=False):
        for index, layer in enumerate(layers):
            values = [line.get(f"{layer}/{kind}") for line in lines]
            axes.plot(
                [line["step"] for line in lines],
                [np.nan if value is None else value for value in values],
                color=colour(index),
                linewidth=1.2,
                label=layer or "the model",
            )
        axes.set_title(kind, fontsize=10)
        tidy(axes)
    for axes in grid.flat[len(kinds) :]:
        axes.set_visible(False)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    if len(labels) <= 12:  # more would take the place of the figure
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(f"{title}: layers of {group.label}, against steps", fontsize=11)
    return figure


def keys_of(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The diagnostics that there are, as layer and kind."""
    return [key for key in lines[-1] if key != "step"]


def split_key(key: str) -> tuple[str, str]:
    """The layer and the kind of a diagnostic."""
    layer, _, kind = key.rpartition("/")
    return layer, kind


def plot_importances(importances: Mapping[str, float], title: str) -> Figure:
    """How much each setting of a search mattered."""
    figure = Figure(figsize=(7, 0.9 + 0.36 * len(importances)), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(importances), list(importances.values()), color="#009E73", height=0.7)
    axes.invert_yaxis()
    axes.set(xlabel="share of the differences")
    axes.set_title(title, fontsize=10)
    tidy(axes)
    return figure


def save(figure: Figure, stem: Path) -> None:
    """Write a figure as PNG and as SVG."""
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})


def draw_band(
    axes: Axes, x: ArrayLike, middle: ArrayLike, seeds: NDArray[Any], *, style: str, color: str, label: str
) -> None:
    """A line in a band from the lowest to the highest of the rows, one for each seed."""
    axes.plot(x, middle, style, color=color, linewidth=1.8, label=label)
    axes.fill_between(x, seeds.min(axis=0), seeds.max(axis=0), color=color, alpha=0.13, linewidth=0)


def logarithmic(axes: Axes, lowest: float, highest: float) -> None:
    """A logarithmic y axis with plain numbers."""
    axes.set_yscale("log")
    axes.set_ylim(lowest, highest)
    axes.yaxis.set_major_locator(FixedLocator(plain_ticks(lowest, highest)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def plain_ticks(lowest: float, highest: float) -> list[float]:
    """Round numbers for a logarithmic axis, as many as there is room for."""
    factors = (1, 2, 5) if highest > 8 * lowest else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    ticks = [factor * 10.0**decade for decade in range(-9, 10) for factor in factors]
    return [tick for tick in ticks if lowest <= tick <= highest]


def tidy(axes: Axes) -> None:
    """A faint grid, and no frame where there is no scale."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)

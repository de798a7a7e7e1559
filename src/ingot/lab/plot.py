"""Figures. They are drawn without pyplot, so no display is needed and no global state is touched."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
from numpy.typing import ArrayLike, NDArray

from ingot.lab.train import Run

# Okabe and Ito's colours, which colour-blind eyes can tell apart.
COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#0072B2", "#4D4D4D", "#E69F00", "#56B4E9")


def plot_error(runs: Sequence[Run], title: str, dashed: Collection[str] = ()) -> Figure:
    """Test error against steps and against seconds: the mean over seeds, in a band from lowest to highest.

    Args:
        runs: Runs that were evaluated at the same steps.
        title: What was trained on what.
        dashed: Optimizers to draw with dashed lines, to tell the baselines at a glance.
    """
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    by_step, by_second = figure.subplots(1, 2, sharey=True)
    for index, name in enumerate(dict.fromkeys(run.optimizer for run in runs)):
        mine = [run for run in runs if run.optimizer == name]
        errors = np.array([run.test_error_percent for run in mine])
        colour, style = COLOURS[index % len(COLOURS)], "--" if name in dashed else "-"
        for axes, x in (
            (by_step, mine[0].steps),
            (by_second, np.mean([run.seconds for run in mine], axis=0)),
        ):
            mean = errors.mean(axis=0)
            draw_band(axes, x, mean, errors, style=style, color=colour, label=name)
            axes.plot(x[-1], mean[-1], "o", color=colour, markersize=5, clip_on=False)
    lowest = min(min(run.test_error_percent) for run in runs) or 0.5  # a logarithmic axis has no zero
    logarithmic(by_step, 0.8 * lowest, 100)
    by_step.set(xlabel="steps", ylabel="test error (%)")
    by_second.set(xlabel="seconds of training (evaluation not counted)")
    for axes in (by_step, by_second):
        axes.set_xlim(left=0)
        tidy(axes)
    seeds = len({run.seed for run in runs})
    note = f"mean over {seeds} seeds, band from lowest to highest" if seeds > 1 else "one seed"
    figure.suptitle(f"{title}: test error while training\n({note})", fontsize=11)
    handles, labels = by_step.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
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
    decades = (0.01, 0.1, 1, 10, 100)
    ticks = [factor * decade for decade in decades for factor in (1, 2, 5)]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if lowest <= tick <= highest]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def tidy(axes: Axes) -> None:
    """A faint grid, and no frame where there is no scale."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)

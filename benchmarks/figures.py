"""Log-log plots of how time and memory grow with the dimension."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from benchmarks.complexity import KINDS, exponent
from benchmarks.measured import Scaling
from ingot.lab.plot import COLOURS, tidy

MARKERS = "osD^vP"
TITLES = {
    "gradient": "step of a d x d layer, factors applied",
    "statistics": "statistics of a batch",
    "factors": "update of both factors",
}


def plot_times(scaling: Scaling) -> Figure:
    """One picture for each kind of work, with the fitted exponent of each structure."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    *panels, empty = figure.subplots(2, 2).flat
    empty.set_axis_off()
    for axes, kind in zip(panels, KINDS, strict=True):
        values = {name: [1e3 * s for s in points] for name, points in scaling.seconds[kind].items()}
        _draw(axes, scaling.dims, values)
        axes.set_title(TITLES[kind], fontsize=10)
        axes.set(xlabel="d", ylabel="milliseconds")
    figure.suptitle("Time against the dimension, with fitted exponents", fontsize=11)
    return figure


def plot_memory(scaling: Scaling) -> Figure:
    """The largest allocation and the state of a layer with d inputs, beside a d x d matrix."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    titles = {"largest_bytes": "largest allocation in a training step", "state_bytes": "optimizer's state"}
    for axes, (name, title) in zip((left, right), titles.items(), strict=True):
        values = {key: [b / 2**20 for b in points] for key, points in getattr(scaling, name).items()}
        _draw(axes, scaling.dims, values)
        matrix = [4 * d * d / 2**20 for d in scaling.dims]
        axes.plot(scaling.dims, matrix, ":", color="black", linewidth=1, label="d x d matrix", zorder=1)
        axes.legend(fontsize=8, frameon=False)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("d")
    left.set_ylabel("MiB")
    figure.suptitle("Memory against the dimension, with fitted exponents", fontsize=11)
    return figure


def _draw(axes: Axes, dims: list[int], values: dict[str, list[float]]) -> None:
    for index, (name, points) in enumerate(values.items()):
        label = f"{name}: {exponent(dims, points):.2f}"
        style = f"{MARKERS[index % len(MARKERS)]}-"
        axes.plot(dims, points, style, color=COLOURS[index], markersize=4, linewidth=1.4, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(dims))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    tidy(axes)
    axes.legend(fontsize=8, frameon=False)

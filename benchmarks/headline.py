"""The README's figure: losses on the suite's tasks beside AdamW's, in colours for any background."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import hypot, isfinite

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from benchmarks.stored import Boards
from ingot.lab.scoreboard import REFERENCE, Standing, geometric_mean

NAMES = {
    "digits": "CNN, digits",
    "fashion_cnn": "CNN, Fashion-MNIST",
    "cifar_cnn": "CNN, CIFAR-10",
    "woof_cnn": "CNN, ImageWoof",
    "fashion_vit": "ViT, Fashion-MNIST",
    "wide_vit": "wide ViT, Fashion-MNIST",
    "cifar_vit": "ViT, CIFAR-10",
    "shakespeare_gpt": "GPT, Shakespeare",
    "python_gpt": "GPT, Python code",
    "autoencoder": "autoencoder, digits",
    "diamonds": "MLP, diamond prices",
    "cora": "graph network, Cora",
}
"""What readers know the suite's tasks as, in the order in which they are shown; others follow."""

TITLES = {"defaults": "default settings", "tuned": "each tuned"}
MAIN = "SINGD"
INK, AHEAD, BEHIND = "#7d8590", "#1f9e77", "#e07b39"
LIMITS = (0.2, 1.75)
"""Of the axis: what is beyond stands at its edge."""


def tasks_in_order(board: Mapping[str, Mapping[str, Standing]]) -> list[str]:
    """The tasks of a board that have what is shown, in the order in which they are."""
    return _in_order({task for task, of in board.items() if {MAIN, REFERENCE} <= of.keys()})


def _in_order(tasks: Iterable[str]) -> list[str]:
    return sorted(tasks, key=lambda task: ([*NAMES, task].index(task), task))


def relative(of: Mapping[str, Standing], label: str) -> tuple[float, float]:
    """A loss in units of the reference's, and the standard error of that."""
    one, other = of[label], of[REFERENCE]
    share = one.loss / other.loss
    return share, share * hypot(one.loss_error / one.loss, other.loss_error / other.loss)


def percent(share: float) -> str:
    """By how much a share is less or more than one."""
    return f"{share - 1:+.0%}".replace("-", "−")


def plot(boards: Boards) -> Figure:
    """A panel for each phase, a line for each task."""
    boards = {phase: board for phase, board in boards.items() if phase in TITLES and tasks_in_order(board)}
    height = 1.3 + 0.3 * max(len(board) for board in boards.values())
    figure = Figure(figsize=(4.7 * len(boards), height), layout="constrained")
    figure.patch.set_alpha(0)
    panels = figure.subplots(1, len(boards), squeeze=False, sharey=len(boards) > 1)[0]
    tasks = _in_order({task for board in boards.values() for task in tasks_in_order(board)})
    for axes, (phase, board) in zip(panels, boards.items(), strict=True):
        _draw(axes, board, tasks)
        title = f"{MAIN} beside {REFERENCE}, {TITLES.get(phase, phase)}"
        axes.set_title(title, fontsize=11, color=INK, loc="left", fontweight="bold")
    figure.supxlabel(f"test loss relative to {REFERENCE}'s, with its standard error", fontsize=10, color=INK)
    return figure


def _draw(axes: Axes, board: Mapping[str, Mapping[str, Standing]], tasks: list[str]) -> None:
    here = tasks_in_order(board)
    for place, task in ((tasks.index(task), task) for task in here):
        _draw_main(axes, place, *relative(board[task], MAIN))
    mean = geometric_mean([relative(board[task], MAIN)[0] for task in here])
    axes.axhline(len(tasks) - 0.5, color=INK, linewidth=0.6, alpha=0.5)
    _draw_main(axes, len(tasks), mean, 0.0)
    axes.axvline(1, color=INK, linewidth=1, zorder=1)
    axes.set_yticks(range(len(tasks) + 1), [*(NAMES.get(t, t) for t in tasks), "geometric mean"], fontsize=9)
    axes.set_ylim(len(tasks) + 0.6, -0.6)
    axes.set_xlim(*LIMITS)
    axes.xaxis.set_major_locator(MultipleLocator(0.25))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: REFERENCE if x == 1 else percent(x)))
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.patch.set_alpha(0)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color=INK, alpha=0.2, linewidth=0.6)


def _draw_main(axes: Axes, place: int, share: float, spread: float) -> None:
    """A line from the reference to where the optimizer is, and how sure that is."""
    low, high = LIMITS
    colour, shown = AHEAD if share < 1 else BEHIND, min(max(share, low), high)
    axes.plot([1, shown], [place, place], color=colour, linewidth=4, alpha=0.35, solid_capstyle="butt")
    spread = spread if isfinite(spread) else 0.0  # of a single seed
    axes.errorbar(shown, place, xerr=spread, fmt="o", color=colour, markersize=6.5, elinewidth=1.6, zorder=3)
    side, offset = ("right", -1) if share < 1 else ("left", 1)
    text = percent(share) if isfinite(share) else "diverged"
    beside = shown + offset * (0.035 + min(spread, 0.2))
    axes.text(beside, place, text, ha=side, va="center", fontsize=8.5, color=colour, fontweight="bold")

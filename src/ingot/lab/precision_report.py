"""What the study of precision has to tell: a table, a figure, a report, records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ingot.lab.plot import draw_band, logarithmic, tidy
from ingot.lab.precision import (
    DAMPINGS,
    FAMILY,
    HELD_OUT,
    LRS,
    PRECISIONS,
    PRECOND_LRS,
    SHOWN_DAMPING,
    TUNING_SEEDS,
    Result,
)
from ingot.lab.records import Run, in_json
from ingot.lab.tables import markdown_table, mean_and_spread

# --- Table and text ---------------------------------------------------------------------------------------

COLUMNS = ("optimizer", "settings", *PRECISIONS, "change", "in spreads", "indefinite")
SETTINGS_COLUMNS = ("optimizer", "settings", "lr", "precond_lr")


def diverged(run: Run) -> bool:
    """Whether a run ended above the loss that it began with, or with none at all."""
    return not run.records[-1].test_loss <= run.records[0].test_loss


def table_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row of text for each setting, under ``COLUMNS``."""
    rows = []
    for result in results:
        losses, positive = map(_loss_text, result.runs.values()), result.positive["bfloat16"]
        indefinite = f"{1 - fmean(positive):.1%}" if positive else "–"
        rows.append(
            (result.setting.optimizer, str(result.setting), *losses, *_changes(**result.runs), indefinite)
        )
    return rows


def settings_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row of text for each setting, under ``SETTINGS_COLUMNS``."""
    rows: list[tuple[str, ...]] = []
    for setting in (result.setting for result in results):
        precond_lr = f"{setting.precond_lr:g}" if setting.precond_lr else "default"
        rows.append((setting.optimizer, str(setting), f"{setting.lr:g}", precond_lr))
    return rows


def _loss_text(runs: Sequence[Run]) -> str:
    losses = [run.records[-1].test_loss for run in runs if not diverged(run)]
    lost = len(runs) - len(losses)
    if not losses:
        return f"diverged, {lost} of {lost}"
    return mean_and_spread(losses, 3) + (f", diverged {lost} of {len(runs)}" if lost else "")


def _changes(float32: Sequence[Run], bfloat16: Sequence[Run]) -> tuple[str, str]:
    """How much higher the loss is in bfloat16: relative, and in standard deviations of float32's seeds."""
    if any(map(diverged, (*float32, *bfloat16))):
        return "diverged", "–"
    before, after = ([run.records[-1].test_loss for run in runs] for runs in (float32, bfloat16))
    change = fmean(after) - fmean(before)
    spread = stdev(before) if len(before) > 1 else 0.0
    return f"{change / fmean(before):+.1%}", f"{change / spread:+.1f}" if spread else "–"


def records(results: Sequence[Result]) -> list[dict[str, Any]]:
    """All results for JSON."""
    return [
        {
            **asdict(result.setting),
            "precision": precision,
            "inverses_seen": len(result.positive[precision]),
            "inverses_not_positive": result.positive[precision].count(False),
            "runs": [in_json(asdict(run)) | {"diverged": diverged(run)} for run in runs],
        }
        for result in results
        for precision, runs in result.runs.items()
    ]


def settings(results: Sequence[Result]) -> dict[str, object]:
    """Everything that a reader needs to know to run this again."""
    run = results[0].runs["float32"][0]
    told = ("parameters", "training examples", "test examples", "epochs", "steps", "batch size", "schedule")
    seeds = {"task": run.task, "seeds": len(results[0].runs["float32"])}
    return seeds | {key: run.settings[key] for key in (*told, "threads", "torch", "ingot")}


def write(out: Path, results: Sequence[Result], settings: Mapping[str, object], searched_now: bool) -> None:
    """The report and the records as files."""
    content = {"settings": settings, "results": records(results)}
    text = json.dumps(in_json(content), indent=1, allow_nan=False)
    (out / "records.json").write_text(text + "\n", encoding="utf-8")
    (out / "report.md").write_text(markdown_report(results, settings, searched_now), encoding="utf-8")


def markdown_report(results: Sequence[Result], settings: Mapping[str, object], searched_now: bool) -> str:
    """The report: results, figure, how to read them, settings."""
    when = "in this run" if searched_now else "before, with runs of 200 steps (`--tune` does it again)"
    return f"""\
# {settings["task"]}: bfloat16 against float32

{markdown_table(COLUMNS, table_rows(results))}

![Test loss in float32 and in bfloat16](precision.png)

Everything is in the precision that is named: images, weights, gradients, momenta and factors. Nothing else
differs: for each seed the weights start from the same values, up to rounding, and see the same batches. ingot
computes products of factors and KFAC's inverses in float32 and rounds them.

- Test losses are those after the last step, means over the seeds (± standard deviation). A run has diverged
  if it ended above the loss that it began with, or with none at all; means leave it out.
- The change is that of the mean loss from float32 to bfloat16, relative to float32's, and in spreads:
  standard deviations of float32's runs over the seeds.
- Indefinite are, of the inverses that KFAC kept in bfloat16, looked at in every layer at each tenth step,
  those with an eigenvalue of 0 or less, which turns a part of the gradient around. The other optimizers keep
  no inverses; K Kᵀ and C Cᵀ cannot become indefinite.
- "paper" is the paper's step with damping λ: `PAPER`, with dense factors that are updated at each step
  (updated seldom, they would still be mostly the identity that they start from, which damps as well).
  "defaults" are the default settings of `SINGD`, `IKFAC`, `KFAC` and torch's AdamW.
- In the figure, lines are medians over seeds, bands go from the lowest to the highest seed.

## Learning rates

{markdown_table(SETTINGS_COLUMNS, settings_rows(results))}

The best for float32 of {len(LRS)} values of `lr` and, in the paper's step, {len(PRECOND_LRS)} of
`precond_lr`, for each optimizer at each damping: by the loss on {HELD_OUT} held-out training examples, on
average over {len(TUNING_SEEDS)} seeds that are not among the study's. The search was made {when}.
Only then was the precision changed.

## Settings

{markdown_table(("setting", "value"), list(settings.items()))}
"""


# --- Figure -----------------------------------------------------------------------------------------------

STYLES = {"float32": ("-", "#4D4D4D"), "bfloat16": ("--", "#D55E00")}
TOP = 5.0
"""Of the axis of losses: guessing has 2.3, and what is above has diverged."""


def plot(results: Sequence[Result], title: str) -> Figure:
    """Test losses: a column for each optimizer of the family, a row for each thing to see."""
    figure = Figure(figsize=(10, 9), layout="constrained")
    of_setting = {(result.setting.optimizer, result.setting.damping): result for result in results}
    losses = [run.records[-1].test_loss for r in results for runs in r.runs.values() for run in runs]
    lowest = 0.8 * min(filter(isfinite, losses), default=1)
    axes: Any = figure.subplots(3, len(FAMILY), sharey=True)  # a type that depends on the numbers
    for name, (shown, ends, defaults) in zip(FAMILY, axes.T, strict=True):
        _draw_curves(shown, of_setting[name, SHOWN_DAMPING])
        _draw_ends(ends, [of_setting[name, damping] for damping in DAMPINGS])
        _draw_curves(defaults, of_setting[name, None])
        for row in (shown, ends, defaults):
            tidy(row)
            logarithmic(row, lowest, TOP)
        shown.set_title(f"{name}\nthe paper's step, damping {SHOWN_DAMPING:g}", fontsize=10, pad=8)
        ends.set_title("the paper's step, after the last step", fontsize=10, pad=8)
        defaults.set_title("default settings", fontsize=10, pad=8)
    for row in axes[:, 0]:
        row.set_ylabel("test loss")
    seeds = len(results[0].runs["float32"])
    note = f"median over {seeds} seeds, band from lowest to highest" if seeds > 1 else "one seed"
    figure.suptitle(f"{title}: bfloat16 against float32\n({note}; × where runs diverged)", fontsize=11)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _draw_curves(axes: Axes, result: Result) -> None:
    """The whole runs of a setting."""
    for precision, runs in result.runs.items():
        style, colour = STYLES[precision]
        steps = max((run.column("step") for run in runs), key=len)
        losses = _bounded([_to_the_end(run.column("test_loss"), len(steps)) for run in runs])
        draw_band(axes, steps, np.median(losses, axis=0), losses, style=style, color=colour, label=precision)
        axes.plot(steps, losses.T, color=colour, linewidth=0.6, alpha=0.5)
        _mark_diverged(axes, steps[-1], runs, colour)
    axes.set_xlim(0, steps[-1])
    axes.set_xlabel("steps")


def _draw_ends(axes: Axes, results: Sequence[Result]) -> None:
    """The ends of the runs of several dampings: a dot for each, and a line through the medians."""
    for (precision, (style, colour)), beside in zip(STYLES.items(), (0.9, 1.1), strict=True):
        x = beside * np.array(DAMPINGS)
        losses = _bounded(
            [[run.records[-1].test_loss for run in result.runs[precision]] for result in results]
        )
        axes.plot(x, np.median(losses, axis=1), style, color=colour, linewidth=1.8)
        axes.plot(x, losses, "o", color=colour, markersize=4, alpha=0.5, markeredgewidth=0)
        for place, result in zip(x, results, strict=True):
            _mark_diverged(axes, place, result.runs[precision], colour)
    axes.set_xscale("log")
    axes.set_xlim(DAMPINGS[0] / 2, DAMPINGS[-1] * 2)
    axes.set_xlabel("damping")


def _to_the_end(losses: list[float], length: int) -> list[float]:
    """The losses of a run, which has none after it diverged."""
    return losses + [np.nan] * (length - len(losses))


def _bounded(losses: Sequence[Sequence[float]]) -> NDArray[Any]:
    """Losses as far as the axis reaches and a little further; those that are no numbers are beyond it."""
    return np.nan_to_num(np.array(losses), nan=np.inf).clip(max=2 * TOP)


def _mark_diverged(axes: Axes, x: float, runs: Sequence[Run], colour: str) -> None:
    """A cross at the upper edge where runs diverged, and how many."""
    lost = sum(map(diverged, runs))
    if not lost:
        return
    axes.plot(x, TOP, "x", color=colour, markersize=8, markeredgewidth=2, clip_on=False)
    is_left = x < sum(axes.get_xlim()) / 2
    side, offset = ("left", 8) if is_left else ("right", -8)
    text = f"{lost} of {len(runs)}"
    axes.annotate(text, (x, TOP), (offset, -9), textcoords="offset points", ha=side, fontsize=8)

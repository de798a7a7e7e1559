"""The commands of ``python -m ingot.lab``, and the tables that they print and write."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from ingot import __version__
from ingot.lab.digits import digits
from ingot.lab.plot import plot_error, save
from ingot.lab.train import OPTIMIZERS, Run, Schedule, Task, train

app = typer.Typer(
    help="The laboratory of ingot: train, compare and plot optimizers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

BASELINES = ("AdamW", "SGD")
"""What the natural-gradient optimizers are compared with; state is counted relative to the first."""

COLUMNS = ("optimizer", "lr", "test error (%)", "test loss", "seconds / run", f"state / {BASELINES[0]}'s")


@app.callback()
def main() -> None:
    """Keep ``demo`` a command of its own: with a single command and no callback, typer drops its name."""


def _positive(value: int) -> int:
    if value < 1:
        raise typer.BadParameter(f"{value} is too few: give 1 or more, or leave the option out.")
    return value


def _threads(value: int) -> int:
    cores = os.cpu_count() or 1
    if value > cores:
        raise typer.BadParameter(f"{value} is more than this machine's cores: give {cores} or fewer.")
    return _positive(value)


def _make_directory(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot make the directory {out} ({error.strerror}): name another one.", param_hint="--out"
        ) from error


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Directory for the report, the figure and the records; made if missing.")
    ] = Path("runs/demo"),
    steps: Annotated[
        int,
        typer.Option(callback=_positive, help=f"Steps of every run, {Schedule.batch_size} examples each."),
    ] = 300,
    seeds: Annotated[
        int, typer.Option(callback=_positive, help="Runs of every optimizer, from seeds 0, 1, 2, ...")
    ] = 3,
    threads: Annotated[
        int, typer.Option(callback=_threads, help="Threads of torch; on small tensors, more can be slower.")
    ] = 1,
) -> None:
    """Train a small network on handwritten digits with several optimizers and compare them, in a minute."""
    _make_directory(out)  # before anything is trained, so that a bad path costs nothing
    torch.set_num_threads(threads)
    console = Console()
    task, schedule = digits(), Schedule(steps)
    runs = train_all(task, schedule, range(seeds), console)
    rows, settings = table_rows(runs), describe(task, schedule, seeds)
    save(plot_error(runs, task.title, dashed=BASELINES), out / "demo")
    records = {"settings": settings, "runs": [asdict(run) for run in runs]}
    (out / "records.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    report = out / "report.md"
    report.write_text(markdown_report(rows, settings), encoding="utf-8")
    console.print(rich_table(rows, title=f"{task.title}: after {steps} steps"))
    typer.echo(report)  # not through rich, which would break a long path


# --- Training, with progress ----------------------------------------------------------------------------


def train_all(task: Task, schedule: Schedule, seeds: Sequence[int], console: Console) -> list[Run]:
    """Train with every registered optimizer from every seed; a bar for each optimizer, in a file a line each.

    All optimizers take a turn before the next seed's, so that a machine that slows down slows them all.
    """
    columns = (
        TextColumn("{task.description:<6}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[error]}"),
        TextColumn("{task.fields[left]}"),
    )
    runs: list[Run] = []
    with Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=5) as bars:
        total = schedule.steps * len(seeds)
        ids = {name: bars.add_task(name, total=total, error="waiting", left="") for name in OPTIMIZERS}
        for seed in seeds:
            for name, bar in ids.items():
                run = train(task, name, seed, schedule, partial(_advance, bars, bar))
                runs.append(run)
                if not console.is_terminal:
                    error, seconds = run.test_error_percent[-1], run.seconds[-1]
                    console.print(f"seed {seed}  {name:<6} test error {error:5.2f} %  {seconds:5.1f} s")
    return runs


def _advance(bars: Progress, bar: TaskID, run: Run) -> None:
    """One step further; the time left is this optimizer's own, as the others train in between."""
    bars.update(bar, advance=1, error=f"test error {run.test_error_percent[-1]:5.2f} %")
    if run.steps[-1]:
        steps = bars.tasks[bar].remaining or 0
        bars.update(bar, left=f"{steps * run.seconds[-1] / run.steps[-1]:3.0f} s left")


# --- Report ---------------------------------------------------------------------------------------------


def mean_and_spread(values: Sequence[float]) -> str:
    """``mean ± standard deviation``; a single value has no deviation."""
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def table_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """One row of text for each optimizer, under ``COLUMNS``."""
    baseline = fmean(run.state_bytes for run in runs if run.optimizer == BASELINES[0])
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(run.optimizer for run in runs):
        mine = [run for run in runs if run.optimizer == name]
        rows.append(
            (
                name,
                f"{mine[0].lr:g}",
                mean_and_spread([run.test_error_percent[-1] for run in mine]),
                f"{fmean(run.test_loss[-1] for run in mine):.3f}",
                f"{fmean(run.seconds[-1] for run in mine):.2f}",
                f"{fmean(run.state_bytes for run in mine) / baseline:.2f}",
            )
        )
    return rows


def describe(task: Task, schedule: Schedule, seeds: int) -> dict[str, str | int]:
    """Everything that a reader needs to know to run this again."""
    return {
        "task": task.title,
        "training examples": len(task.train_y),
        "test examples": len(task.test_y),
        "parameters": sum(p.numel() for p in task.model().parameters()),
        "steps": schedule.steps,
        "batch size": schedule.batch_size,
        "evaluated every": f"{schedule.eval_every} steps",
        "seeds": seeds,
        "learning rate": "cosine, from the value in the table to 0",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ingot": __version__,
    }


def rich_table(rows: Sequence[tuple[str, ...]], title: str) -> Table:
    """The table for the terminal."""
    table = Table(title=title)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (columns, rule, *rows))


def markdown_report(rows: Sequence[tuple[str, ...]], settings: dict[str, str | int]) -> str:
    """The report: results, figure, settings."""
    return f"""\
# {settings["task"]}: optimizers compared

{markdown_table(COLUMNS, rows)}

Test error and test loss are those after the last step, means over the seeds (± standard deviation). For every
seed, all optimizers start from the same weights and see the same batches. The learning rates (lr) are not
tuned. Seconds are those of the training steps, without evaluation. State is the measured size of all tensors
that the optimizer keeps from step to step, relative to {BASELINES[0]}'s.

![Test error against steps and against seconds](demo.png)

Lines are means over seeds, bands go from the lowest to the highest seed.

## Settings

{markdown_table(("setting", "value"), list(settings.items()))}
"""

"""Many trainings one after the other, with bars that show how far they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from ingot.lab.train import Run


class Job(NamedTuple):
    """A training that is to be repeated from several seeds."""

    name: str  # of the bar that it advances; jobs of one name share a bar
    steps: int
    train: Callable[..., Run]  # from a seed, with a watcher as ``watch``
    note: str = ""  # what tells it from others of its name


def train_all(jobs: Sequence[Job], seeds: Sequence[int], console: Console) -> list[Run]:
    """Do every job from every seed, seed by seed; a bar for each name, in a file a line for each run.

    All jobs take a turn before the next seed's, so that a machine that slows down slows them all.
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
        ids: dict[str, TaskID] = {}
        for name in dict.fromkeys(job.name for job in jobs):
            total = len(seeds) * sum(job.steps for job in jobs if job.name == name)
            ids[name] = bars.add_task(name, total=total, error="waiting", left="")
        for seed in seeds:
            for job in jobs:
                run = job.train(seed, watch=partial(_advance, bars, ids[job.name]))
                runs.append(run)
                if not console.is_terminal:
                    ended = f"test error {run.test_error_percent[-1]:5.2f} %  {run.seconds[-1]:5.1f} s"
                    console.print(f"seed {seed}  {job.name:<6} {ended}  {job.note}".rstrip())
    return runs


def _advance(bars: Progress, bar: TaskID, run: Run) -> None:
    """One step further; the time left is this bar's own, as the others train in between."""
    bars.update(bar, advance=1, error=f"test error {run.test_error_percent[-1]:5.2f} %")
    if run.steps[-1]:
        steps = bars.tasks[bar].remaining or 0
        bars.update(bar, left=f"{steps * run.seconds[-1] / run.steps[-1]:3.0f} s left")

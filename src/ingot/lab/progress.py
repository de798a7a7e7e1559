"""Many trainings one after the other, with bars that show how far they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from ingot.lab.records import Run
from ingot.lab.training import Progress, Trainer


class Job(NamedTuple):
    """A training that is to be repeated from several seeds."""

    name: str  # of the bar that it advances; jobs of one name share a bar
    trainer: Callable[[int], Trainer]  # from a seed
    note: str = ""  # what tells it from others of its name
    after: Callable[[Trainer, Run], None] = lambda trainer, run: None


def train_all(
    jobs: Sequence[Job], seeds: Sequence[int], console: Console, *, resume: bool = True
) -> list[Run]:
    """Do every job from every seed, seed by seed; a bar for each name, in a file a line for each run.

    All jobs take a turn before the next seed's, so that a machine that slows down slows them all.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    runs: list[Run] = []
    with Bars(*columns, console=console, disable=not console.is_terminal, refresh_per_second=5) as bars:
        names = [job.name for job in jobs]
        ids = {name: bars.add_task(name, total=None, note="waiting") for name in dict.fromkeys(names)}
        done = dict.fromkeys(names, 0)
        for seed in seeds:
            for job in jobs:
                trainer = job.trainer(seed)
                bar = Bar(bars, ids[job.name], done[job.name], len(seeds) * names.count(job.name))
                run = trainer.train(bar.watch, resume=resume)
                bar.end(run)
                done[job.name] += 1
                job.after(trainer, run)
                runs.append(run)
                if not console.is_terminal and trainer.is_main:
                    line = f"seed {seed}  {job.name:<{max(map(len, names))}}  {ending(run)}  {job.note}"
                    console.print(line.rstrip(), highlight=False, soft_wrap=True)
    return runs


@dataclass(frozen=True)
class Bar:
    """The bar of an optimizer while one of its runs is trained."""

    bars: Bars
    id: TaskID
    before: int  # runs
    all: int

    def watch(self, progress: Progress) -> None:
        """Show how far a run is."""
        total, done = self.all * progress.steps, self.before * progress.steps + progress.step
        self.bars.update(self.id, total=total, completed=done, note=state_of(progress))

    def end(self, run: Run) -> None:
        """Show how a run ended."""
        steps = run.settings["steps"]
        self.bars.update(
            self.id, total=self.all * steps, completed=(self.before + 1) * steps, note=ending(run)
        )


def state_of(progress: Progress) -> str:
    """Loss, error, time left and memory in a few words."""
    error = progress.run.records[-1].error if progress.run.records else float("nan")
    left = "" if progress.seconds_left is None else f"  {duration(progress.seconds_left)} left"
    memory = f"  {progress.memory / 2**20:.0f} MiB" if progress.memory else ""
    return f"loss {progress.loss:.3f}  error {error:.2f}{left}{memory}"


def ending(run: Run) -> str:
    """How a run ended in a few words."""
    last = run.records[-1]
    if run.state == "diverged":
        return f"diverged after {last.step} steps"
    return f"{run.error_name} {last.error:.2f}  test loss {last.test_loss:.3f}  {duration(last.seconds)}"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"

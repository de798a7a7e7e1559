"""Several optimizers on one task from several seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ingot.lab.memory import training_peak
from ingot.lab.optimizers import Chosen
from ingot.lab.progress import Job, train_all
from ingot.lab.records import Run
from ingot.lab.task import Task
from ingot.lab.training import Loop, Trainer


@dataclass(frozen=True)
class Comparison:
    """What is trained: every optimizer from every seed, each run in a folder of its own."""

    task: Task
    chosen: Sequence[Chosen]
    seeds: Sequence[int]
    loop: Loop
    out: Path
    notes: Mapping[str, Any]

    def __post_init__(self) -> None:
        labels = [chosen.label for chosen in self.chosen]
        if len(set(labels)) < len(labels):
            raise ValueError(f"an optimizer is named twice: {', '.join(labels)}")

    def trainer(self, chosen: Chosen, seed: int) -> Trainer:
        """What trains one of them from one seed."""
        folder = self.out / folder_name(chosen.label) / f"seed{seed}"
        return Trainer(self.task, chosen, seed, self.loop, folder, self.notes)


def folder_name(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.=+-]+", "_", label).strip("_")


def compare(comparison: Comparison, console: Console, *, resume: bool = True) -> list[Run]:
    """Do what is not done yet."""
    jobs = [
        Job(chosen.label, partial(comparison.trainer, chosen), after=_note_peak)
        for chosen in comparison.chosen
    ]
    return train_all(jobs, comparison.seeds, console, resume=resume)


def _note_peak(trainer: Trainer, run: Run) -> None:
    """Measure the peak of a training step, once a run is over; several processes have no common one."""
    if not run.peak_bytes and trainer.processes == 1 and trainer.folder is not None:
        run.peak_bytes = training_peak(trainer.task, trainer.chosen, trainer.batch_size, trainer.device)
        trainer.folder.save(run)

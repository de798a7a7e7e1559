"""The suite's tasks with several optimizers: as they come, tuned, and within the same time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console

from ingot.lab.comparing import folder_name
from ingot.lab.optimizers import Chosen, choose
from ingot.lab.peers import UnsuitableError
from ingot.lab.progress import ending
from ingot.lab.records import Run
from ingot.lab.scoreboard import REFERENCE
from ingot.lab.suite import EVALUATIONS, suite_task
from ingot.lab.summary import Group
from ingot.lab.task import Task
from ingot.lab.training import Loop, Trainer
from ingot.lab.tuning import Search, finalists, held_out, is_finished, run_search, url_of

FRESH_SEED = 100
"""Tuned settings are judged from seeds from here on, which the search has not seen."""

T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """What is trained.

    Attributes:
        tasks: Names of the suite.
        optimizers: As text.
        seeds: How many.
        out: The folder of everything.
        data_dir: The folder of data sets.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``; None is the machine's default.
        jobs: Processes, each with one thread.
    """

    tasks: Sequence[str]
    optimizers: Sequence[str]
    seeds: int
    out: Path
    data_dir: Path | None = None
    precision: str | None = None
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.chosen[0].label != REFERENCE:
            raise ValueError(f"the first optimizer must be {REFERENCE}, which all others are measured by")

    @property
    def chosen(self) -> list[Chosen]:
        """The optimizers themselves."""
        return [choose(text) for text in self.optimizers]


class Work(NamedTuple):
    """One training, in words that another process understands."""

    task: str
    data_dir: Path | None
    optimizer: Chosen
    seed: int
    loop: Loop
    folder: Path


def evaluate_defaults(evaluation: Evaluation, console: Console) -> dict[str, list[Group]]:
    """Each optimizer as it comes, on each task from each seed."""
    return train_suite(evaluation, "defaults", suited(evaluation, console), 0, console)


def suited(evaluation: Evaluation, console: Console) -> dict[str, list[Chosen]]:
    """The optimizers that can train each task's model; of others it is said that they are left out."""
    found: dict[str, list[Chosen]] = {}
    for name in evaluation.tasks:
        task, found[name] = _task(name, evaluation.data_dir), []
        for chosen in evaluation.chosen:
            try:
                chosen.make(task.model(), task.training.common)
                found[name].append(chosen)
            except UnsuitableError as error:
                console.print(f"{name}  {chosen.label} is left out: {error}", highlight=False)
    return found


def evaluate_in_time(
    evaluation: Evaluation, defaults: dict[str, list[Group]], console: Console
) -> dict[str, list[Group]]:
    """Each optimizer but the reference in so many steps as it takes in the reference's time."""
    works: list[Work] = []
    by_label = {chosen.label: chosen for chosen in evaluation.chosen}
    for task, (reference, *others) in defaults.items():
        for group, chosen in ((group, by_label[group.label]) for group in others if group.label in by_label):
            share = min(1.0, reference.seconds_per_step / group.seconds_per_step)
            epochs = max(0.001, round(share * _epochs(task, evaluation.data_dir), 3))
            works += _works(evaluation, "in_time", task, chosen, 0, epochs)
    return _grouped(works, _do_all(evaluation, train_one, works, console), evaluation.tasks)


def evaluate_tuned(
    evaluation: Evaluation, trials: int, searches: int, console: Console
) -> tuple[dict[str, list[Group]], dict[str, dict[str, list[Tuned]]]]:
    """The best settings of equally many trials of each optimizer on held out data, from fresh seeds.

    What a search of few trials comes to is a matter of luck: several of them tell how much.
    """
    tunings = [
        Tuning(task, evaluation.data_dir, chosen, trials, search, _loop(evaluation, task, 1), evaluation.out)
        for task, several in suited(evaluation, console).items()
        for chosen in several
        for search in range(searches)
    ]
    best: dict[str, dict[str, list[Tuned]]] = {task: {} for task in evaluation.tasks}
    works: list[Work] = []
    for tuning, tuned in zip(tunings, _do_all(evaluation, tune_one, tunings, console), strict=True):
        best[tuning.task].setdefault(tuning.chosen.label, []).append(tuned)
        phase = f"tuned{_number(tuning.search)}"
        chosen = tuning.chosen.with_settings(tuned.settings)
        works += _works(evaluation, phase, tuning.task, chosen, FRESH_SEED)
    runs = _do_all(evaluation, train_one, works, console)
    return _grouped(works, runs, evaluation.tasks, searches), best


def _number(search: int) -> str:
    """What the files of a search are told by; a single search needs nothing."""
    return f"_{search}" if search else ""


# --- One training -----------------------------------------------------------------------------------------


@cache
def _task(name: str, data_dir: Path | None) -> Task:
    return suite_task(name, data_dir)


def _epochs(name: str, data_dir: Path | None) -> float:
    return _task(name, data_dir).training.epochs


def _loop(evaluation: Evaluation, task: str, evaluations: int, epochs: float | None = None) -> Loop:
    all_epochs = epochs or _epochs(task, evaluation.data_dir)
    return Loop(
        epochs=epochs,
        precision=evaluation.precision,
        evaluate_every=all_epochs / evaluations,
        tensorboard=False,
    )


def train_one(work: Work) -> Run:
    """Train, unless that has been done."""
    task = _task(work.task, work.data_dir)
    return Trainer(task, work.optimizer, work.seed, work.loop, work.folder, {"suite": work.task}).train()


class Tuning(NamedTuple):
    """One search, in words that another process understands."""

    task: str
    data_dir: Path | None
    chosen: Chosen
    trials: int
    search: int
    loop: Loop
    out: Path


class Tuned(NamedTuple):
    """What a search came to."""

    settings: dict[str, float]
    loss: float
    trials: int
    diverged: int


def tune_one(tuning: Tuning) -> Tuned:
    """Search, or go on searching, and return the best settings."""
    folder = tuning.out / "searches" / tuning.task
    folder.mkdir(parents=True, exist_ok=True)
    task = _task(tuning.task, tuning.data_dir)
    search = Search(
        held_out(task),
        tuning.chosen,
        tuning.loop,
        tuning.chosen.label,
        url_of(folder / f"{folder_name(tuning.chosen.label)}{_number(tuning.search)}.db"),
        prune=False,
        seed=tuning.search,
    )
    study = run_search(search, tuning.trials, lambda trial: None)
    ended = [trial for trial in study.get_trials() if is_finished(trial)]
    best = finalists(study, search, task)
    if not best:
        raise ValueError(
            f"none of {len(ended)} trials of {tuning.chosen.label} on {tuning.task} came to an end"
        )
    lost = sum(bool(trial.user_attrs.get("diverged")) for trial in ended)
    return Tuned(best[0].params, best[0].loss, len(ended), lost)


# --- Many of them -----------------------------------------------------------------------------------------


def train_suite(
    evaluation: Evaluation, phase: str, chosen: dict[str, list[Chosen]], first_seed: int, console: Console
) -> dict[str, list[Group]]:
    """Train each task with the optimizers that are chosen for it, from seeds from this one on."""
    works = [
        work
        for task, several in chosen.items()
        for one in several
        for work in _works(evaluation, phase, task, one, first_seed)
    ]
    return _grouped(works, _do_all(evaluation, train_one, works, console), evaluation.tasks)


def _works(
    evaluation: Evaluation,
    phase: str,
    task: str,
    chosen: Chosen,
    first_seed: int,
    epochs: float | None = None,
) -> list[Work]:
    loop, folder = (
        _loop(evaluation, task, EVALUATIONS, epochs),
        evaluation.out / phase / task / folder_name(chosen.label),
    )
    seeds = range(first_seed, first_seed + evaluation.seeds)
    return [Work(task, evaluation.data_dir, chosen, seed, loop, folder / f"seed{seed}") for seed in seeds]


def _grouped(
    works: Sequence[Work], runs: Sequence[Run], tasks: Sequence[str], searches: int = 1
) -> dict[str, list[Group]]:
    found: dict[str, dict[str, list[Run]]] = {task: {} for task in tasks}
    for work, run in zip(works, runs, strict=True):
        found[work.task].setdefault(work.optimizer.label, []).append(run)
    return {
        task: [Group(label, runs, searches) for label, runs in groups.items()]
        for task, groups in found.items()
    }


def _do_all(
    evaluation: Evaluation, do: Callable[[Any], T], works: Sequence[Any], console: Console
) -> list[T]:
    """All works in the order in which they were given, done in an order that lets optimizers take turns."""
    turns = sorted(range(len(works)), key=lambda i: (works[i].task, getattr(works[i], "seed", 0), i))
    done: dict[int, T] = {}
    for number, (index, result) in enumerate(_results(do, [works[i] for i in turns], evaluation.jobs), 1):
        done[turns[index]] = result
        console.print(
            f"{number:4d}/{len(works)}  {_told(works[turns[index]], result)}", highlight=False, soft_wrap=True
        )
    return [done[index] for index in range(len(works))]


def _results(do: Callable[[Any], T], works: Sequence[Any], jobs: int) -> Iterator[tuple[int, T]]:
    if jobs == 1:
        yield from ((index, do(work)) for index, work in enumerate(works))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=partial(torch.set_num_threads, 1)) as pool:
        futures = {pool.submit(do, work): index for index, work in enumerate(works)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _told(work: Any, result: Any) -> str:
    if isinstance(result, Run):
        return f"{work.task}  {work.optimizer.label}  seed {work.seed}  {ending(result)}"
    settings = " ".join(f"{key}={value:.3g}" for key, value in result.settings.items())
    return f"{work.task}  {work.chosen.label}  best of {result.trials}: loss {result.loss:.4f}  {settings}"

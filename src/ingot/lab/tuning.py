"""The paper's random search over its table of hyper-parameters, and other samplers, on Optuna.

A study is kept in a storage that several processes and machines may share, and goes on where it was left.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import optuna
import torch
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, Trial, TrialState
from torch.utils.data import Dataset, Subset

from ingot.lab.optimizers import Chosen
from ingot.lab.records import Run
from ingot.lab.task import Task, Tensors
from ingot.lab.training import Loop, Progress, Trainer

optuna.logging.set_verbosity(optuna.logging.WARNING)  # its lines would stand between those of the commands

SAMPLERS = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}

HEARTBEAT = 30
"""Seconds from one sign of life of a trial to the next: one that gives none was killed, and is done again."""

STUDY = "study.db"
"""The file that a search is kept in, unless it is told where."""

HELD_OUT = 5
"""One of so many training examples is held out to judge trials by; the test set has no say."""

FINALISTS, FINALS = 4, 2
"""So many trials, the best ones, are trained so many times more: one seed and a few examples may err."""


@dataclass(frozen=True)
class Search:
    """What is searched.

    Attributes:
        task: With validation data in the place of the test's (``held_out``).
        chosen: The optimizer; settings that are given are not searched.
        loop: How long each trial is trained.
        name: The study's name in its storage.
        storage: The URL of a database.
        sampler: ``"random"`` or ``"tpe"``.
        prune: Whether trials that fall behind are given up.
        seed: Of the sampler.
        notes: What else trials of one study have in common.
    """

    task: Task
    chosen: Chosen
    loop: Loop
    name: str
    storage: str
    sampler: str = "random"
    prune: bool = True
    seed: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shared(self) -> dict[str, str]:
        """What all trials of the study have in common."""
        said = {**self.notes, **asdict(self.loop), "task": self.task.title, "optimizer": self.chosen.label}
        return {key: str(value) for key, value in said.items()}


def held_out(task: Task, part: int = 0) -> Task:
    """The task with its validation data to judge by, or with one of the parts of its training data."""
    if task.validation is not None:
        return replace(task, test=task.validation)
    examples = len(task.train)  # type: ignore[arg-type]
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(0))
    cut = examples // HELD_OUT
    if not cut:
        raise ValueError(f"{task.title} has {examples} training examples: too few to hold some out")
    before, held, behind = order.split((part * cut, cut, examples - (part + 1) * cut))
    return replace(task, train=_part(task.train, torch.cat((before, behind))), test=_part(task.train, held))


def _part(data: Dataset[Any], indices: torch.Tensor) -> Dataset[Any]:
    if isinstance(data, Tensors):
        return Tensors(*(tensor[indices] for tensor in data.tensors))
    return Part(data, indices.tolist())


class Part(Subset[Any]):
    """Some examples of a dataset, as whole batches where it gives these."""

    @property
    def gives_batches(self) -> bool:
        """As the dataset does."""
        return getattr(self.dataset, "gives_batches", False)


def url_of(file: Path) -> str:
    """A file as a storage."""
    return f"sqlite:///{file.resolve()}"


def storage_of(url: str) -> RDBStorage:
    """The database; a ValueError that says what to do if it cannot be reached."""
    options: dict[str, Any] = {}
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        options = {"connect_args": {"timeout": 60}}  # for several processes that write
    for is_last in (False, False, True):
        try:
            return _storage(url, options)
        except Exception as error:  # whatever the database's driver raises
            if is_last:
                raise ValueError(
                    f"the storage {url!r} cannot be used: {error}\nWrite sqlite:///FILE.db, or "
                    "postgresql://USER:PASSWORD@HOST/DATABASE with a driver installed: "
                    "pip install 'psycopg[binary]'"
                ) from error
            time.sleep(0.5)  # processes that begin at once make the same tables: one of them is in time
    raise AssertionError


def _storage(url: str, options: Mapping[str, Any]) -> RDBStorage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return RDBStorage(
            url,
            engine_kwargs=dict(options),
            heartbeat_interval=HEARTBEAT,
            grace_period=4 * HEARTBEAT,
            heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=3),
        )


@contextmanager
def opened(url: str) -> Iterator[RDBStorage]:
    """The database, until it is not needed any longer."""
    storage = storage_of(url)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def study_of(search: Search) -> optuna.Study:
    """The study, which is made if it is not there."""
    if search.sampler not in SAMPLERS:
        raise ValueError(f"there is no sampler {search.sampler!r}: choose {', '.join(SAMPLERS)}")
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2)
    return optuna.create_study(
        storage=storage_of(search.storage),
        study_name=search.name,
        sampler=SAMPLERS[search.sampler](seed=search.seed),
        pruner=pruner if search.prune else optuna.pruners.NopPruner(),
        direction="minimize",
        load_if_exists=True,
    )


def suggest(trial: Trial, chosen: Chosen) -> dict[str, float]:
    """Settings for a trial, of those that were not given."""
    return {
        name: trial.suggest_float(name, place.low, place.high, log=place.log)
        for name, place in chosen.space.items()
    }


def is_finished(trial: FrozenTrial) -> bool:
    """Whether a trial counts: it ended, or was given up on its merits."""
    return trial.state in (TrialState.COMPLETE, TrialState.PRUNED)


def run_search(search: Search, trials: int, tell: Callable[[FrozenTrial], None]) -> optuna.Study:
    """Add trials until there are so many, together with all other processes that work on the same study."""
    study = study_of(search)
    _check_same(study.user_attrs.get("shared", search.shared), search)
    study.set_user_attr("shared", search.shared)

    def objective(trial: Trial) -> float:
        def watch(progress: Progress) -> None:
            records = progress.run.records
            if not records or progress.step % max(1, progress.steps) == 0:
                return
            epoch = round(records[-1].epoch)
            if epoch not in reported and isfinite(records[-1].test_loss) and epoch:
                reported.add(epoch)
                trial.report(records[-1].test_loss, epoch)
                if search.prune and trial.should_prune():
                    raise optuna.TrialPruned

        reported: set[int] = set()
        # Each trial has numbers of its own, whichever process takes it.
        study.sampler = SAMPLERS[search.sampler](seed=(search.seed << 20) + trial.number)
        chosen = search.chosen.with_settings(suggest(trial, search.chosen))
        run = Trainer(search.task, chosen, search.seed, search.loop).train(watch)
        error = run.records[-1].error
        trial.set_user_attr("error", error if isfinite(error) else None)
        trial.set_user_attr("diverged", run.has_diverged)
        return _last_loss(run)

    def after(study: optuna.Study, trial: FrozenTrial) -> None:
        tell(trial)
        if sum(map(is_finished, study.get_trials(deepcopy=False))) >= trials:
            study.stop()

    if sum(map(is_finished, study.get_trials(deepcopy=False))) < trials:
        study.optimize(objective, callbacks=[after], catch=())
    return study


def _last_loss(run: Run) -> float:
    loss = run.records[-1].test_loss
    return loss if isfinite(loss) else inf


class Finalist(NamedTuple):
    """One of the best trials, and the mean of its losses."""

    params: dict[str, float]
    loss: float


def finalists(study: optuna.Study, search: Search, task: Task) -> list[Finalist]:
    """The best trials of a study, each trained again from other seeds, with other examples held out.

    The best in the mean comes first. What was trained before is not trained again.
    """
    found = []
    for trial in complete(study)[:FINALISTS]:
        chosen, key = search.chosen.with_settings(trial.params), f"finals of trial {trial.number}"
        if key not in study.user_attrs:
            finals = [
                Trainer(held_out(task, part), chosen, search.seed + part, search.loop).train()
                for part in range(1, 1 + FINALS)
            ]
            study.set_user_attr(key, [_last_loss(run) for run in finals])
        found.append(Finalist(trial.params, fmean([trial.values[0], *study.user_attrs[key]])))
    return sorted(found, key=lambda finalist: finalist.loss)


def _check_same(before: Mapping[str, str], search: Search) -> None:
    """A search goes on as it was begun, or not at all: its trials are compared."""
    now = search.shared
    changed = sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key))
    if changed:
        pairs = ", ".join(f"{key} was {before.get(key)}, now {now.get(key)}" for key in changed)
        raise ValueError(
            f"{search.storage} has a search of this name with other settings ({pairs}): choose another --out "
            "or --storage"
        )


def complete(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that came to an end, and to a loss that is a number, the best first."""
    ended = study.get_trials(states=(TrialState.COMPLETE,))
    return sorted((trial for trial in ended if isfinite(trial.values[0])), key=lambda trial: trial.values[0])


def importances(study: optuna.Study) -> Mapping[str, float]:
    """How much of the differences between trials each setting explains; nothing if there are too few."""
    trials = complete(study)
    if len(trials) < 4 or len({trial.value for trial in trials}) < 2:
        return {}
    clean = optuna.create_study(direction="minimize")
    clean.add_trials(trials)
    return optuna.importance.get_param_importances(
        clean, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
    )

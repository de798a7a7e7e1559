"""Training in bfloat16 against float32: what it costs optimizers that invert, and those that do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count, cycle, pairwise, product
from math import inf, isfinite, isqrt
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ingot import IKFAC, KFAC, PAPER, SINGD
from ingot.lab.progress import Job, train_all
from ingot.lab.recipes.digits import split_digits
from ingot.lab.records import Run
from ingot.lab.task import Task, Tensors, Training
from ingot.lab.training import Loop, Trainer

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAMILY = {"SINGD": SINGD, "IKFAC": IKFAC, "KFAC": KFAC}

PAPERS_STEP = {"precond_every": 1, "structure": "dense", **PAPER}
"""The paper's step, with dense factors that follow every batch: with few updates they would still be mostly
the identity that they start from, which is as good as a large damping."""

DAMPINGS = (1e-4, 1e-3, 1e-2, 1e-1)
SHOWN_DAMPING = 1e-4
"""KFAC's best in float32, by ``tune``: the figure shows whole runs of this one, the ends of all."""


@dataclass(frozen=True)
class Setting:
    """An optimizer and how it is set: the paper's step if a damping is given, otherwise our defaults."""

    optimizer: str
    damping: float | None
    lr: float
    precond_lr: float | None = None

    def __str__(self) -> str:
        return "defaults" if self.damping is None else f"paper, λ = {self.damping:g}"

    @property
    def label(self) -> str:
        """Its name in a report."""
        return f"{self.optimizer}, {self}"

    @property
    def settings(self) -> Mapping[str, Any]:
        """What it is set to."""
        return asdict(self)

    def make(self, model: nn.Module, common: Mapping[str, Any] | None = None) -> Optimizer:
        """The optimizer of a model."""
        if self.optimizer not in FAMILY:
            return AdamW(model.parameters(), lr=self.lr)
        if self.damping is None:
            return FAMILY[self.optimizer](model, lr=self.lr)
        step: dict[str, Any] = {"damping": self.damping, "precond_lr": self.precond_lr, **PAPERS_STEP}
        return FAMILY[self.optimizer](model, lr=self.lr, **step)


TUNED = tuple(
    Setting(*values)
    for values in (
        ("SINGD", 1e-4, 3e-4, 0.1),
        ("IKFAC", 1e-4, 1e-3, 0.05),
        ("KFAC", 1e-4, 1e-3, 0.05),
        ("SINGD", 1e-3, 1e-3, 0.05),
        ("IKFAC", 1e-3, 1e-3, 0.05),
        ("KFAC", 1e-3, 3e-4, 0.1),
        ("SINGD", 1e-2, 3e-2, 0.02),
        ("IKFAC", 1e-2, 1e-3, 0.1),
        ("KFAC", 1e-2, 1e-3, 0.1),
        ("SINGD", 1e-1, 1e-1, 0.02),
        ("IKFAC", 1e-1, 1e-1, 0.02),
        ("KFAC", 1e-1, 1e-1, 0.02),
        ("SINGD", None, 3e-3),
        ("IKFAC", None, 3e-3),
        ("KFAC", None, 3e-3),
        ("AdamW", None, 3e-2),
    )
)
"""What ``tune`` found: the best for float32."""


# --- The task ---------------------------------------------------------------------------------------------


def perceptron() -> nn.Module:
    """Small, as torch's products in bfloat16 are slow on a CPU, and without normalization layers."""
    widths = (64, 64, 32)
    hidden = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(widths[-1], 10))


def task() -> Task:
    """Handwritten digits for a perceptron."""
    train_x, train_y, test_x, test_y = split_digits()
    return Task(
        title="Perceptron on scikit-learn's digits",
        model=perceptron,
        train=Tensors(train_x, train_y),
        test=Tensors(test_x, test_y),
        training=Training(epochs=10, short_floats=False),
    )


def in_precision(task: Task, precision: str) -> Task:
    """The same task, with images and a model (so gradients, momenta and factors) of another precision."""
    dtype = PRECISIONS[precision]

    def cast(data: Any) -> Tensors:
        images, labels = data.tensors
        return Tensors(images.to(dtype), labels)

    return replace(task, train=cast(task.train), test=cast(task.test), model=lambda: task.model().to(dtype))


# --- Training ---------------------------------------------------------------------------------------------


@dataclass
class Result:
    """A setting's runs in each precision, seed by seed, and what was seen of the inverses that KFAC keeps."""

    setting: Setting
    runs: dict[str, list[Run]] = field(default_factory=lambda: {precision: [] for precision in PRECISIONS})
    positive: dict[str, list[bool]] = field(
        default_factory=lambda: {precision: [] for precision in PRECISIONS}
    )

    def job(self, task: Task, precision: str, loop: Loop) -> Job:
        """Its runs in a precision."""
        watched = Watched(self.setting, self.positive[precision])
        its_task = in_precision(task, precision)
        return Job(
            self.setting.optimizer,
            lambda seed: Trainer(its_task, watched, seed, loop),
            f"{precision}, {self.setting}",
            lambda _, run: self.runs[precision].append(run),
        )


@dataclass(frozen=True)
class Watched:
    """A setting whose optimizer notes, at every tenth step, which of its inverses are positive definite."""

    setting: Setting
    positive: list[bool]

    @property
    def label(self) -> str:
        """Its name in a report."""
        return self.setting.label

    @property
    def settings(self) -> Mapping[str, Any]:
        """What it is set to."""
        return self.setting.settings

    def make(self, model: nn.Module, common: Mapping[str, Any] | None = None) -> Optimizer:
        """The optimizer of a model."""
        optimizer, steps = self.setting.make(model), count(1)

        def look(optimizer: Optimizer, *_: object) -> None:
            if next(steps) % 10 == 0:
                self.positive.extend(map(is_positive, inverses(optimizer)))

        optimizer.register_step_post_hook(look)
        return optimizer


def inverses(optimizer: Optimizer) -> Iterator[Tensor]:
    """The dense inverses that KFAC keeps of its factors; other optimizers have none."""
    for state in optimizer.state.values():
        for name in ("S_K_inverse", "S_C_inverse"):
            if name in state:
                dim = isqrt(state[name].shape[-1])
                yield state[name].unflatten(-1, (dim, dim))


def is_positive(matrix: Tensor) -> bool:
    """Whether a matrix keeps a gradient's direction: xᵀ M x > 0 for every x."""
    matrix = matrix.float()
    if not matrix.isfinite().all():
        return False
    return bool(torch.linalg.eigvalsh(matrix + matrix.mT)[0] > 0)


def compare(
    task: Task, settings: Sequence[Setting], loop: Loop, seeds: Sequence[int], console: Console
) -> list[Result]:
    """Train with every setting in every precision."""
    results = [Result(setting) for setting in settings]
    jobs = [result.job(task, precision, loop) for result in results for precision in PRECISIONS]
    train_all(jobs, seeds, console)
    return results


# --- Tuning -----------------------------------------------------------------------------------------------

LRS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
PRECOND_LRS = (0.02, 0.05, 0.1)
TUNING_SEEDS = (1000, 1001)
HELD_OUT = 300


def tune(task: Task, loop: Loop, console: Console) -> list[Setting]:
    """The best learning rates for float32, of each optimizer at each damping.

    Judged by the loss on training examples that were held out, after the last step, on average over seeds
    that the study does not use. The test set has no say.
    """
    assert isinstance(task.train, Tensors)
    kept, held_out = (
        [t[part] for t in task.train.tensors] for part in (slice(-HELD_OUT), slice(-HELD_OUT, None))
    )
    task = replace(task, train=Tensors(*kept), test=Tensors(*held_out))
    tried = [candidate for setting in TUNED for candidate in candidates(setting)]
    jobs = [Job(s.optimizer, partial(_trainer, task, s, loop), f"tuning, {s}, lr {s.lr:g}") for s in tried]
    runs = train_all(jobs, TUNING_SEEDS, console)
    losses: dict[Setting, float] = dict.fromkeys(tried, 0.0)
    for setting, run in zip(cycle(tried), runs, strict=False):
        loss = run.records[-1].test_loss
        losses[setting] += loss if isfinite(loss) else inf
    return [min(candidates(setting), key=losses.__getitem__) for setting in TUNED]


def candidates(setting: Setting) -> list[Setting]:
    """The settings to choose from; our defaults leave only the learning rate to choose."""
    rates = product(LRS, (None,) if setting.damping is None else PRECOND_LRS)
    return [replace(setting, lr=lr, precond_lr=precond_lr) for lr, precond_lr in rates]


def _trainer(task: Task, setting: Setting, loop: Loop, seed: int) -> Trainer:
    return Trainer(task, setting, seed, loop)

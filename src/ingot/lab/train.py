"""The registry of optimizers, the one training loop, and the records that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from ingot import IKFAC, KFAC, SINGD

MakeOptimizer: TypeAlias = Callable[[nn.Module], Optimizer]

OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "SINGD": lambda model: SINGD(model, lr=1e-3),
    "IKFAC": lambda model: IKFAC(model, lr=1e-3),
    "KFAC": lambda model: KFAC(model, lr=1e-3),
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-3),
    "SGD": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
}
"""What can be compared: a name, and how the optimizer of a model is made."""


@dataclass(frozen=True)
class Task:
    """A classification problem in memory, and the model that is to learn it."""

    title: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    model: Callable[[], nn.Module]


@dataclass(frozen=True)
class Schedule:
    """How long to train, on how much at a time, and how often to look at the test set."""

    steps: int
    batch_size: int = 64
    eval_every: int = 10


@dataclass
class Run:
    """The record of one training: the four lists have an entry for every evaluation, the first at step 0."""

    optimizer: str
    seed: int
    lr: float
    state_bytes: int = 0
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    test_error_percent: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)


Watcher: TypeAlias = Callable[[Run], None]
"""Called after every step with the record so far."""


def batches(examples: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Indices of batches, epoch after epoch without end; the same seed gives the same batches.

    What is left of an epoch after its last full batch is dropped: a batch normalization cannot do much with
    three examples.
    """
    generator = torch.Generator().manual_seed(seed)
    batch_size = min(batch_size, examples)
    while True:
        order = torch.randperm(examples, generator=generator)
        yield from order[: examples - examples % batch_size].split(batch_size)


@torch.no_grad()
def evaluate(task: Task, model: nn.Module) -> tuple[float, float]:
    """The error in percent and the mean loss on the test set."""
    model.eval()
    scores = model(task.test_x).float()  # which leaves all rounding to the model
    model.train()
    wrong = scores.argmax(1).ne(task.test_y).sum().item()
    return 100 * wrong / len(task.test_y), cross_entropy(scores, task.test_y).item()


def state_bytes(optimizer: Optimizer) -> int:
    """The bytes of all tensors that the optimizer keeps from step to step."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in kept if isinstance(value, Tensor))


def train(
    task: Task,
    name: str,
    seed: int,
    schedule: Schedule,
    watch: Watcher = lambda run: None,
    make: MakeOptimizer | None = None,
) -> Run:
    """Train a fresh model with a registered optimizer, or with the one that ``make`` makes.

    The seed alone determines the initial weights and the batches. Seconds are those of the training steps:
    neither the evaluations nor what ``watch`` does are counted. Once the loss is not finite nothing is left
    to learn from: the model stays as it is, and is evaluated as before.
    """
    torch.manual_seed(seed)
    model = task.model()
    optimizer = (make or OPTIMIZERS[name])(model)
    run = Run(name, seed, lr=float(optimizer.param_groups[0]["lr"]))
    scheduler = CosineAnnealingLR(optimizer, schedule.steps)
    indices = batches(len(task.train_y), schedule.batch_size, seed)
    seconds, is_finite = 0.0, True
    _record(run, task, model, step=0, seconds=seconds)
    for step in range(1, schedule.steps + 1):
        if is_finite:
            start = perf_counter()
            batch = next(indices)
            optimizer.zero_grad()
            loss = cross_entropy(model(task.train_x[batch]), task.train_y[batch])
            is_finite = bool(loss.isfinite())
            if is_finite:
                loss.backward()
                optimizer.step()
                scheduler.step()
            seconds += perf_counter() - start
        if step % schedule.eval_every == 0 or step == schedule.steps:
            _record(run, task, model, step, seconds)
        watch(run)
    run.state_bytes = state_bytes(optimizer)
    return run


def _record(run: Run, task: Task, model: nn.Module, step: int, seconds: float) -> None:
    error, loss = evaluate(task, model)
    run.steps.append(step)
    run.seconds.append(seconds)
    run.test_error_percent.append(error)
    run.test_loss.append(loss)

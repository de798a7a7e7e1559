"""What is to be learned: a model, data, a loss, and how long to train.

A recipe makes such a task, and so may any function of a user's own (``from_function``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

Batch: TypeAlias = Any


class Score(NamedTuple):
    """Sums over a batch, or over all of them."""

    loss: Tensor
    wrong: Tensor  # what the error is the mean of
    examples: Tensor


class Objective(Protocol):
    """What is minimised, and how it is judged."""

    @property
    def error(self) -> str:
        """What the error is, with its unit: the mean of ``wrong``, times ``unit``."""

    @property
    def unit(self) -> float:
        """100 for a percentage."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch."""

    def score(self, model: nn.Module, batch: Batch) -> Score:
        """What is summed up over the test set."""


@dataclass(frozen=True)
class Classification:
    """Scores of classes, for each example of a batch ``(inputs, labels)`` or for each place of it."""

    criterion: Callable[..., Tensor] = cross_entropy
    error: str = "test error (%)"
    unit: float = 100.0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return self.criterion(_flat(model(inputs)), labels.flatten())

    def score(self, model: nn.Module, batch: Batch) -> Score:
        inputs, labels = batch
        scores, labels = _flat(model(inputs)).float(), labels.flatten()
        count = torch.tensor(float(len(labels)), device=labels.device)
        return Score(
            self.criterion(scores, labels) * count, scores.argmax(-1).ne(labels).sum().float(), count
        )


def _flat(scores: Tensor) -> Tensor:
    return scores.flatten(0, -2) if scores.ndim > 2 else scores


@dataclass(frozen=True)
class Regression:
    """Numbers for each example of a batch ``(inputs, targets)``; the error is the loss itself."""

    criterion: Callable[..., Tensor] = torch.nn.functional.mse_loss
    error: str = "test loss"
    unit: float = 1.0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return self.criterion(model(inputs), targets)

    def score(self, model: nn.Module, batch: Batch) -> Score:
        inputs, targets = batch
        count = torch.tensor(float(len(targets)), device=targets.device)
        loss = self.criterion(model(inputs).float(), targets) * count
        return Score(loss, loss, count)


@dataclass(frozen=True)
class NodeClassification:
    """Scores of a graph's nodes; a batch is the whole graph, and its mask says which nodes count."""

    error: str = "test error (%)"
    unit: float = 100.0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        features, edges, labels, mask = batch
        return cross_entropy(model(features, edges)[mask], labels[mask])

    def score(self, model: nn.Module, batch: Batch) -> Score:
        features, edges, labels, mask = batch
        scores, labels = model(features, edges)[mask].float(), labels[mask]
        count = mask.sum().float()
        return Score(cross_entropy(scores, labels) * count, scores.argmax(-1).ne(labels).sum().float(), count)


@dataclass(frozen=True)
class Training:
    """How a task is trained, unless told otherwise.

    Attributes:
        epochs: Passes over the training data.
        batch_size: Examples of a step, over all processes.
        schedule: Of the learning rate: ``"cosine"`` to zero, ``"step"`` (a tenth after every
            ``decay_every`` epochs) or ``"constant"``.
        decay_every: Epochs.
        short_floats: Whether bfloat16 is the default precision where the hardware has it.
        common: Settings of ingot's own optimizers.
    """

    epochs: int = 10
    batch_size: int = 64
    schedule: str = "cosine"
    decay_every: int = 40
    short_floats: bool = True
    common: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """A problem to compare optimizers on.

    Attributes:
        title: What is trained on what.
        model: Makes a fresh model; the seed is set before.
        train: Examples to learn from. A dataset with ``__getitems__`` gives whole batches at once.
        test: Examples to judge by.
        objective: What is minimised.
        augment: Changes the inputs of a training batch at random, on its device.
        prepare: Brings the inputs of any batch into the model's form, on its device, after that.
        training: How long, and how.
        validation: Examples to judge a search by; without them, some of ``train`` are held out for it.
    """

    title: str
    model: Callable[[], nn.Module]
    train: Dataset[Any]
    test: Dataset[Any]
    objective: Objective = field(default_factory=Classification)
    augment: Callable[[Tensor], Tensor] | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
    training: Training = field(default_factory=Training)
    validation: Dataset[Any] | None = None

    def batch(self, batch: Batch, *, training: bool) -> Batch:
        """A batch as the model takes it."""
        changes = [self.augment if training else None, self.prepare]
        for change in filter(None, changes):
            inputs, *rest = batch
            batch = (change(inputs), *rest)
        return batch


class Tensors(Dataset[tuple[Tensor, ...]]):
    """Examples in memory: tensors of the same length, of which batches are taken at once."""

    gives_batches = True

    def __init__(self, *tensors: Tensor) -> None:
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise ValueError(f"tensors of one dataset have one length, got {[len(t) for t in tensors]}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        chosen = torch.as_tensor(indices)
        return tuple(tensor[chosen] for tensor in self.tensors)


class Whole(Dataset[tuple[Any, ...]]):
    """A single example that is a batch of its own: a graph."""

    gives_batches = True

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.parts

    def __getitems__(self, indices: Sequence[int]) -> tuple[Any, ...]:
        return self.parts


def from_function(name: str, function: Callable[[], Any]) -> Task:
    """The task that a user's function returns: a ``Task``, or model, training data, test data and loss.

    The model may be a module or a function that makes one (the better choice: every seed then has weights of
    its own). Data are datasets, or pairs of tensors. The loss takes the model's output and the labels; where
    labels are whole numbers, the share of wrong ones is shown.
    """
    made = function()
    if isinstance(made, Task):
        return made
    if not isinstance(made, tuple) or len(made) != 4:
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise ValueError(
            f"{name} returned {got}: it must return model, training data, test data and loss, as a tuple of "
            "four, or an ingot.lab.task.Task"
        )
    model, train, test, loss = made
    train, test = (_dataset(name, given) for given in (train, test))
    is_whole = not torch.as_tensor(train[0][1]).is_floating_point()
    maker = _maker(name, model)
    if not callable(loss):
        raise ValueError(f"{name}: the loss is a {type(loss).__name__}, not a function of outputs and labels")
    objective: Objective = Classification(loss) if is_whole else Regression(loss)
    return Task(name, maker, train, test, objective)


def _maker(name: str, model: Any) -> Callable[[], nn.Module]:
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise ValueError(f"{name}: the model is a {type(model).__name__}, not a module or a function")
        return model

    def again() -> nn.Module:
        """A copy with weights of its own, where its modules know how to make them anew."""
        from copy import deepcopy

        fresh = deepcopy(model)
        for module in fresh.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        return fresh

    return again


def _dataset(name: str, given: Any) -> Dataset[Any]:
    if isinstance(given, tuple | list) and all(isinstance(part, Tensor) for part in given):
        return Tensors(*given)
    if hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        return given
    raise ValueError(
        f"{name}: data is a {type(given).__name__}; give a pair of tensors, or a dataset with a length"
    )

"""Activation checkpointing changes neither statistics nor steps, and still saves memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ingot import SINGD
from tests.behaviour.training import (
    FAMILY,
    PLAIN,
    assert_same,
    backward,
    batches,
    mlp,
    pending,
    squares,
    statistics,
    train,
)

pytestmark = pytest.mark.usefixtures("float64")


REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Segments(nn.Module):
    """Segments whose activations may be forgotten; the first and the last may be one."""

    def __init__(self, reentrant: bool | None, shared: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem, self.head = mlp(4, 4), mlp(4, 3)
        segments = [nn.Sequential(*mlp(4, 8, 4), nn.Tanh()) for _ in range(3)]
        self.segments = nn.ModuleList([*segments[:2], segments[0]] if shared else segments)

    def run(self, segment: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return segment(x)
        return checkpoint(segment, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for segment in self.segments:
            x = self.run(segment, x)
        return self.head(x)


@REENTRANT
@pytest.mark.parametrize("optimizer_class", FAMILY)
@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared"])
def test_activation_checkpointing_changes_no_step(optimizer_class, shared, reentrant):
    one, other = Segments(reentrant, shared), Segments(None, shared)
    settings = PLAIN | {"precond_every": 2}
    after = train(one, optimizer_class(one, **settings), 5)
    assert_same(after, train(other, optimizer_class(other, **settings), 5))
    assert after["segments.0.0.weight"][1]["updates"] == 3


class Nested(Segments):
    """One layer used outside of a segment, in it, and in a segment of that segment."""

    def inner(self, x: Tensor) -> Tensor:
        return self.stem(x).tanh()

    def outer(self, x: Tensor) -> Tensor:
        return self.run(self.inner, self.stem(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.outer, self.stem(x))


@REENTRANT
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, of the inner segment
def test_checkpoints_within_checkpoints_change_no_statistics(reentrant):
    seen = []
    for model in (Nested(reentrant), Nested(None)):
        optimizer = SINGD(model, **PLAIN)
        backward(model, *batches(1))
        seen.append(statistics(optimizer, model.stem[0].weight))
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["kept", "reentrant", "not reentrant"])
def test_checkpointing_frees_the_activations_while_statistics_are_wanted(reentrant):
    def remember(module: nn.Module, args: tuple, output: Tensor) -> None:
        inner.append(StorageWeakRef(output.untyped_storage()))

    model, inner = Segments(reentrant), []
    optimizer = SINGD(model)
    for segment in model.segments:
        segment[1].register_forward_hook(remember)
    assert optimizer.wants_curvature
    loss = squares(model(*batches(1)))
    alive = [not storage.expired() for storage in inner]
    assert alive == [reentrant is None] * 3
    loss.backward()
    assert all(pending(optimizer))

"""A small model with all kinds of parameters, its batches, and the plain loop: what these tests share."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from ingot import PAPER

DEFAULT = {"lr": 0.01, "precond_warmup": 2, "precond_every": 2}
"""The default settings, but for a learning rate that is seen and steps that update no factors."""

AS_IN_PAPER = {"lr": 0.01, "precond_every": 2, "precond_lr": 0.02, **PAPER}

SETTINGS = {"default": DEFAULT, "paper": AS_IN_PAPER}

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


class Small(nn.Module):
    """An embedding, attention, a convolution and a linear layer, a norm and a free parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = nn.Embedding(7, 4), nn.Parameter(0.1 * torch.randn(3, 4))
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
        self.convolution, self.head = nn.Conv1d(4, 2, 2), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.convolution(x.mT).tanh().flatten(1))


def batches(steps: int = 6, size: int = 6) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(7, (size, 3), generator=generator)
        yield tokens, (tokens.sum(1) + tokens[:, 0]) % 3


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def sum_loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="sum")


def plain(model: nn.Module, optimizer: Optimizer, loss: Loss = mean_loss, steps: int = 6) -> None:
    """The loop that all others are compared with."""
    for batch in batches(steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

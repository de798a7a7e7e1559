"""What the tests of checkpoints share: a model with layers of many kinds, and its training."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ingot import SINGD
from tests.behaviour.training import train

SHAPE = (6, 3, 4)
"""Of a batch: samples, positions, features."""

SPARSE = {"precond_every": 3, "precond_warmup": 2}
"""Settings with which some steps update no factors."""


class Mixed(nn.Module):
    """Attention with packed weights, a convolution with groups, an embedding, and a norm for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(3, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position(torch.arange(3))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.convolution(x.mT).mT
        return self.head(self.dropout(self.norm(x)))


def made(kind: type[Optimizer] = SINGD, steps: int = 0, dtype: torch.dtype = torch.float32, **settings: Any):
    """The same model at each call, and its optimizer after so many steps."""
    torch.manual_seed(0)
    model = Mixed().to(dtype)
    optimizer = kind(model, **settings)
    go_on(model, optimizer, steps)
    return model, optimizer


def go_on(model: nn.Module, optimizer: Optimizer, steps: int = 3, seed: int = 1) -> dict:
    """Train, always on the same batches, and return all that training changed."""
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    return train(model, optimizer, steps, *SHAPE, seed=seed, backward=lambda m, x: _backward(m, x.to(dtype)))


def _backward(model: nn.Module, x: Tensor) -> None:
    loss(model, x).backward()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """Far from its minimum for long."""
    return (model(x) - x[..., :3]).square().sum((1, 2)).mean()


def resumed(
    model: nn.Module, optimizer: Optimizer, kind: type[Optimizer] | None = None, saved: Any = None, **settings
):
    """A new optimizer that goes on where another one stopped, or from what was saved of it."""
    other, into = made(kind or type(optimizer), dtype=next(model.parameters()).dtype, **settings)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    into.load_state_dict(copy.deepcopy(optimizer.state_dict()) if saved is None else saved)
    return other, into

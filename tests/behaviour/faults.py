"""Small models of every family of layers, and the faults that a run of them can meet."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from ingot import HealthWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it uses torch.jit when it is imported
    from torch_geometric.nn.dense.linear import Linear as GraphLinear


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Scale(nn.Module):
    """A parameter that belongs to no layer."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


# For every registered class: modules to make, each with the shape of a sample.
LAYERS: dict[str, list[tuple[Callable[[], nn.Module], tuple[int, ...]]]] = {
    "torch.nn.modules.linear.Linear": [
        (lambda: nn.Linear(4, 3), (4,)),
        (lambda: nn.Linear(4, 3, bias=False), (2, 4)),
    ],
    "torch_geometric.nn.dense.linear.Linear": [(lambda: GraphLinear(4, 3), (4,))],
    "transformers.pytorch_utils.Conv1D": [(lambda: Conv1D(3, 4), (2, 4))],
    "torch.nn.modules.conv.Conv1d": [
        (lambda: nn.Conv1d(2, 3, 2), (2, 3)),
        (lambda: nn.Conv1d(4, 6, 2, groups=2), (4, 3)),
    ],
    "torch.nn.modules.conv.Conv2d": [
        (lambda: nn.Conv2d(2, 3, 2), (2, 3, 3)),
        (lambda: nn.Conv2d(2, 4, 2, groups=2, bias=False), (2, 3, 3)),
    ],
    "torch.nn.modules.conv.Conv3d": [(lambda: nn.Conv3d(1, 2, 2), (1, 2, 3, 2))],
    "torch.nn.modules.conv.ConvTranspose1d": [(lambda: nn.ConvTranspose1d(4, 2, 2, groups=2), (4, 2))],
    "torch.nn.modules.conv.ConvTranspose2d": [(lambda: nn.ConvTranspose2d(2, 2, 2), (2, 2, 2))],
    "torch.nn.modules.conv.ConvTranspose3d": [(lambda: nn.ConvTranspose3d(2, 1, 2), (2, 1, 2, 1))],
    "torch.nn.modules.sparse.Embedding": [(lambda: nn.Embedding(6, 3), (2,))],
    "torch.nn.modules.activation.MultiheadAttention": [(SelfAttention, (2, 4))],
}


class Net(nn.Module):
    """A layer of some family, a module that AdamW trains, and a linear layer."""

    def __init__(self, layer: nn.Module, others: type[nn.Module], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape
        features = layer(self.samples(1)).numel()
        self.other = Scale(features) if others is Scale else nn.LayerNorm(features, bias=False)
        self.head = nn.Linear(features, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.layer(x).flatten(1)).tanh())

    def samples(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        if isinstance(self.layer, nn.Embedding):
            return torch.randint(self.layer.num_embeddings, (count, *self.shape), generator=generator)
        return torch.randn(count, *self.shape, generator=generator).to(next(self.layer.parameters()).dtype)


def net(family: str, variant: int = 0, others: type[nn.Module] = nn.LayerNorm) -> Net:
    torch.manual_seed(0)
    make, shape = LAYERS[family][variant]
    return Net(make(), others, shape)


def layer_of(parameter: str) -> str:
    """What reports call the layer of a parameter, or the parameter if AdamW trains it."""
    return parameter if parameter.startswith("other") else re.sub(r"[._](weight|bias)$", "", parameter)


# --- Faults -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where (the name of a module or parameter, if that matters), and when."""

    kind: str
    value: float = 0.0
    place: str = ""
    first: int = 0
    count: int = 1

    def is_at(self, step: int) -> bool:
        return self.first <= step < self.first + self.count

    @property
    def is_finite(self) -> bool:
        return isfinite(self.value)

    def loss(self, model: Net, x: Tensor) -> Tensor:
        """The mean squared distance of outputs from targets of 1."""
        target = torch.ones(len(x), 2, dtype=next(model.parameters()).dtype)
        if self.kind == "input":
            x = _spiked(x, self.value)
        elif self.kind == "zero inputs":
            x = torch.zeros_like(x)
        elif self.kind == "empty":
            x, target = x[:0], target[:0]
        elif self.kind == "target":
            target = _spiked(target, self.value)
        with self._within(model):
            loss = (model(x) - target).square().sum(1).mean()
        return self.value * loss if self.kind == "loss" else loss

    def spoil_gradients(self, model: Net) -> None:
        """What comes after the backward pass."""
        if self.kind == "parameter":
            p = dict(model.named_parameters())[self.place]
            p.grad = _spiked(p.grad, self.value)

    @contextmanager
    def _within(self, model: Net) -> Iterator[None]:
        """A fault within the model, for one forward pass."""
        hooks: dict[str, Callable[..., Any]] = {
            "activation": lambda module, args, output: _spiked(output, self.value),
            "gradient": lambda module, args, output: _with_spiked_gradient(output, self.value),
        }
        handle: RemovableHandle | None = None
        if self.kind in hooks:
            handle = model.get_submodule(self.place).register_forward_hook(hooks[self.kind])
        yield
        if handle is not None:
            handle.remove()


NO_FAULT = Fault("none")


def _spiked(tensor: Tensor, value: float) -> Tensor:
    """A copy with another first entry."""
    spiked = tensor.clone(memory_format=torch.contiguous_format)
    spiked.view(-1)[0] = value
    return spiked


def _with_spiked_gradient(output: Tensor, value: float) -> Tensor:
    output.register_hook(lambda gradient: _spiked(gradient, value))
    return output


# --- Reports ----------------------------------------------------------------------------------------------


@contextmanager
def reports() -> Iterator[list[str]]:
    """What was said of the run's health within."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
    assert {warning.category for warning in said} <= {HealthWarning}, [str(w.message) for w in said]
    texts += [str(warning.message) for warning in said]


def skipped(texts: list[str]) -> Counter[str]:
    """How often reports name which layers as those whose factors were not updated."""
    return _named(texts, "the factors of (.*) were not updated")


def dropped(texts: list[str]) -> Counter[str]:
    """How often reports name which layers or parameters as those whose gradients were dropped."""
    return _named(texts, "the gradient of (.*) was taken for zero")


def _named(texts: list[str], pattern: str) -> Counter[str]:
    matches = filter(None, (re.match(pattern, text) for text in texts))
    return Counter(name for match in matches for name in re.findall("'([^']*)'", match[1]))

"""Optimizers of torch and of other packages, each for all parameters of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class UnsuitableError(ValueError):
    """An optimizer has nothing to train in a model: it does not know the kinds of its layers."""


class Together(Optimizer):
    """Optimizers of one model's different parameters as one: schedulers and checkpoints see all of them."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self._join()

    def _join(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state.clear()
        for part in self.parts:
            self.state.update(part.state)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of each part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
            self.state.update(part.state)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The parts' own."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint of the same parts."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._join()


def with_adamw(optimizer: Optimizer, model: nn.Module, lr: float) -> Optimizer:
    """AdamW beside an optimizer that leaves some parameters untrained."""
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    rest = [p for p in model.parameters() if p.requires_grad and p not in trained]
    return Together(optimizer, torch.optim.AdamW(rest, lr=lr)) if rest else optimizer


def muon(model: nn.Module, lr: float = 1e-3, **settings: Any) -> Optimizer:
    """Muon on the weights of linear layers, which are all that it takes, AdamW on the rest."""
    layers = (module for module in model.modules() if isinstance(module, nn.Linear))
    weights = list(dict.fromkeys(layer.weight for layer in layers if layer.weight.requires_grad))
    if not weights:
        raise UnsuitableError("Muon trains the weights of linear layers, and this model has none")
    return with_adamw(torch.optim.Muon(weights, lr=lr, **settings), model, lr)


def soap(model: nn.Module, **settings: Any) -> Optimizer:
    """SOAP of pytorch_optimizer."""
    return quietly("pytorch_optimizer").SOAP(model.parameters(), **settings)


def shampoo(model: nn.Module, **settings: Any) -> Optimizer:
    """Shampoo of pytorch_optimizer; without momentum, which it would precondition again and again."""
    return quietly("pytorch_optimizer").Shampoo(model.parameters(), **settings)


def official_singd(
    model: nn.Module, lr: float = 1e-3, structure: str | tuple[str, str] = "dense", **settings: Any
) -> Optimizer:
    """The paper's own package, with AdamW on what it leaves untrained."""
    structures = (structure, structure) if isinstance(structure, str) else structure
    settings = {"structures": structures, "warn_unsupported": False, **settings}
    package = quietly("singd.optim.optimizer").SINGD
    if not any(isinstance(module, package.SUPPORTED_MODULES) for module in model.modules()):
        raise UnsuitableError("singd trains linear layers and convolutions, and this model has none")
    optimizer = package(model, lr=lr, **settings)
    return with_adamw(optimizer, model, lr)


def quietly(module: str) -> Any:
    """A package's module, without what it warns of while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(module)

"""All optimizers that the laboratory knows, by the text that asks for one.

``SINGD``, ``SINGD:diagonal``, ``SINGD:dense/diagonal`` with a structure for each side, and settings behind
it: ``SINGD:diagonal lr=2e-3 damping=0.01``. The word ``paper`` asks for the paper's step.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

import ingot
from ingot.lab import peers
from ingot.lab.naming import find, suggestion

Settings: TypeAlias = Mapping[str, Any]


class Range(NamedTuple):
    """Where a search looks for a setting: between two numbers, on a logarithmic scale or not."""

    low: float
    high: float
    log: bool = True


@dataclass(frozen=True)
class Kind:
    """An optimizer in the registry.

    Attributes:
        make: Makes it from a model and settings.
        defaults: Settings where they differ from its own.
        space: What a search may tune.
        paper_space: The same with the paper's step.
        structured: Whether it takes a structure, and all that ingot's optimizers have in common.
        package: What must be installed for it, beside torch.
    """

    make: Callable[..., Optimizer]
    defaults: Settings = field(default_factory=dict)
    space: Mapping[str, Range] = field(default_factory=dict)
    paper_space: Mapping[str, Range] = field(default_factory=dict)
    structured: bool = False
    package: str = ""

    @property
    def is_there(self) -> bool:
        """Whether it can be made here."""
        return not self.package or find_spec(self.package) is not None


def _first_order(make: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    return lambda model, **settings: make(model.parameters(), **settings)


def _adamw(model: nn.Module, beta2: float = 0.999, **settings: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, beta2), **settings)


# The paper's table: step size, weight decay, damping, the preconditioner's step size, Riemannian momentum.
# AdamW's damping is its eps, and its preconditioner's step size 1 - β₂. Momentum is 0.9 for all of them.
# All whose steps are on AdamW's scale have one range of learning rates. The default step is bounded in units
# of the weights, which is searched in the place of what makes no difference that counts to it: the factors'
# step size and Riemannian momentum.
LR, WEIGHT_DECAY = Range(3e-4, 3e-2), Range(1e-5, 1e-1)
CURVATURE = {
    "lr": LR,
    "weight_decay": WEIGHT_DECAY,
    "damping": Range(1e-2, 10.0),
    "max_relative_step": Range(1e-2, 1e-1),
}
# The paper's step has another scale, and its damping is an absolute number.
OF_PAPER = {
    "lr": Range(1e-4, 1e-1),
    "weight_decay": WEIGHT_DECAY,
    "damping": Range(1e-4, 1.0),
    "precond_lr": Range(1e-3, 0.5),
}
RIEMANNIAN = OF_PAPER | {"precond_momentum": Range(0.0, 0.9, log=False)}

OPTIMIZERS: Mapping[str, Kind] = {
    "SGD": Kind(
        _first_order(torch.optim.SGD),
        {"lr": 0.05, "momentum": 0.9},
        {"lr": Range(1e-3, 1.0), "weight_decay": WEIGHT_DECAY},
    ),
    "AdamW": Kind(
        _adamw,
        {"lr": 1e-3},
        {
            "lr": LR,
            "weight_decay": WEIGHT_DECAY,
            "eps": Range(1e-9, 1e-3),
            "beta2": Range(0.9, 0.9999, log=False),
        },
    ),
    "KFAC": Kind(ingot.KFAC, {}, CURVATURE, OF_PAPER, structured=True),
    "IKFAC": Kind(ingot.IKFAC, {}, CURVATURE, OF_PAPER, structured=True),
    "INGD": Kind(ingot.INGD, {}, CURVATURE, RIEMANNIAN, structured=True),
    "SINGD": Kind(ingot.SINGD, {}, CURVATURE, RIEMANNIAN, structured=True),
    "control": Kind(  # SINGD's step without its curvature, to see what this is worth
        ingot.SINGD,
        {"structure": "diagonal", "precond_lr": 0.0, "precond_warmup": 0},
        {"lr": LR, "weight_decay": WEIGHT_DECAY},
        structured=True,
    ),
    "Muon": Kind(peers.muon, {"lr": 1e-3}, {"lr": LR, "weight_decay": WEIGHT_DECAY}),
    "SOAP": Kind(
        peers.soap, {"lr": 1e-3}, {"lr": LR, "weight_decay": WEIGHT_DECAY}, package="pytorch_optimizer"
    ),
    "Shampoo": Kind(
        peers.shampoo, {"lr": 1e-3}, {"lr": LR, "weight_decay": WEIGHT_DECAY}, package="pytorch_optimizer"
    ),
    "official": Kind(
        peers.official_singd,
        {"lr": 1e-3},
        {"lr_cov" if name == "precond_lr" else name: place for name, place in OF_PAPER.items()},
        package="singd",
    ),
}
"""The registry: a line here is all that another optimizer needs."""

if not hasattr(torch.optim, "Muon"):
    OPTIMIZERS = {name: kind for name, kind in OPTIMIZERS.items() if name != "Muon"}


@dataclass(frozen=True)
class Chosen:
    """An optimizer with its settings, as a text asked for it."""

    name: str
    label: str
    settings: Settings

    @property
    def kind(self) -> Kind:
        """Its entry in the registry."""
        return OPTIMIZERS[self.name]

    @property
    def space(self) -> dict[str, Range]:
        """What a search tunes: settings that were not given."""
        is_papers = self.settings.get("relative_damping") is False
        space = self.kind.paper_space if is_papers else self.kind.space
        return {name: place for name, place in space.items() if name not in self.settings}

    def make(self, model: nn.Module, common: Settings | None = None) -> Optimizer:
        """The optimizer of a model; ``common`` are a recipe's settings for ingot's own optimizers."""
        shared = dict(common or {}) if self.kind.structured else {}
        try:
            return self.kind.make(model, **{**shared, **self.kind.defaults, **self.settings})
        except TypeError as error:
            raise ValueError(f"{self.label}: {error}") from error

    def with_settings(self, settings: Settings) -> Chosen:
        """The same with some other settings."""
        return replace(self, settings={**self.settings, **settings})


def choose(text: str) -> Chosen:
    """Read what is asked for; a ValueError that says what could be if it makes no sense."""
    head, *words = text.split()
    name, _, structure = head.partition(":")
    kind = find(name, OPTIMIZERS, "optimizer")
    name = next(known for known, its_kind in OPTIMIZERS.items() if its_kind is kind)
    if not kind.is_there:
        raise ValueError(f"{name} needs the package {kind.package}: pip install {kind.package}")
    settings: dict[str, Any] = {}
    for word in words:
        settings |= _setting(name, kind, word)
    if structure:
        if not kind.structured and name != "official":
            raise ValueError(f"{name} has no structure; SINGD and its family have: write SINGD:{structure}")
        settings["structure"] = _structure(structure, kind.structured)
    return Chosen(name, f"{name} {structure}".strip() + "".join(f" {word}" for word in words), settings)


def _structure(text: str, ours: bool) -> str | tuple[str, str]:
    of_k, _, of_c = text.partition("/")
    if ours:
        for side in filter(None, (of_k, of_c)):
            if side != "auto":
                ingot.structures.parse(side)  # which says what is wrong with it
    return (of_k, of_c) if of_c else of_k


def _setting(name: str, kind: Kind, word: str) -> dict[str, Any]:
    if word == "paper" and kind.structured:
        return dict(ingot.PAPER)
    key, equals, value = word.partition("=")
    if not equals or not value:
        raise ValueError(f"{word!r} is no setting of {name}: write lr=2e-3, without spaces around '='")
    if kind.structured and key not in ingot_settings():
        raise ValueError(f"{name} has no setting {key!r}{suggestion(key, ingot_settings())}")
    if key == "factor_dtype" and isinstance(dtype := getattr(torch, value, None), torch.dtype):
        return {key: dtype}
    try:
        return {key: literal_eval(value)}
    except (ValueError, SyntaxError):
        return {key: value}


def ingot_settings() -> list[str]:
    """The keywords of ingot's optimizers."""
    annotations = ingot.NaturalGradient.__init__.__annotations__
    return [key for key in annotations if key not in ("return", "model", "params", "structure")]

"""A model as an optimizer sees it: names of parameters, what holds them, and layers."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from ingot.capture import Tap
from ingot.layers import Family, LayerAdapter, family_of
from ingot.rules import Pair
from ingot.statistics import Pending


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of wrappers such as torch.compile's and DistributedDataParallel."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:  # torch.compile's, whose class is slow to import
            model = model.get_submodule("_orig_mod")
        else:
            return model


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of the model runs as compiled code."""
    return any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in model.modules())


def names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by all their names, of which tied ones have several."""
    found: dict[str, nn.Parameter] = {}
    for name, module in _named_modules(model):
        own = ((key, p) for key, p in module._parameters.items() if p is not None)
        found |= {f"{name}.{key}" if name else key: p for key, p in own}
    return found


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once, by its first name."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in names(model).items():
        first.setdefault(parameter, name)
    return {name: parameter for parameter, name in first.items()}


Link: TypeAlias = tuple[Mapping[str, Any], str, Any]


def links(model: nn.Module) -> list[Link]:
    """What each module holds under which key: by these it is seen whether anything was replaced."""
    tables = (table for module in model.modules() for table in (module._modules, module._parameters))
    return [(table, key, value) for table in tables for key, value in table.items()]


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        yield name.replace("_orig_mod.", "").removesuffix("._orig_mod"), module


class Claim(NamedTuple):
    """A module's use of a weight."""

    name: str  # of the weight's layer: that of the module, and of the layer in it if it has several
    family: Family
    key: str
    adapter: LayerAdapter
    owner: nn.Module  # whose forward is hooked
    module: nn.Module  # whom the adapter asks

    @property
    def weight(self) -> nn.Parameter | None:
        return self.adapter.weight(self.module)


@dataclass
class Layer:
    """A preconditioned weight with its bias, and the modules that use them (several where tied)."""

    name: str
    adapter: LayerAdapter
    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None
    claims: list[Claim]
    taps: list[Tap] = field(default_factory=list)
    structures: Pair = field(init=False)  # of K and C, once the settings of the weight's group are known
    pending: Pending | None = None
    kept: Any = None  # products of the factors, until these change
    plan: Any = None  # how its step is taken, with these
    natural: list[Tensor] | None = None  # the coming step's natural gradients, if they are there before it
    layout: Any = None  # how the weight is shared out over processes, if it is
    whole: dict[str, Tensor] | None = None  # factors that are shared out, while all of them are here

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def uses(self) -> list[tuple[nn.Module, str]]:
        """Where the weight is used, to tell whether that changed."""
        return [(claim.owner, claim.key) for claim in self.claims]

    @property
    def shape(self) -> tuple[tuple[int, ...], int, int]:
        """The leading dimensions, d_o and d_i of weight and bias as one matrix."""
        lead, d_o, d_i = self.adapter.shape(self.module)
        return lead, d_o, d_i + (self.bias is not None)


Biases: TypeAlias = Mapping[Tensor, Tensor | None]
"""For weights of layers: the bias that belongs to their matrix, or None."""


def find_layers(
    model: nn.Module, trained: Container[Tensor], decided: Biases | None = None
) -> dict[nn.Parameter, Layer]:
    """The layers of known families whose weights are among those trained, by weight.

    A bias belongs to its weight's matrix if both are to be trained or both are frozen; otherwise it is a
    parameter of its own. That is decided once, since factors fit one of the two only.
    """
    decided = decided or {}
    _refuse_sparse(model, trained)
    claims: dict[nn.Parameter, list[Claim]] = {}
    for claim in _claims(model):
        weight = claim.weight
        if weight is not None and weight in trained and not weight.is_complex():  # for which there is no rule
            claims.setdefault(weight, []).append(claim)
    layers: dict[nn.Parameter, Layer] = {}
    biases: set[nn.Parameter] = set()
    for weight, found in claims.items():
        # An embedding leaves no choice of structure, so that a tied output layer comes first.
        first = next((claim for claim in found if claim.adapter.input_structure is None), found[0])
        bias = first.adapter.bias(first.module)
        if bias is not None:
            alike = bias.requires_grad == weight.requires_grad
            joined = decided[weight] is bias if weight in decided else alike
            bias = bias if joined and bias in trained and bias not in biases else None
        if bias is not None:
            biases.add(bias)
        same = [claim for claim in found if _same_matrix(claim, first)]
        layers[weight] = Layer(first.name, first.adapter, first.module, weight, bias, same)
    return layers


def _refuse_sparse(model: nn.Module, trained: Container[Tensor]) -> None:
    for name, module in _named_modules(model):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight in trained:
            raise ValueError(f"the embedding {name!r} makes sparse gradients: build it with sparse=False")


def _claims(model: nn.Module) -> Iterator[Claim]:
    for name, module in _named_modules(model):
        family = family_of(module)
        if family is None:
            continue
        for key, (adapter, described) in family.layers(module).items():
            yield Claim(".".join(filter(None, (name, key))), family, key, adapter, module, described)


def _same_matrix(claim: Claim, first: Claim) -> bool:
    """Whether two adapters see a weight as the same matrix or as each other's transpose."""
    if type(claim.adapter).weight_matrix is not type(first.adapter).weight_matrix:
        return False
    return claim.adapter.shape(claim.module)[0] == first.adapter.shape(first.module)[0]

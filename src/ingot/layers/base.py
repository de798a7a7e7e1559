"""Layers in one normal form, and the registry that finds the adapter of a module.

Every layer is seen as a matrix W ``[..., d_o, d_i]`` that meets inputs a ``[..., batch, shared, d_i]`` and
sends back output gradients g ``[..., batch, shared, d_o]``. ``shared`` counts the places where one sample
uses the weight: positions of a sequence or of an image; it is 1 without weight sharing. Leading dimensions
are separate matrices with factor pairs of their own, such as the groups of a convolution.

Kronecker factors follow from that form, with N samples, R places, and g the gradient of each sample's loss:

    expand   U = mean over samples and places of a aᵀ     G = mean over samples of Σ over places of g gᵀ
    reduce   the same after a was averaged and g summed over the places (R = 1)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn


class LayerAdapter(ABC):
    """How one family of modules looks in the normal form. Adapters are stateless."""

    @abstractmethod
    def shape(self, module: Any) -> tuple[tuple[int, ...], int, int]:
        """The leading dimensions, d_o and d_i (without bias) of the weight as a matrix."""

    @abstractmethod
    def inputs(self, module: Any, x: Tensor) -> Tensor:
        """A forward input as ``[..., batch, shared, d_i]``."""

    @abstractmethod
    def output_gradients(self, module: Any, g: Tensor) -> Tensor:
        """A gradient of the output as ``[..., batch, shared, d_o]``."""

    def weight(self, module: nn.Module) -> nn.Parameter | None:
        """The weight if it is a parameter of the module's own (not computed, as by a parametrization)."""
        return module._parameters.get("weight")

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        return module._parameters.get("bias")

    def forward_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The captured input among the arguments of a forward call."""
        x: Tensor = args[0] if args else kwargs["input"]
        return x

    def matrix(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Weight and bias (or their gradients) as one matrix ``[..., d_o, d_i (+ 1)]``, the bias last."""
        lead, d_o, d_i = self.shape(module)
        matrix = weight.reshape(*lead, d_o, d_i)
        return matrix if bias is None else torch.cat((matrix, bias.reshape(*lead, d_o, 1)), dim=-1)

    def parts(self, module: nn.Module, matrix: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """The inverse of ``matrix``, in the shapes of weight and bias."""
        if bias is None:
            return [matrix.reshape(weight.shape)]
        return [matrix[..., :-1].reshape(weight.shape), matrix[..., -1].reshape(bias.shape)]


_ADAPTERS: dict[str, LayerAdapter] = {}

A = TypeVar("A", bound=type[LayerAdapter])


def register(*names: str) -> Any:
    """Make a family of modules known: a decorator for its adapter.

    Names are those of module classes with their packages, such as ``"torch.nn.modules.linear.Linear"``:
    text, so that the layers of other libraries are known without importing these.
    """

    def decorate(adapter: A) -> A:
        _ADAPTERS.update(dict.fromkeys(names, adapter()))
        return adapter

    return decorate


def registered() -> dict[str, LayerAdapter]:
    """All adapters by the class name they serve."""
    return dict(_ADAPTERS)


def adapter_for(module: nn.Module) -> LayerAdapter | None:
    """The adapter of a module's class or of the nearest base class that has one and whose forward it kept."""
    for cls in type(module).__mro__:
        adapter = _ADAPTERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if adapter is not None:
            # A subclass with a forward of its own may compute anything.
            return adapter if type(module).forward is cls.__dict__.get("forward") else None
    return None


def input_rows(a: Tensor, approx: str) -> Tensor:
    """The rows whose mean outer product is U."""
    return a.flatten(-3, -2) if approx == "expand" else a.mean(-2)


def gradient_rows(g: Tensor, approx: str) -> Tensor:
    """The rows whose outer products sum up to G, but for the scale of the loss."""
    return g.flatten(-3, -2) if approx == "expand" else g.sum(-2)

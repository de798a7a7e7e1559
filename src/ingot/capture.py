"""From forward and backward to statistics: what a layer saw, summed up until the next step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ingot.layers import LayerAdapter, adapter_for, gradient_rows, input_rows
from ingot.rules import Factor, Pair, Statistics


class Sums(NamedTuple):
    """Unscaled sums over one or more micro-batches; scales come last, when all counts are known.

    Gradients of a loss that is a mean carry 1 / (number of its terms) each. Scaling the sum of their outer
    products by the total number of terms gives the same G for one batch and for its micro-batches.
    """

    k: Tensor
    c: Tensor
    square_a: Tensor
    square_g: Tensor
    rows: int  # how many outer products U is the mean of
    terms: int  # how many terms the loss is the mean of

    def plus(self, other: Sums | None) -> Sums:
        """Both together."""
        if other is None:
            return self
        pairs: Any = zip(self, other, strict=True)
        return Sums(*(a + b for a, b in pairs))

    def scaled(self, d_i: int, d_o: int, loss_is_mean: bool) -> Statistics:
        """U as a mean, G in the scale of the whole loss."""
        of_g = self.terms if loss_is_mean else 1
        return Statistics(
            k=self.k / self.rows,
            c=self.c * of_g,
            trace_u=self.square_a / (self.rows * d_i),
            trace_g=self.square_g * (of_g / d_o),
        )


@dataclass
class Layer:
    """A preconditioned weight with its bias, and the modules that use them (several where tied)."""

    name: str
    adapter: LayerAdapter
    modules: list[nn.Module]
    weight: nn.Parameter
    bias: nn.Parameter | None
    structures: Pair = field(init=False)  # of K and C, once the settings of the weight's group are known
    pending: Sums | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def shape(self) -> tuple[tuple[int, ...], int, int]:
        """The leading dimensions, d_o and d_i of weight and bias as one matrix."""
        lead, d_o, d_i = self.adapter.shape(self.modules[0])
        return lead, d_o, d_i + (self.bias is not None)

    def rows(self, module: nn.Module, x: Tensor, g: Tensor, approx: str) -> tuple[Tensor, Tensor, int, int]:
        """Input rows ``[..., n, d_i]`` and gradient rows ``[..., n, d_o]`` of one use, batch and places."""
        a, g = self.adapter.inputs(module, x), self.adapter.output_gradients(module, g)
        batch, places = g.shape[-3:-1]
        a, g = input_rows(a, approx), gradient_rows(g, approx)
        if self.bias is not None:
            # The bias is the weight of a constant input, which a tied module without it does not have.
            constant = float(self.adapter.bias(module) is self.bias)
            a = torch.cat((a, a.new_full((*a.shape[:-1], 1), constant)), dim=-1)
        return a, g, batch, places


def find_layers(model: nn.Module, trained: set[Tensor]) -> dict[nn.Parameter, Layer]:
    """The layers of known families whose weights are trained, by weight."""
    layers: dict[nn.Parameter, Layer] = {}
    for name, module in model.named_modules():
        adapter = adapter_for(module)
        weight = adapter.weight(module) if adapter is not None else None
        if adapter is None or weight is None or weight not in trained:
            continue
        if weight in layers:
            layers[weight].modules.append(module)
            continue
        bias = adapter.bias(module)
        layers[weight] = Layer(name, adapter, [module], weight, bias if bias in trained else None)
    return layers


def summed(
    statistic: Callable[[Factor, Tensor], Tensor],
    factors: tuple[Factor, Factor],
    a: Tensor,
    g: Tensor,
    terms: int,
) -> Sums:
    """The statistics of rows ``a`` and ``g``, not yet divided by anything."""
    k, c = factors
    return Sums(
        k=statistic(k, a.mT),
        c=statistic(c, g.mT),
        square_a=a.square().sum((-2, -1)).unsqueeze(-1),
        square_g=g.square().sum((-2, -1)).unsqueeze(-1),
        rows=a.shape[-2],
        terms=terms,
    )


class Owner(Protocol):
    """Whom hooks report to."""

    def wants_statistics(self, module: nn.Module) -> bool:
        """Whether the next step needs this module's statistics."""

    def collect(self, module: nn.Module, x: Tensor, g: Tensor) -> None:
        """Take a module's input and the gradient of its output."""


class _Probe(torch.autograd.Function):
    """The identity on a layer's output; its backward meets the output's gradient beside the input.

    The output is copied because an activation may overwrite it in place. The input is saved by autograd's
    own means, so activation checkpointing can drop and recompute it.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, sink: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.sink = sink
        return output.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.sink(x.detach(), g.detach())
        return g, None, None


class CaptureHook:
    """A forward hook that puts a probe behind a module while its optimizer wants statistics.

    A copy of it, made with a copy of the model or by pickling one, is inert: it belongs to no optimizer.
    """

    def __init__(self, adapter: LayerAdapter | None = None, owner: Owner | None = None) -> None:
        self._adapter = adapter
        self._owner = weakref.ref(owner) if owner is not None else None

    def __reduce__(self) -> tuple[type[CaptureHook], tuple[()]]:
        return CaptureHook, ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        owner = self._owner() if self._owner is not None else None
        if owner is None or self._adapter is None or not torch.is_grad_enabled():
            return None
        if not (isinstance(output, Tensor) and output.requires_grad and owner.wants_statistics(module)):
            return None
        x = self._adapter.forward_input(args, kwargs).detach()
        return _Probe.apply(  # type: ignore[no-untyped-call]
            output, x, lambda a, g: owner.collect(module, a, g)
        )


def install(module: nn.Module, adapter: LayerAdapter, owner: Owner) -> RemovableHandle:
    """Let a module's statistics reach ``owner``, which it does not keep alive."""
    return module.register_forward_hook(CaptureHook(adapter, owner), with_kwargs=True)

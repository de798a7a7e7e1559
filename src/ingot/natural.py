"""Natural gradients on their way to momenta, by products K Kᵀ and C Cᵀ that are kept between updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ingot import adamw as adamw_steps
from ingot.distributed import local
from ingot.family import Rule
from ingot.groups import Group
from ingot.model import Layer
from ingot.precision import computable, computing, keeping
from ingot.rules import Pair, Product, Section
from ingot.stability import Rates
from ingot.structures.base import is_by_columns
from ingot.structures.diagonal import Squares


class Scales(NamedTuple):
    """Diagonal K Kᵀ and C Cᵀ as numbers that the rows and columns of a gradient are multiplied with."""

    rows: Tensor
    columns: Tensor
    bias: Tensor | None


KEPT_BY = ("cache_products", "precond_every")
"""The settings by which products are kept, beside the memory that there is."""


class Kept(NamedTuple):
    """The products of a layer's factors, and what they were made from."""

    structures: Pair
    settings: tuple[Any, ...]  # of the group, by which it was decided for how long they are kept
    sources: tuple[Tensor, Tensor]
    versions: tuple[int, int]
    k: Product
    c: Product
    scales: Scales | None
    sections: list[Section]  # of K Kᵀ: its columns in parts that do not mix, the bias in the last one

    @classmethod
    def of(
        cls, layer: Layer, rule: Rule, group: Group, sources: tuple[Tensor, Tensor], kept_for: int
    ) -> Kept:
        """Make them, for so many steps."""
        k, c = products_of(rule, layer.structures, *sources, kept_for)
        versions, both = (sources[0]._version, sources[1]._version), scales(k, c, layer.bias)
        sections = (layer.bias is not None and k.sections) or [Section(0, layer.structures[0].dim, k)]
        settings = tuple(group[name] for name in KEPT_BY)
        return cls(layer.structures, settings, sources, versions, k, c, both, sections)

    def is_for(self, structures: Pair, group: Group) -> bool:
        """Whether structures and settings are still the same."""
        return self.structures is structures and self.settings == tuple(group[name] for name in KEPT_BY)

    def is_of(self, k: Tensor, c: Tensor) -> bool:
        """Whether factors are still the same."""
        same = self.sources[0] is k and self.sources[1] is c
        return same and self.versions == (k._version, c._version)

    def has_room_for(self, k: Tensor, c: Tensor) -> bool:
        """Whether products of these factors may take the place of the others'."""
        alike = all(_kind(old) == _kind(new) for old, new in zip(self.sources, (k, c), strict=True))
        return alike and self.k.square.numel > 0 and self.c.square.numel > 0

    def taking(self, k: Tensor, c: Tensor, bias: Tensor | None) -> Kept:
        """The products of other factors, in the same memory: what was planned with it stays good."""
        for product, a in ((self.k, k), (self.c, c)):
            product.entries.copy_(product.square.of(computable(a)))
        both = scales(self.k, self.c, bias)
        return self._replace(sources=(k, c), versions=(k._version, c._version), scales=both)


def _kind(factor: Tensor) -> tuple[Any, ...]:
    return factor.shape, factor.dtype, factor.device


def products_of(
    rule: Rule, structures: Pair, k: Tensor, c: Tensor, kept_for: int = 0
) -> tuple[Product, Product]:
    """K Kᵀ and C Cᵀ of given factors, for so many steps."""
    squares = rule.squares(structures, kept_for)
    pairs = zip(squares, (k, c), strict=True)
    of_k, of_c = (Product(q, q.of(computable(a)) if q.numel else a) for q, a in pairs)
    return of_k, of_c


def scales(k: Product, c: Product, bias: Tensor | None) -> Scales | None:
    """What is left of the products of a single matrix where both are diagonal."""
    both_are = isinstance(k.square, Squares) and isinstance(c.square, Squares)
    if not both_are or k.entries.ndim != 1:
        return None
    if bias is None:
        return Scales(c.entries.unsqueeze(-1), k.entries, None)
    return Scales(c.entries.unsqueeze(-1), k.entries[:-1], (c.entries * k.entries[-1]).view(bias.shape))


class Part(NamedTuple):
    """A parameter of a layer in its step: what of it is in this process."""

    p: nn.Parameter
    state: dict[str, Any]
    group: Group
    rates: Rates

    @property
    def value(self) -> Tensor:
        """What is moved."""
        return local(self.p)

    @property
    def momentum(self) -> Tensor:
        """The momentum so far."""
        return local(self.state["momentum_buffer"])

    def begin(self) -> None:
        """Make sure that there is a momentum, if there is to be one."""
        if "exp_avg" in self.state:  # AdamW trained it for a while
            for key in adamw_steps.KEYS & self.state.keys():
                del self.state[key]
        if self.group["momentum"] and "momentum_buffer" not in self.state:
            self.state["momentum_buffer"] = torch.zeros_like(self.p, dtype=keeping(self.p.dtype))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The parameter, its gradient and momentum, where it has all of them."""
        assert self.p.grad is not None
        return self.p.detach(), self.p.grad, self.state["momentum_buffer"]

    @property
    def is_simple(self) -> bool:
        """Whether its step is that of the default settings, and all its tensors have the same dtype."""
        (p, state, group, _), gradient = self, self.p.grad
        momentum = state.get("momentum_buffer")
        if momentum is None or gradient is None or isinstance(group["momentum"], Tensor):
            return False
        if group["maximize"] or not (group["normalize_step"] and group["decoupled_weight_decay"]):
            return False
        same = p.dtype == gradient.dtype == momentum.dtype == computing(p.dtype)
        return same and bool(group["momentum"])

    @property
    def decay(self) -> float:
        """The weight decay where the paper has it: in the natural gradient."""
        return 0.0 if self.group["decoupled_weight_decay"] else float(self.group["weight_decay"])

    def with_momentum(self, natural: Tensor) -> Tensor:
        """What the momentum will be after this natural gradient, in its place if that is memory of its own.

        The old momentum stays as it is.
        """
        if self.decay:
            natural.add_(self.value, alpha=self.decay)
        rate = self.rates.momentum
        if isinstance(rate, Tensor):
            return natural.addcmul_(self.momentum, rate)
        if not rate:
            return natural
        if owns_memory(natural):
            return natural.add_(self.momentum, alpha=rate)
        return torch.add(natural, self.momentum, alpha=rate)

    def keep(self, momentum: Tensor) -> Tensor:
        """Put a new momentum in the place of the old one."""
        if not self.group["momentum"]:
            return momentum
        old = self.momentum
        alike = momentum.dtype == old.dtype and momentum.stride() == old.stride()
        if alike and old is self.state["momentum_buffer"] and owns_memory(momentum):
            self.state["momentum_buffer"] = momentum  # no need to write it once more
            return momentum
        return old.copy_(momentum)


def gradient_of(p: Tensor, group: Group) -> Tensor:
    """A parameter's gradient in this process, of what is made smaller; zeros if there is none."""
    gradient = torch.zeros_like(local(p)) if p.grad is None else local(p.grad)
    return -gradient if group["maximize"] else gradient


def owns_memory(tensor: Tensor) -> bool:
    """Whether a tensor is all that its memory is for."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def natural_gradient(layer: Layer, kept: Kept, gradients: list[Tensor]) -> list[Tensor]:
    """C Cᵀ ∇W K Kᵀ of the weight and of its bias, from their gradients, in memory of their own."""
    dtype, adapter = computing(kept.k.entries.dtype), layer.adapter
    weight, *bias = (g if g.dtype == dtype else g.to(dtype) for g in gradients)
    matrix = adapter.weight_matrix(layer.module, weight)
    natural, *last = natural_matrix(kept, (matrix, *bias))
    return [adapter.matrix_weight(layer.module, natural, layer.weight), *last]


def natural_matrix(kept: Kept, gradients: tuple[Tensor, ...]) -> list[Tensor]:
    """C Cᵀ ∇W K Kᵀ of a matrix, and of the bias beside it if there is one."""
    matrix, *bias = gradients
    if kept.scales is not None:
        rows, columns, of_bias = kept.scales
        return [(matrix * rows).mul_(columns), *(g * of_bias for g in bias if of_bias is not None)]
    natural, last = torch.empty_like(matrix), []
    column = bias[0].view(*matrix.shape[:-1], 1) if bias else None
    for start, stop, product in kept.sections:
        x = columns_of(matrix, column, start, stop)
        x = kept.c.apply(x, torch.empty_like(x)).mT
        if stop <= matrix.shape[-1]:
            place = natural[..., start:stop].mT
            result = product.apply(x, place)
            if result is not place:
                place.copy_(result)
        else:
            both = product.apply(x, torch.empty_like(x)).mT
            natural[..., start:] = both[..., :-1]
            last = [both[..., -1].reshape(bias[0].shape)]
    return [natural, *last]


def columns_of(
    matrix: Tensor, bias: Tensor | None, start: int, stop: int, out: Tensor | None = None
) -> Tensor:
    """Some columns of a matrix with a bias beside it, stored by columns where the matrix is.

    They are put together, in ``out`` if that is given, where the bias is among several.
    """
    width = matrix.shape[-1]
    if stop <= width:
        return matrix if start == 0 and stop == width else matrix.narrow(-1, start, stop - start)
    assert bias is not None
    if start == width:
        return bias
    rest = matrix.narrow(-1, start, width - start)
    if is_by_columns(rest):
        return torch.cat((rest.mT, bias.mT), dim=-2, out=None if out is None else out.mT).mT
    return torch.cat((rest, bias), dim=-1, out=out)


def fused_descent(weights: list[Tensor], momenta: list[Tensor], length: float, decay: float) -> None:
    """W - length (m + decay / length W) in one pass: torch's SGD without momentum."""
    torch._fused_sgd_(
        weights,
        momenta,
        [],
        weight_decay=decay / length,
        momentum=0.0,
        lr=length,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )

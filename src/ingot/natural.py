"""Natural gradients on their way to momenta, by products K Kᵀ and C Cᵀ that are kept between updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ingot import adamw as adamw_steps
from ingot import rules
from ingot.distributed import local
from ingot.family import Rule
from ingot.groups import Group
from ingot.model import Layer
from ingot.precision import computable, computing, keeping
from ingot.rules import Pair, Product
from ingot.scalars import Number, number
from ingot.stability import greatest_agreement
from ingot.structures import SquarePart
from ingot.structures.diagonal import Squares


class Scales(NamedTuple):
    """Diagonal K Kᵀ and C Cᵀ as numbers that the rows and columns of a gradient are multiplied with."""

    rows: Tensor
    columns: Tensor
    bias: Tensor | None


class Kept(NamedTuple):
    """The products of a layer's factors, and what they were made from."""

    structures: Pair
    kept_for: int
    sources: tuple[Tensor, Tensor]
    versions: tuple[int, int]
    k: Product
    c: Product
    scales: Scales | None
    parts: tuple[SquarePart, SquarePart] | None  # K Kᵀ of the first columns, and of the last with the bias

    def is_of(self, structures: Pair, kept_for: int, k: Tensor, c: Tensor) -> bool:
        """Whether the factors are still the same."""
        same = self.structures is structures and self.kept_for == kept_for
        same = same and self.sources[0] is k and self.sources[1] is c
        return same and self.versions == (k._version, c._version)


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

    @property
    def value(self) -> Tensor:
        """What is moved."""
        return local(self.p)

    @property
    def gradient(self) -> Tensor:
        """Where to, but for its sign; zeros if there is none."""
        return torch.zeros_like(self.value) if self.p.grad is None else local(self.p.grad)

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
        group, momentum = self.group, self.state.get("momentum_buffer")
        if momentum is None or self.p.grad is None or isinstance(group["momentum"], Tensor):
            return False
        if group["maximize"] or not (group["normalize_step"] and group["decoupled_weight_decay"]):
            return False
        dtypes = {self.p.dtype, self.p.grad.dtype, momentum.dtype}
        return len(dtypes) == 1 and self.p.dtype == computing(self.p.dtype) and bool(group["momentum"])

    @property
    def rate(self) -> Number:
        """How much of the momentum stays at a step, α₂."""
        return number(self.group["momentum"])

    @property
    def lr(self) -> Number:
        """Its learning rate."""
        return number(self.group["lr"])

    @property
    def peak_lr(self) -> Number:
        """The highest one so far."""
        return number(self.group["peak_lr"])

    @property
    def longest_step(self) -> Number:
        """How much its entries may change by at the highest learning rate so far, in root mean square."""
        return self.peak_lr * greatest_agreement(self.rate)

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
        rate = self.rate
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


def owns_memory(tensor: Tensor) -> bool:
    """Whether a tensor is all that its memory is for."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def natural_gradient(layer: Layer, kept: Kept, gradients: list[Tensor]) -> list[Tensor]:
    """C Cᵀ ∇W K Kᵀ of the weight and of its bias, from their gradients, in memory of their own."""
    dtype, adapter = computing(kept.k.entries.dtype), layer.adapter
    weight, *bias = (g if g.dtype == dtype else g.to(dtype) for g in gradients)
    matrix = adapter.weight_matrix(layer.module, weight)
    natural, *last = natural_matrix(kept, (matrix, *bias))
    if natural.data_ptr() == weight.data_ptr():  # a structure of one's own may leave things as they are
        natural = natural.clone()
    return [adapter.matrix_weight(layer.module, natural, layer.weight), *last]


def natural_matrix(kept: Kept, gradients: tuple[Tensor, ...]) -> list[Tensor]:
    """C Cᵀ ∇W K Kᵀ of a matrix, and of the bias beside it if there is one."""
    k, c = kept.k, kept.c
    matrix, *bias = gradients
    if kept.scales is not None:
        rows, columns, of_bias = kept.scales
        return [torch.mul(matrix, rows).mul_(columns), *(g * of_bias for g in bias if of_bias is not None)]
    if not bias:
        return [rules.natural_gradient(k, c, matrix)]
    column = bias[0].view(*matrix.shape[:-1], 1)
    if kept.parts is not None:
        natural, beside = _in_parts(*kept.parts, c, matrix, column)
    else:
        both = rules.natural_gradient(k, c, _beside(matrix, column))
        natural, beside = both.split((matrix.shape[-1], 1), dim=-1)
    return [natural, beside.reshape(bias[0].shape)]


def _in_parts(
    first: SquarePart, last: SquarePart, c: Product, matrix: Tensor, column: Tensor
) -> tuple[Tensor, Tensor]:
    """The natural gradient where few columns mix with the bias: nothing large is put together or cut."""
    matrix, column = (c.apply(x, torch.empty_like(x)) for x in (matrix, column))
    of_first, of_last = Product(first.square, first.entries), Product(last.square, last.entries)
    if last.rows == 1:
        return of_first.apply_right(matrix), of_last.apply_right(column)
    both = of_last.apply_right(torch.cat((matrix[..., first.rows :], column), dim=-1))
    natural = matrix if first.square.works_in_place else torch.empty_like(matrix)
    of_first.apply(*(x[..., : first.rows].mT for x in (matrix, natural)))
    natural[..., first.rows :] = both[..., :-1]
    return natural, both[..., -1:]


def fused_descent(weight: Tensor, momentum: Tensor, length: float, decay: float) -> None:
    """W - length (m + decay / length W) in one pass: torch's SGD without momentum."""
    torch._fused_sgd_(
        [weight],
        [momentum],
        [],
        weight_decay=decay / length,
        momentum=0.0,
        lr=length,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _beside(matrix: Tensor, column: Tensor) -> Tensor:
    """A matrix and one column more, stored by columns where the matrix is."""
    if matrix.stride(-1) != 1 and matrix.mT.is_contiguous():
        return torch.cat((matrix.mT, column.mT), dim=-2).mT
    return torch.cat((matrix, column), dim=-1)

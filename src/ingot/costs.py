"""What preconditioning costs in operations, counted without computing anything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ingot.family import Inverting, Rule
from ingot.model import Claim, Layer, find_layers
from ingot.rules import Pair
from ingot.structures import Diagonal, Square, Structure
from ingot.structures.base import Anew

Example: TypeAlias = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""What a model is called with: its only argument, several, or keywords."""


class Use(NamedTuple):
    """How many rows one use of a layer's weight brings to the statistics of K and of C."""

    matrices: int
    rows_k: int
    rows_c: int


class Flops(NamedTuple):
    """Operations of products with factors, which are nearly all that a layer costs beyond its own passes."""

    gradient: int  # the natural gradient, at every step
    update: int  # at every update of the factors
    statistics: int  # likewise; none where the uses are not known

    def per_step(self, every: int) -> float:
        """The mean over steps."""
        return self.gradient + (self.update + self.statistics) / every


def layer_flops(
    rule: Rule,
    structures: Pair,
    squares: tuple[Square, Square],
    shape: tuple[tuple[int, ...], int, int],
    uses: list[Use],
) -> Flops:
    """The operations of a layer with these structures, products kept, dimensions and uses in a batch."""
    lead, d_o, d_i = shape
    rows = [(use.matrices, use.rows_k) for use in uses], [(use.matrices, use.rows_c) for use in uses]
    gradient = update = statistics = 0
    for s, square, columns, seen in zip(structures, squares, (d_o, d_i), rows, strict=True):
        if isinstance(rule, Inverting):
            gradient += prod(lead) * s.flops(columns)
            update += prod(lead) * s.product_flops
        else:
            gradient += prod(lead) * _applied_flops(s, square, columns)
            # KᵀK and K m, and K Kᵀ where it is kept
            update += prod(lead) * s.product_flops * (3 if square.numel else 2)
        statistics += sum(matrices * _statistic_flops(rule, s, n) for matrices, n in seen)
    return Flops(gradient, update, statistics)


def _applied_flops(structure: Structure, square: Square, columns: int) -> int:
    """Those of K Kᵀ from one side of a gradient: kept, made anew, or Kᵀ and then K."""
    if isinstance(square, Anew):
        return structure.product_flops + 2 * square.square.numel * columns
    return 2 * square.numel * columns or 2 * structure.flops(columns)


def _statistic_flops(rule: Rule, structure: Structure, rows: int) -> int:
    """Those of Π̂(X Xᵀ), of Kᵀ from both sides of it, or of KᵀX and its Gram matrix."""
    if isinstance(rule, Inverting):
        return structure.flops(rows)
    if rule.takes_gram(structure, rows):
        return structure.flops(rows) + 2 * structure.product_flops
    return 2 * structure.flops(rows)


# --- A model's own passes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passes:
    """What one forward and backward pass of a model is made of."""

    flops: int
    uses: dict[nn.Parameter, list[Use]]  # by weight


def count_passes(
    model: nn.Module, layers: Mapping[nn.Parameter, Layer], approx: Callable[[Layer], str], example: Example
) -> Passes:
    """Lead an example through a copy of the model without data, where every operation costs nothing."""
    from torch.utils.flop_counter import FlopCounterMode  # slow to import, and seldom needed

    ghosts: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        ghosts[id(tensor)] = _ghost(tensor)
    ghost = copy.deepcopy(model, ghosts)  # in which the tensors are those given
    args, kwargs = _arguments(example)

    def run() -> Any:
        try:
            return ghost(*args, **kwargs)
        except Exception as error:
            raise ValueError(
                "the model could not be run on its example without data (torch's device 'meta'): "
                f"{type(error).__name__}: {error}. Give the arguments of its forward pass, several as a "
                "tuple, keywords as a dict; or leave the example out, and operations are not compared. "
                "Models that look at values have none to look at."
            ) from error

    with FlopCounterMode(display=False) as counter:
        losses = [t.sum() for t in _tensors(run()) if t.requires_grad]
        if losses:
            torch.autograd.backward(losses)
    return Passes(counter.get_total_flops(), _count_uses(ghost, layers, ghosts, approx, run))


def _count_uses(
    ghost: nn.Module,
    layers: Mapping[nn.Parameter, Layer],
    ghosts: Mapping[int, Any],
    approx: Callable[[Layer], str],
    run: Callable[[], Any],
) -> dict[nn.Parameter, list[Use]]:
    """The uses of each layer in a forward pass; an output stands for its gradient, which has its shape."""
    biases = {ghosts[id(weight)]: ghosts.get(id(layer.bias)) for weight, layer in layers.items()}
    found = find_layers(ghost, {p for pair in biases.items() for p in pair if p is not None}, biases)
    uses: dict[nn.Parameter, list[Use]] = {weight: [] for weight in layers}
    taps: dict[nn.Module, dict[str, Callable[..., Tensor]]] = {}
    families = {}
    for weight, layer in layers.items():
        for claim in found[ghosts[id(weight)]].claims:
            flipped = claim.adapter.transposed != layer.adapter.transposed
            count = partial(_count, uses[weight], layer.structures, approx(layer), claim, flipped)
            taps.setdefault(claim.owner, {})[claim.key] = count
            families[claim.owner] = claim.family
    for owner, of_owner in taps.items():
        owner.register_forward_hook(
            lambda module, args, kwargs, output, of=of_owner: families[module].capture(
                module, args, kwargs, output, of
            ),
            with_kwargs=True,
        )
    with torch.no_grad():
        run()
    return uses


def _count(
    uses: list[Use],
    structures: Pair,
    approx: str,
    claim: Claim,
    flipped: bool,
    output: Tensor,
    x: Tensor,
    start: int = 0,
) -> Tensor:
    gradients = claim.adapter.output_gradients(claim.module, x, output)
    *lead, batch, places, _ = gradients.shape
    rows = batch * places if approx == "expand" else batch
    inputs = rows
    if isinstance(structures[1 if flipped else 0], Diagonal):
        squares = claim.adapter.input_squares(claim.module, x, output, approx)
        inputs = rows if squares is None else 1
    uses.append(Use(prod(lead), *((rows, inputs) if flipped else (inputs, rows))))
    return output


def _ghost(tensor: Tensor) -> Tensor:
    """A tensor of the same kind without data."""
    ghost = torch.empty_like(tensor, device="meta")
    return nn.Parameter(ghost, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else ghost


def _arguments(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def without_data(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    if isinstance(example, Mapping):
        return (), {name: torch.utils._pytree.tree_map(without_data, v) for name, v in example.items()}
    arguments = tuple(example) if isinstance(example, tuple | list) else (example,)
    return tuple(torch.utils._pytree.tree_map(without_data, arguments)), {}


def _tensors(output: Any) -> Iterator[Tensor]:
    """All tensors in what a model returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)

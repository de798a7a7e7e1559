"""What an optimizer does with a model, as a table."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ingot.model import Layer, named_parameters
from ingot.precision import computing
from ingot.structures.diagonal import Squares

if TYPE_CHECKING:
    from ingot.optimizer import NaturalGradient


class Row(NamedTuple):
    """How one parameter is trained."""

    name: str
    shape: tuple[int, ...]
    trained_by: str  # the optimizer's name, "with its weight", "AdamW", "frozen" or "not here"
    k: str  # structures of the factors, where there are any
    c: str
    state_bytes: int
    cached_bytes: int  # of which products that are kept between updates of the factors
    adamw_bytes: int  # what AdamW's state would take, and that of SGD with momentum
    sgd_bytes: int


@dataclass(frozen=True)
class Description:
    """A table of all parameters; ``print`` it, or look into its ``rows``."""

    rows: list[Row]

    def __str__(self) -> str:
        head = ("parameter", "shape", "trained by", "K", "C", "state")
        lines = [
            (r.name, "x".join(map(str, r.shape)) or "1", r.trained_by, r.k, r.c, readable(r.state_bytes))
            for r in self.rows
        ]
        state, adamw = sum(r.state_bytes for r in self.rows), sum(r.adamw_bytes for r in self.rows)
        share = f"{self.preconditioned:.1%} of the trained parameters are preconditioned"
        ratio = f" ({state / adamw:.2f} of AdamW's)" if adamw else ""
        return "\n".join([text_table(head, lines), "", f"{share}; the state takes {readable(state)}{ratio}"])

    __repr__ = __str__

    @property
    def preconditioned(self) -> float:
        """The share of the trained parameters' entries that factors precondition."""
        sizes = {True: 0, False: 0}
        for r in self.rows:
            if r.trained_by not in ("frozen", "not here"):
                sizes[bool(r.k) or r.trained_by == "with its weight"] += torch.Size(r.shape).numel()
        return sizes[True] / max(1, sum(sizes.values()))


def describe(
    optimizer: NaturalGradient, model: nn.Module, layers: Mapping[nn.Parameter, Layer]
) -> Description:
    """The table of an optimizer with these layers of a model."""
    with_weight = {layer.bias for layer in layers.values()}
    sizes = planned_sizes(optimizer, layers)
    rows = []
    for name, p in named_parameters(model).items():
        layer, state = layers.get(p), optimizer.state.get(p, {})
        trained_by, k, c = "AdamW", "", ""
        if p not in optimizer._group_index:
            trained_by = "not here"
        elif not p.requires_grad:
            trained_by = "frozen"
        elif "exp_avg" in state:
            pass
        elif layer is not None:
            trained_by = type(optimizer).__name__
            several = "".join(f"{n} x " for n in layer.shape[0])
            k, c = (several + str(structure) for structure in layer.structures)
        elif p in with_weight:
            trained_by = "with its weight"
        planned = Sizes(0, 0, 0, 0) if trained_by in ("not here", "frozen") else sizes[p]
        cached = planned.cached if k else 0
        held = sum(_bytes(value) for value in state.values() if isinstance(value, Tensor))
        total = held + cached if held else planned.state
        rows.append(Row(name, tuple(p.shape), trained_by, k, c, total, cached, planned.adamw, planned.sgd))
    return Description(rows)


class Sizes(NamedTuple):
    """Bytes of the state of a parameter."""

    state: int  # all that is kept, as it is planned
    cached: int  # of which products of factors
    adamw: int  # as AdamW's and SGD's with momentum would be
    sgd: int


def planned_sizes(optimizer: NaturalGradient, layers: Mapping[nn.Parameter, Layer]) -> dict[Tensor, Sizes]:
    """What the state of each parameter takes once it is trained; nothing is allocated to tell."""
    with_weight = {layer.bias for layer in layers.values()}
    sizes = {}
    for p in optimizer._group_index:
        own, layer = _bytes(p), layers.get(p)  # type: ignore[call-overload]
        planned, cached = 2 * own + 4, 0
        if layer is not None or p in with_weight:
            planned = own if optimizer._group(p)["momentum"] else 0
        if layer is not None:
            first = optimizer._first_state(layer, "meta").values()
            planned += sum(_bytes(value) for value in first if isinstance(value, Tensor))
            cached = cached_bytes(optimizer, layer)
        sizes[p] = Sizes(planned + cached, cached, 2 * own + 4, own)
    return sizes


def cached_bytes(optimizer: NaturalGradient, layer: Layer) -> int:
    """What the products take that are kept of a layer's factors, in the dtype that is computed with."""
    dtype = computing(optimizer._state_dtype(layer.weight, optimizer.rule.keys[0]))
    k, c = optimizer._kept_squares(layer)
    entries = k.numel + c.numel
    if layer.bias is not None and not layer.shape[0] and isinstance(k, Squares) and isinstance(c, Squares):
        entries += c.numel  # what the bias is multiplied with, where both are diagonal
    return prod(layer.shape[0]) * entries * dtype.itemsize


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def text_table(head: Sequence[str], lines: Sequence[Sequence[str]], right: Container[str] = ()) -> str:
    """A table for terminals; the columns named in ``right`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if name in right else cell.ljust(w)
            for name, cell, w in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in (head, ["-" * w for w in widths], *lines)
    )


def readable(count: int) -> str:
    """A number of bytes for human eyes."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"

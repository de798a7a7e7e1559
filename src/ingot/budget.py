"""``structure="auto"``: the best structures of all factors whose state fits into a given memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import nn

from ingot.description import cached_bytes, planned_sizes, readable
from ingot.model import Layer
from ingot.rules import Pair
from ingot.structures import BlockDiagonal, Dense, Diagonal, Structure

if TYPE_CHECKING:
    from ingot.optimizer import NaturalGradient

BudgetLike: TypeAlias = str | int | float
"""``"1.0x adamw"``, ``"0.6x sgd"``, ``"1.5 GiB"``, ``"500MB"``, a number of bytes, or a share of AdamW's."""

BLOCKS = (8, 16, 32, 64, 128, 256)
"""The blocks between diagonal and dense: each structure contains the one before it, so a larger budget never
buys a poorer approximation. They can be told from one another by their number of entries, which is how a
checkpoint's are recognised: later versions may add some, but not change these."""

USUAL_BLOCK = 32
"""Blocks of up to this size are given to all layers before any is given more: SINGD's own default."""

LARGEST_DENSE = 2048
"""Sides with more rows are never dense, whatever the memory: an update costs four products of rows³."""


# --- The budget -----------------------------------------------------------------------------------------


class Budget(NamedTuple):
    """An amount of memory: bytes, or a share of what another optimizer's state would take."""

    amount: float
    unit: str  # "bytes", "adamw" or "sgd"

    def in_bytes(self, adamw: int, sgd: int) -> int:
        """How many bytes that are, beside AdamW and SGD with momentum of this size."""
        return int(self.amount * {"bytes": 1, "adamw": adamw, "sgd": sgd}[self.unit])

    def __str__(self) -> str:
        if self.unit == "bytes":
            return readable(int(self.amount))
        return f"{self.amount:g}x {'AdamW' if self.unit == 'adamw' else 'SGD'}"


DEFAULT = Budget(1.0, "adamw")

_TEXT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(?:x\s*(adamw|sgd)|([kmgt]?)(i?)b)\s*", re.IGNORECASE)


def read(given: Any) -> Budget:
    """A budget from what a user may give; see ``BudgetLike``."""
    if isinstance(given, str) and (found := _TEXT.fullmatch(given)):
        number, optimizer, power, binary = found.groups()
        if optimizer:
            return Budget(float(number), optimizer.lower())
        return Budget(
            float(number) * (1024 if binary else 1000) ** " kmgt".index(power.lower() or " "), "bytes"
        )
    if isinstance(given, int | float) and not isinstance(given, bool) and isfinite(given) and given >= 0:
        return Budget(given, "bytes" if isinstance(given, int) else "adamw")
    raise ValueError(
        "memory_budget must be text such as '1.0x adamw', '0.6x sgd' or '500MB', a whole number of bytes, or "
        f"a share of AdamW's state such as 0.8; got {given!r}"
    )


# --- The choice -----------------------------------------------------------------------------------------


class Side(NamedTuple):
    """One factor whose structure is to be chosen; equal ones are given equal structures."""

    of: str  # "K" or "C"
    dim: int
    other: int  # the dimension of the layer's other side
    matrices: int
    bytes_per_entry: int  # of the factor with all that is kept beside it
    is_small: bool  # whether the other side is larger


def ladder(dim: int) -> list[Structure]:
    """The structures that a side may be given, each contained in the next, of increasing size."""
    blocks: list[Structure] = [BlockDiagonal(dim, block) for block in BLOCKS if block < dim]
    dense: list[Structure] = [Dense(dim)] if 1 < dim <= LARGEST_DENSE else []
    return [Diagonal(dim), *blocks, *dense]


def choose(sides: Sequence[Side], room: int) -> list[Structure]:
    """Structures whose entries beyond those of diagonal ones take no more than ``room`` bytes.

    Step by step up the ladder: first the usual blocks for all, then dense factors on the small sides of
    layers, then what is left; within each, what is cheapest in proportion to the layer's weights. A step is
    taken for all equal sides or for none, so that equal layers stay equal, and skipped if it does not fit.
    Since what is proposed depends on nothing but the sides, a larger budget never leads to a smaller state.
    """
    alike = Counter(sides)
    taken: dict[Side, Structure] = {side: Diagonal(side.dim) for side in alike}
    for side, structure in sorted(_steps(alike), key=_turn):
        entries = structure.numel - taken[side].numel
        price = alike[side] * side.matrices * side.bytes_per_entry * entries
        if entries > 0 and price <= room:
            taken[side] = structure
            room -= price
    return [taken[side] for side in sides]


def _steps(sides: Mapping[Side, int]) -> Iterator[tuple[Side, Structure]]:
    return ((side, structure) for side in sides for structure in ladder(side.dim)[1:])


def _turn(step: tuple[Side, Structure]) -> tuple[int, float]:
    """When a step's turn is; those of one turn keep the order of the layers."""
    side, structure = step
    if structure.numel <= USUAL_BLOCK * side.dim:
        stage = 0
    else:
        stage = 1 if side.is_small and isinstance(structure, Dense) else 2
    return stage, structure.numel / (side.dim * side.other)


def recognised(dim: int, numel: int) -> Structure:
    """The structure of a dimension that ``choose`` may have given so many entries."""
    for structure in ladder(dim):
        if structure.numel == numel:
            return structure
    raise ValueError(f"no structure that 'auto' chooses for {dim} rows has {numel} entries")


# --- The layers of a model ------------------------------------------------------------------------------


_Key: TypeAlias = tuple[str, int, int]  # a layer by its name, d_i and d_o


@dataclass
class Choice:
    """What an optimizer has chosen so far, and within which budget.

    What was chosen stays: state depends on it. Layers that come later share what is left.
    """

    budget: Budget
    _chosen: dict[_Key, Pair] = field(default_factory=dict)
    _with_products: dict[_Key, bool] = field(default_factory=dict)

    def of(self, layer: Layer) -> Pair:
        """A layer's structures, for the sides that are left to choose; diagonal before they are chosen."""
        _, d_o, d_i = layer.shape
        return self._chosen.get(_key(layer), (Diagonal(d_i), Diagonal(d_o)))

    def keeps_products(self, layer: Layer) -> bool:
        """Whether the budget has room for K Kᵀ and C Cᵀ between updates."""
        return self._with_products.get(_key(layer), False)

    def has_chosen(self, layer: Layer) -> bool:
        """Whether a layer's structures are within the budget, so that nothing must go beyond it."""
        return _key(layer) in self._chosen

    def extend(self, optimizer: NaturalGradient, layers: Mapping[nn.Parameter, Layer]) -> None:
        """Choose for those of all layers that nothing was chosen for yet; raises if not even diagonals fit.

        A frozen layer takes no memory. Its turn is last, within the budget of the model without anything
        frozen, so that it is within the budget as well once it is trained.
        """
        open_sides = {weight: _open_sides(optimizer, layer) for weight, layer in layers.items()}
        if all(_key(layer) in self._chosen for weight, layer in layers.items() if open_sides[weight]):
            self._extend_products(optimizer, layers)
            return
        new = [weight for weight, layer in layers.items() if _key(layer) not in self._chosen]
        for layer in layers.values():
            layer.structures = optimizer._bind(layer)
            self._with_products.setdefault(_key(layer), False)
        for frozen in (False, True):
            weights = [weight for weight in new if weight.requires_grad is not frozen]
            if not weights:
                continue
            places = [(weight, index) for weight in weights for index in open_sides[weight]]
            sides = [_side(optimizer, layers[weight], index) for weight, index in places]
            room = self._room(optimizer, layers, with_frozen=frozen)
            structures = dict(zip(places, choose(sides, room), strict=True))
            for weight in weights:
                layer = layers[weight]
                k, c = (structures.get((weight, i), s) for i, s in enumerate(layer.structures))
                self._chosen[_key(layer)] = layer.structures = k, c
            room = self._room(optimizer, layers, with_frozen=frozen)
            self._keep_products(optimizer, [layers[weight] for weight in weights], room)

    def _extend_products(self, optimizer: NaturalGradient, layers: Mapping[nn.Parameter, Layer]) -> None:
        """See for new layers of given structures whether there is room to keep their products."""
        new = [layer for layer in layers.values() if _key(layer) not in self._with_products]
        if new:
            for layer in layers.values():
                layer.structures = optimizer._bind(layer)
                self._with_products.setdefault(_key(layer), False)
            self._keep_products(optimizer, new, self._room(optimizer, layers, with_frozen=True))

    def _keep_products(self, optimizer: NaturalGradient, layers: list[Layer], room: int) -> None:
        """Keep what there is room for, the smallest first; of layers that are alike, for all or none."""
        alike: dict[tuple[int, Pair], list[Layer]] = {}
        for layer in layers:
            self._with_products[_key(layer)] = True  # to see what it takes
            alike.setdefault((cached_bytes(optimizer, layer), layer.structures), []).append(layer)
        for (price, _), those in sorted(alike.items(), key=lambda item: item[0][0]):
            fits = price * len(those) <= room
            room -= price * len(those) if fits else 0
            self._with_products |= {_key(layer): fits for layer in those}

    def _room(
        self, optimizer: NaturalGradient, layers: Mapping[nn.Parameter, Layer], with_frozen: bool
    ) -> int:
        """What the budget leaves beyond the state as the layers' structures are now."""
        planned = planned_sizes(optimizer, layers).items()
        sizes = [size for p, size in planned if p.requires_grad or with_frozen]
        state, adamw, sgd = (sum(getattr(s, name) for s in sizes) for name in ("state", "adamw", "sgd"))
        allowed = self.budget.in_bytes(adamw, sgd)
        if state > allowed and not with_frozen:
            few = self.budget.unit == "bytes" and self.budget.amount < 100
            raise ValueError(
                f"memory_budget is {self.budget}, that is {readable(allowed)}, and the smallest state takes "
                f"{readable(state)}, {state / max(1, adamw):.3f}x AdamW's: give at least that, or save some "
                "by momentum=0.0, precond_momentum=0.0 or factor_dtype=torch.bfloat16"
                + ("; a whole number is one of bytes, a share is written 1.0 or '1x adamw'" if few else "")
            )
        return max(0, allowed - state)


def _key(layer: Layer) -> _Key:
    _, d_o, d_i = layer.shape
    return layer.name, d_i, d_o


def _open_sides(optimizer: NaturalGradient, layer: Layer) -> list[int]:
    """Which of K and C (0 and 1) are left to choose."""
    factories = optimizer._factories(layer, optimizer._group(layer.weight))
    return [index for index, factory in enumerate(factories) if factory is None]


def _side(optimizer: NaturalGradient, layer: Layer, index: int) -> Side:
    lead, d_o, d_i = layer.shape
    first = optimizer._first_state(layer, "meta")
    entries = [first[key] for key in optimizer.rule.keys if key in first and "KC"[index] in key]
    # The bias's row does not count: in a square layer K is the one to be dense. The curvature of the inputs
    # alone is known to go a long way.
    k_is_small = d_i - (layer.bias is not None) <= d_o
    dim, other, small = (d_i, d_o, k_is_small) if index == 0 else (d_o, d_i, not k_is_small)
    return Side("KC"[index], dim, other, prod(lead), sum(e.element_size() for e in entries), small)

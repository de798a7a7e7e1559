"""A layer's factors for users: what an optimizer knows of the curvature, to look at or to compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ingot.model import Layer, names, unwrapped
from ingot.naming import suggestion
from ingot.rules import Factor

if TYPE_CHECKING:
    from ingot.optimizer import NaturalGradient


class Factors(NamedTuple):
    """The factors of a layer, whose natural gradient is P_C ∇W P_K for its matrix W ``[..., d_o, d_i]``.

    A bias is the last column of W. Leading dimensions are separate matrices, such as a convolution's groups.

    Attributes:
        k: K ``[..., d_i, d_i]``, of which P_K is the square K Kᵀ ≈ U⁻¹; of KFAC, which has no K, P_K itself.
        c: C ``[..., d_o, d_o]``, the same of P_C and G.
        are_roots: Whether they are K and C, and not the inverses that KFAC keeps.
    """

    k: Factor
    c: Factor
    are_roots: bool

    def preconditioners(self) -> tuple[Tensor, Tensor]:
        """P_K and P_C as dense matrices, which approximate the inverses of U and G, damping included."""
        k, c = self.k.dense(), self.c.dense()
        return (k @ k.mT, c @ c.mT) if self.are_roots else (k, c)


@torch.no_grad()
def factors_of(optimizer: NaturalGradient, which: nn.Module | Tensor | str) -> Factors:
    """The factors of the layer that is asked for, as they are now."""
    optimizer._follow_model()
    layer, rule = _layer(optimizer, which), optimizer.rule
    if rule.names[0] not in optimizer.state.get(layer.weight, {}):
        raise ValueError(
            f"layer {layer.name!r} has no factors yet: they begin with its first backward pass, and do not "
            "where its weight is used without its module's forward pass"
        )
    with optimizer._whole_factors([layer], rule.applied):
        kept = rule.preconditioners(layer.structures, optimizer._factors(layer))
        k, c = (Factor(side.structure, side.entries.clone()) for side in kept)
        return Factors(k, c, are_roots=rule.applied == rule.names)


def _layer(optimizer: NaturalGradient, which: nn.Module | Tensor | str) -> Layer:
    """The layer that is meant by a module, a weight, or the name of either."""
    weights = names(optimizer._watch.model)

    def is_meant(layer: Layer) -> bool:
        if isinstance(which, str):
            return which == layer.name or weights.get(which) is layer.weight
        if isinstance(which, Tensor):
            return which is layer.weight
        return any(unwrapped(which) in (claim.owner, claim.module) for claim in layer.claims)

    if not isinstance(which, str | Tensor | nn.Module):
        raise TypeError(f"a layer is asked for by its module, its weight or their name; got {which!r}")
    found = [layer for layer in optimizer._layers.values() if is_meant(layer)]
    if len(found) == 1:
        return found[0]
    what = repr(which) if isinstance(which, str) else f"this {type(which).__name__}"
    if found:  # as attention has
        own = ", ".join(repr(layer.name) for layer in found)
        raise ValueError(f"{what} has several layers: ask for one of {own}")
    near = suggestion(which if isinstance(which, str) else "", [at.name for at in optimizer._layers.values()])
    raise ValueError(f"{what} is no layer that has factors{near}")

"""Factors of one structure from those of another, for the same curvature."""

from __future__ import annotations

import torch
from torch import Tensor

from ingot.family import InverseFree, Rule, Settings, State
from ingot.rules import Curvature, Factor, Pair, curvature, damped_inverse, direction, move
from ingot.stability import bounded_rate
from ingot.structures import Structure

LARGEST = 8192
"""Conversion goes through dense matrices, which is too much for factors of more rows than this."""


def converted(rule: Rule, old: Pair, new: Pair, state: State, settings: Settings) -> State:
    """The factors of other structures that fit the same curvature; momenta start anew."""
    for before, after in zip(old, new, strict=True):
        if before != after and before.dim > LARGEST:
            raise ValueError(
                f"{before} has too many rows to be turned into {after}: load with the checkpoint's structure"
            )
    side = inverse_free if isinstance(rule, InverseFree) else averaged
    factors = {}
    for name, before, after in zip(rule.names, old, new, strict=True):
        same = before == after
        factors[name] = state[name] if same else side(Factor(before, state[name].double()), after)
    if not isinstance(rule, InverseFree):
        dampings = rule.dampings(state, settings)
        for name, after, damping in zip(rule.names, new, dampings, strict=True):
            factors[f"{name}_inverse"] = damped_inverse(after, factors[name].double(), damping)
    return factors


def inverse_free(factor: Factor, structure: Structure, iterations: int = 300) -> Tensor:
    """K in another structure, such that Π̂(Kᵀ U K) = I for the U that the given factor stands for.

    That is where the structure's own updates would end. For dense factors K Kᵀ stays what it is.
    """
    root = torch.linalg.inv(factor.structure.dense(factor.entries)).mT  # U = root rootᵀ
    trace = root.square().sum((-2, -1)).unsqueeze(-1) / structure.dim
    k = trace.rsqrt() * structure.identity_like(factor.entries)
    for _ in range(iterations):
        now = Factor(structure, k)
        m = direction(now, Curvature(curvature(now, root)), 1.0, 0.0)
        k = move(now, m, bounded_rate(structure.norm(m), 0.5, 0.5))
    return k


def averaged(factor: Factor, structure: Structure) -> Tensor:
    """KFAC's moving average in another structure: Π̂ of it."""
    values, vectors = torch.linalg.eigh(factor.structure.dense(factor.entries))
    return structure.gram(vectors * values.clamp_min(0).sqrt().unsqueeze(-2))

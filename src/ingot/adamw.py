"""AdamW for the parameters without factors: torch's own, for every dtype, and safe from bad gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ingot.distributed import agreed, is_distributed, local
from ingot.groups import Group
from ingot.precision import computable, keeping, put
from ingot.scalars import is_any, is_known

KEYS = frozenset({"step", "exp_avg", "exp_avg_sq"})
"""The keys of a parameter's state, named as torch's AdamW names them."""

State = dict[str, Any]
Noise = Callable[[Tensor, int], "torch.Generator | None"]
"""For a parameter and a step: the random numbers that it is rounded with, if it is to be."""


def start(p: Tensor) -> State:
    """The state before the first step."""
    zeros = torch.zeros_like(p, dtype=keeping(p.dtype))
    return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def step(params: list[Tensor], states: list[State], group: Group, noise: Noise) -> set[Tensor]:
    """Take a step with the parameters' gradients; returns those whose gradients are known to be bad.

    Numbers of a shorter dtype are computed with in float32 and rounded once. A gradient that is not finite
    counts as zero.
    """
    kept = [[local(p) for p in params]]
    kept += [[local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq")]
    values = [[computable(tensor) for tensor in tensors] for tensors in kept]
    gradients = [
        local(p.grad).to(value.dtype)
        for p, value in zip(params, values[0], strict=True)
        if p.grad is not None
    ]
    gradients, bad = _finite(gradients, params, states)
    adamw(
        values[0],
        gradients,
        exp_avgs=values[1],
        exp_avg_sqs=values[2],
        max_exp_avg_sqs=[],
        state_steps=[state["step"] for state in states],
        has_complex=any(p.is_complex() for p in params),
        amsgrad=False,
        beta1=betas(group)[0],
        beta2=betas(group)[1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        fused=_can_be_fused(values[0]),
    )
    for tensors, computed in zip(kept, values, strict=True):
        for index, (tensor, value) in enumerate(zip(tensors, computed, strict=True)):
            if value is not tensor:
                is_parameter = tensors is kept[0]
                put(tensor, value, noise(params[index], int(states[index]["step"])) if is_parameter else None)
    return {params[index] for index in bad}


def betas(group: Group) -> tuple[float, float]:
    """β₁ and β₂. The first is the layers' momentum if nothing else is said: schedulers drive both as one."""
    return group["betas"] if group.get("betas") else (group["momentum"], 0.999)


def _can_be_fused(params: list[Tensor]) -> bool | None:
    """Whether torch has a single operation for all of it; elsewhere it chooses itself."""
    on_cpu = all(p.device.type == "cpu" and p.is_floating_point() for p in params)
    return True if on_cpu and not torch.compiler.is_compiling() else None


def _finite(
    gradients: list[Tensor], params: list[Tensor], states: list[State]
) -> tuple[list[Tensor], list[int]]:
    """Gradients with zeros in place of those that are not finite, and where these are, as far as is known.

    Of a parameter that is shared out over processes, each must find what all of them find.
    """
    norms = torch._foreach_norm(gradients)
    shared = [index for index, p in enumerate(params) if is_distributed(p)]
    in_one_place = all(norm.device == norms[0].device for norm in norms)
    if not shared and in_one_place and is_known(torch.stack(norms).isfinite()):  # as nearly always
        return gradients, []
    finite = [norm.isfinite() for norm in norms]
    if shared:
        flags = agreed(torch.stack([finite[index] for index in shared]), params[shared[0]])
        for index, flag in zip(shared, flags, strict=True):
            finite[index] = flag
    if shared and in_one_place and is_known(torch.stack(finite)):
        return gradients, []
    for state, flag in zip(states, finite, strict=True):
        state["dropped"] = state.get("dropped", torch.zeros_like(flag, dtype=torch.float32)) + ~flag
    bad = [index for index, flag in enumerate(finite) if is_any(~flag)]
    return [torch.where(flag, g, 0) for flag, g in zip(finite, gradients, strict=True)], bad

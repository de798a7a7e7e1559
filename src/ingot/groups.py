"""Parameter groups: which parameters are trained, by whom, and whether their settings make sense."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from fnmatch import fnmatchcase
from math import isfinite
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ingot.model import named_parameters
from ingot.naming import suggestion
from ingot.scalars import number, where
from ingot.structures import Factory, resolve

Group: TypeAlias = dict[str, Any]
Params: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]


def trained_groups(model: nn.Module, params: Params | None) -> list[Group]:
    """Groups of parameters from what a user gave: nothing, parameters, torch-style groups, or name patterns.

    Parameters that are frozen belong to a group as well: they may be unfrozen later.

    Patterns such as ``"*.bias"`` only single parameters out: all others of the model follow in a group of
    their own. Parameters given as such are exactly those trained, as with torch's optimizers.
    """
    named = named_parameters(model)
    if params is None:
        return _not_empty([{"params": list(named.values())}])
    if isinstance(params, set):
        raise TypeError("params must be ordered, and a set is not: give a list")
    if isinstance(params, str | Tensor | Mapping) or not isinstance(params, Iterable):
        rate = ": to set the learning rate, write lr=" if isinstance(params, float) else "; got "
        raise TypeError(f"params must be a list of parameters, names of them or groups{rate}{params!r}")
    given = list(params)
    groups = [dict(g) for g in given if isinstance(g, Mapping)]
    if any("params" not in group for group in groups):
        raise ValueError(f"every group needs 'params', the parameters or their names; got {groups!r}")
    if not groups:
        groups = [{"params": given}]
    elif len(groups) < len(given):
        raise TypeError("params mixes groups (dicts) and parameters: put the parameters into a group, too")
    taken: set[Tensor] = set()
    by_pattern = False
    for group in groups:
        members = group["params"]
        members = [members] if isinstance(members, str | Tensor) else list(members)
        by_pattern |= any(isinstance(member, str) for member in members)
        group["params"] = []
        for member in members:
            chosen = _members(member, named, taken)
            group["params"] += chosen
            taken.update(chosen)
    if by_pattern:
        groups.insert(0, {"params": [p for p in named.values() if p not in taken]})
    return _not_empty(groups)


def _members(member: Any, named: dict[str, nn.Parameter], taken: set[Tensor]) -> list[Tensor]:
    if isinstance(member, tuple):  # as named_parameters() gives them
        return [member[1]]
    if not isinstance(member, str):
        return [member]
    matching = [p for name, p in named.items() if fnmatchcase(name, member)]
    if not matching:
        raise ValueError(
            f"no parameter matches the pattern {member!r}; the model's parameters are named "
            f"{', '.join(list(named)[:8])}{', ...' if len(named) > 8 else ''}"
        )
    return [p for p in matching if p not in taken]  # the first pattern that matches wins


def _not_empty(groups: list[Group]) -> list[Group]:
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError("there is no parameter to train")
    if any(is_lazy(p) for group in groups for p in group["params"]):
        raise ValueError(
            "a lazy module has no weights yet: run the model once on an example, and then make the optimizer"
        )
    return groups


def separate_adamw(groups: list[Group], preconditioned: set[nn.Parameter], adamw: Group) -> list[Group]:
    """Give the parameters that AdamW trains groups of their own, behind the group they came from."""
    separated: list[Group] = []
    for group in groups:
        layers = [p for p in group["params"] if p in preconditioned]
        rest = [p for p in group["params"] if p not in preconditioned]
        separated += [group | {"params": layers}] if layers else []
        separated += [adamw | group | {"params": rest}] if rest else []
    return separated


def check_adamw(settings: Any, defaults: Group) -> Group:
    """The settings of AdamW's groups as a dict of their own, if they make sense."""
    if not isinstance(settings, Mapping):
        raise TypeError(f"adamw must be a dict of settings such as {{'lr': 1e-3}}; got {settings!r}")
    others = [name for name in settings if name not in _OF_ADAMW]
    if others:  # settings of the layers would be taken, and change nothing
        raise ValueError(
            f"adamw has no settings but {', '.join(_OF_ADAMW)}; got {', '.join(map(repr, others))}"
        )
    check_group(defaults | dict(settings))
    return dict(settings)


_OF_ADAMW = ("lr", "betas", "eps", "weight_decay")

AUTO = "auto"
"""In the place of a structure: the best one that fits into the memory budget."""


def structure_pair(structure: Any) -> tuple[Factory | None, Factory | None]:
    """Factories for K and C from one structure for both or a pair; None where it is left to choose."""
    if not isinstance(structure, tuple | list):
        structure = structure, structure
    if len(structure) != 2:
        raise ValueError(f"structure is one for both factors or a pair for K and C; got {structure!r}")
    k, c = (None if isinstance(s, str) and s == AUTO else resolve(s) for s in structure)
    return k, c


def _number(low: float, high: float = float("inf"), *, open_high: bool = False) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        if isinstance(value, Tensor):
            value = value.item() if value.numel() == 1 and not value.is_complex() else None
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        try:
            found = float(value)
        except OverflowError:
            return False
        if not isfinite(found):
            return False
        return low <= found and (found < high if open_high else found <= high)

    return check


def _optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _whole(low: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= low


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_number(0), "a number of at least 0, on AdamW's scale (1e-3 is a good start)"),
    "approx": (lambda v: v in ("expand", "reduce"), "'expand' or 'reduce'"),
    "loss_average": (
        lambda v: v in ("batch", "token", None),
        "'batch' for a mean over samples, 'token' for a mean over samples and positions, or None for a sum",
    ),
    "momentum": (_number(0, 1, open_high=True), "a number from 0 to below 1"),
    "weight_decay": (_number(0), "a number of at least 0"),
    "damping": (_number(0), "a number of at least 0"),
    "precond_lr": (
        lambda v: callable(v) or _number(0, 1)(v),
        "a number from 0 to 1, or a function of the number of factor updates",
    ),
    "precond_momentum": (_number(0, 1, open_high=True), "a number from 0 to below 1"),
    "precond_every": (_whole(1), "a whole number of steps, at least 1"),
    "factor_dtype": (
        lambda v: v in (None, torch.bfloat16, torch.float32, torch.float64),
        "a floating-point dtype such as torch.bfloat16 (torch.float16 has too small a range), or None for "
        "the weight's",
    ),
    "cache_products": (_optional(_flag), "True, False, or None for as far as AdamW's memory goes"),
    "max_rows": (_optional(_whole(1)), "a whole number of rows, at least 1, or None for all"),
    "statistics_dtype": (
        lambda v: v in (None, torch.bfloat16, torch.float32, torch.float64),
        "torch.bfloat16 or another floating-point dtype, or None for that of the computation",
    ),
    "share_work": (_optional(_flag), "True, False, or None for where it pays"),
    "precond_warmup": (_whole(0), "a whole number of steps, at least 0"),
    "max_factor_step": (_optional(_number(0, 1, open_high=True)), "a number from 0 to below 1, or None"),
    "relative_damping": (_flag, "True or False"),
    "factor_start": (lambda v: v in ("identity", "trace"), "'identity' or 'trace'"),
    "normalize_step": (_flag, "True or False"),
    "max_relative_step": (_optional(_number(0)), "a number of at least 0, or None"),
    "decoupled_weight_decay": (_flag, "True or False"),
    "maximize": (_flag, "True or False"),
    "stochastic_rounding": (_flag, "True or False"),
    "compile": (_flag, "True or False"),
    "precondition": (_flag, "True, or False for AdamW"),
    "betas": (
        _optional(
            lambda v: (
                isinstance(v, tuple | list) and len(v) == 2 and all(map(_number(0, 1, open_high=True), v))
            )
        ),
        "a pair of numbers from 0 to below 1, or None for (momentum, 0.999)",
    ),
    "eps": (_number(0), "a number of at least 0"),
}


# The rest of what stands in a group: its members, a name for the user's eyes, what torch's schedulers write.
_ALLOWED = frozenset({"params", "param_names", "name", "structure"})
_ALLOWED |= {"lr_scale"}  # timm's decay of the rate by layers
_OF_SCHEDULERS = {"initial_lr", "swa_lr", "min_lr", "max_lr", "base_momentum", "max_momentum"}
_RATES = _OF_SCHEDULERS | {"peak_lr"}
_ALLOWED |= _RATES


def follow_rates(groups: Iterable[Group]) -> None:
    """Keep each group's highest learning rate so far, from which a schedule goes down, whoever set it."""
    for group in groups:
        lr, peak = number(group["lr"]), number(group.get("peak_lr", 0.0))
        group["peak_lr"] = where(lr > peak, lr, peak)


def check_group(group: Group, others: Container[str] = ()) -> None:
    """Refuse settings that make no sense, and say what would; ``others`` may be in a group as well."""
    for name, (check, wanted) in _CHECKS.items():
        if not check(group.get(name)):
            raise ValueError(f"{name} must be {wanted}; got {group.get(name)!r}")
    for name in _RATES & group.keys():
        if not _number(0)(group[name]):
            raise ValueError(f"{name} must be a number of at least 0; got {group[name]!r}")
    structure_pair(group["structure"])
    for name in group:
        if name not in _CHECKS and name not in _ALLOWED and name not in others:
            near = suggestion(str(name), [*_CHECKS, "structure"])
            raise ValueError(f"{name!r} is no setting of a parameter group{near}")

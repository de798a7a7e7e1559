"""Checkpoints: what is saved, and what is refused or converted before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ingot import adamw, budget
from ingot.conversion import converted
from ingot.distributed import whole
from ingot.family import COUNTS, NUMBERS, SIZES, TRACES
from ingot.groups import Group, check_group
from ingot.model import Layer, named_parameters
from ingot.rules import Pair
from ingot.structures import Structure

if TYPE_CHECKING:
    from ingot.optimizer import NaturalGradient

FORMAT = 1
"""The number of the layout. It goes up when an older version could not read what is saved."""

COUNTERS = ("steps", "updates")
"""The state's keys for numbers of steps: whole numbers while training, tensors in a checkpoint."""

_NEVER_NEGATIVE = frozenset({*TRACES, *COUNTS, *SIZES, *COUNTERS, "step", "exp_avg_sq"})
_WHOLE = (torch.int64, torch.int32)
_REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_COMPLEX = (torch.complex64, torch.complex128)

_KEPT = frozenset({"params", "structure", "factor_dtype", "precondition", "cache_products"})
_KEPT |= {"statistics_dtype", "share_work"}
"""Settings that stay those of the optimizer that loads: how its state is laid out, and what is sent."""

FUNCTION = "a function"
"""What is saved in the place of a setting that is one."""


def packed(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state_dict with state of tensors alone, and settings of numbers and text.

    Every setting keeps its place: torch.distributed.checkpoint looks for all that a group has.
    """
    if not {"state", "param_groups"} <= state_dict.keys():  # a hook of the user's gave it another layout
        return state_dict
    states = {
        index: {key: torch.tensor(v) if isinstance(v, int) else v for key, v in state.items()}
        for index, state in state_dict["state"].items()
    }
    groups = [{k: _plain(v) for k, v in group.items()} for group in state_dict["param_groups"]]
    return state_dict | {"state": states, "param_groups": [group | {"format": FORMAT} for group in groups]}


def _plain(value: Any) -> Any:
    """A setting as something that any format of files can keep."""
    if isinstance(value, tuple | list):
        values = [_plain(v) for v in value]
        if any(v is FUNCTION for v in values):
            return FUNCTION
        return values if isinstance(value, list) else tuple(values)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, type) and issubclass(value, Structure) and value.name:
        return value.name
    return FUNCTION if callable(value) else value.clone() if isinstance(value, Tensor) else value


def _is_data(value: Any) -> bool:
    """Whether a setting is of one of the kinds that can do no harm."""
    if type(value) in (tuple, list):  # of which none has others in it
        return not any(type(v) in (tuple, list) for v in value) and all(map(_is_data, value))
    return (
        value is None
        or isinstance(value, Tensor)
        or type(value) in (bool, int, float, complex, str, torch.dtype)
    )


def unpacked(optimizer: NaturalGradient, state_dict: Any) -> tuple[list[Group], dict[Tensor, dict[str, Any]]]:
    """Settings for each group and state for each parameter of an optimizer; a ValueError if they do not fit.

    All tensors are copies.
    """
    groups = _groups(optimizer, state_dict)
    names = {p: name for name, p in named_parameters(optimizer._watch.model).items()}
    states: dict[Tensor, dict[str, Any]] = {}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for p, index in zip(group["params"], saved["params"], strict=True):
            if index in state_dict["state"]:
                reader = _Reader(optimizer, p, names.get(p, str(index)), saved)
                states[p] = reader.read(state_dict["state"][index])
    settings = [{k: v for k, v in saved.items() if k not in _KEPT} for saved in groups]
    for layer in optimizer._layers.values():  # whether this optimizer can do what the settings say
        index = optimizer._group_index[layer.weight]
        try:
            group = optimizer.param_groups[index] | settings[index]
            optimizer._structures(layer, group, layer.structures)
        except ValueError as error:
            raise ValueError(f"the checkpoint has a setting that makes no sense here: {error}") from None
    return settings, states


# --- Groups ---------------------------------------------------------------------------------------------


def _groups(optimizer: NaturalGradient, state_dict: Any) -> list[Group]:
    """The groups of a checkpoint, if it is one, and of an optimizer like this one."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        found = list(state_dict)[:8] if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            "this is no checkpoint of an optimizer: give what optimizer.state_dict() returned, with 'state' "
            f"and 'param_groups'; got {found!r}"
        )
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(states, Mapping) or not _is_list_of_groups(groups):
        raise ValueError("the checkpoint is damaged: its groups or its state are not what they should be")
    if not all("precond_every" in group for group in groups):
        raise ValueError(
            "the checkpoint is that of another optimizer, whose state means something else: load the model's "
            "weights alone, and start this optimizer afresh"
        )
    mine = optimizer.param_groups
    sizes, my_sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in mine]
    if sizes != my_sizes:
        raise ValueError(
            f"the checkpoint has groups of {sizes} parameters and this optimizer of {my_sizes}: make it for "
            "the same model with the same groups, with parameters frozen as they were then"
        )
    indices = [index for group in groups for index in group["params"]]
    if len(set(indices)) < len(indices) or not set(states) <= set(indices):
        raise ValueError("the checkpoint is damaged: its state does not belong to its parameters one to one")
    return [_settings(group, saved) for group, saved in zip(mine, groups, strict=True)]


def _is_list_of_groups(groups: Any) -> bool:
    return isinstance(groups, list | tuple) and all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), list | tuple)
        and all(isinstance(index, int | str) for index in group["params"])
        for group in groups
    )


def _settings(group: Group, given: Mapping[str, Any]) -> Group:
    """The settings of a saved group, which must make sense in the place of this one's."""
    saved = {name: v for name, v in given.items() if not (type(v) is str and v == FUNCTION)}
    number = saved.pop("format", 0)
    if not isinstance(number, int) or number > FORMAT:
        raise ValueError(
            f"the checkpoint has format {number!r} and this version of ingot reads up to {FORMAT}: upgrade "
            "ingot, a newer version made it"
        )
    for name, value in saved.items():
        if not _is_data(value):
            raise ValueError(
                f"the checkpoint has {type(value).__name__} for the setting {name!r}: only numbers, text and "
                "tensors are loaded, never functions or objects"
            )
    try:
        # What others keep in this group they may have kept in that one.
        check_group(group | {k: v for k, v in saved.items() if k not in _KEPT}, others=group)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the checkpoint has a setting that makes no sense: {error}") from None
    return deepcopy(saved)


# --- State ----------------------------------------------------------------------------------------------


class _Reader:
    """Reads the state of one parameter."""

    def __init__(self, optimizer: NaturalGradient, p: Tensor, name: str, group: Group) -> None:
        self._optimizer, self._rule = optimizer, optimizer.rule
        self._p, self._name, self._group = p, name, group
        self._layer = next((layer for layer in optimizer._layers.values() if layer.weight is p), None)
        self._with_layer = any(p is q for layer in optimizer._layers.values() for q in layer.parameters)

    def read(self, saved: Any) -> dict[str, Any]:
        """A copy of the state, checked, and converted to what this optimizer keeps."""
        if not isinstance(saved, Mapping):
            raise ValueError(f"the checkpoint is damaged: the state of {self._name!r} is {saved!r}")
        if self._layer is not None and self._rule.names[0] in saved:
            return self._part(self._of_layer(self._layer, saved))
        momentum = {"momentum_buffer": self._p.shape} if self._with_layer else {}
        if "exp_avg" in saved:
            shapes = {"exp_avg": self._p.shape, "exp_avg_sq": self._p.shape, "step": torch.Size()}
            return self._part(self._checked(saved, momentum | shapes, adamw.KEYS))
        return self._part(self._checked(saved, momentum, frozenset()))

    def _of_layer(self, layer: Layer, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a layer with factors. Numbers that are missing begin at zero."""
        lead = layer.shape[0]
        first = self._optimizer._first_state(layer, layer.weight.device)
        structures = self._saved_structures(layer, saved)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(NUMBERS, (*lead, 1))
        shapes |= dict.fromkeys((*SIZES, *COUNTERS), ()) | {"momentum_buffer": self._p.shape}
        sides = {"K": structures[0], "C": structures[1]}
        shapes |= {key: (*lead, sides[_side(key)].numel) for key in self._rule.keys}
        required = frozenset({key for key in first if key in self._rule.keys} - {"m_K", "m_C"} | {*COUNTERS})
        state = self._checked(saved, shapes, required)
        if structures != layer.structures:
            settings = self._optimizer._settings(layer)._replace(
                **{k: self._group[k] for k in ("damping", "relative_damping") if k in self._group}
            )
            try:
                factors = converted(self._rule, structures, layer.structures, state, settings)
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"layer {layer.name!r} of the checkpoint: {error}") from None
            if not all(bool(value.isfinite().all()) for value in factors.values()):
                raise ValueError(f"layer {layer.name!r}: the checkpoint's factors cannot be converted")
            state = {key: value for key, value in state.items() if key not in self._rule.keys}
            state |= {key: value.to(first[key].dtype) for key, value in factors.items()}
        return first | state

    def _part(self, state: dict[str, Any]) -> dict[str, Any]:
        """What of a state this process keeps."""
        return {key: self._optimizer._laid_out(self._p, key, value) for key, value in state.items()}

    def _saved_structures(self, layer: Layer, saved: Mapping[str, Any]) -> Pair:
        """The structures of a checkpoint's factors, which its settings tell unless they were functions."""
        if "structure" in self._group:
            try:
                group = self._optimizer._group(self._p) | self._group
                return self._optimizer._structures(layer, group, self._chosen_structures(layer, group, saved))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"the checkpoint has a structure that makes no sense: {error}") from None
        for structure, key in zip(layer.structures, self._rule.names, strict=True):
            value = saved.get(key)
            if not isinstance(value, Tensor) or value.shape[-1:] != (structure.numel,):
                raise ValueError(
                    f"layer {layer.name!r}: the checkpoint's structures were functions, which are not saved, "
                    "and others than this optimizer's: give it the same ones"
                )
        return layer.structures

    def _chosen_structures(self, layer: Layer, group: Group, saved: Mapping[str, Any]) -> Pair:
        """What "auto" had chosen there, which the sizes of the factors tell."""
        factories = self._optimizer._factories(layer, group)
        structures = list(layer.structures)
        for index, (factory, key) in enumerate(zip(factories, self._rule.names, strict=True)):
            value = saved.get(key)
            if factory is None and isinstance(value, Tensor) and value.ndim:
                structures[index] = budget.recognised(structures[index].dim, value.shape[-1])
        return structures[0], structures[1]

    def _checked(
        self, saved: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], required: frozenset[str]
    ) -> dict[str, Any]:
        """Copies of the tensors, if they are what they should be."""
        missing = sorted(required - saved.keys())
        if missing:
            raise ValueError(f"the checkpoint is damaged: {self._name!r} has no {', '.join(missing)}")
        shapes = {"dropped": (), **shapes}
        state: dict[str, Any] = {}
        for key, value in saved.items():
            if isinstance(value, int) and key in COUNTERS and 0 <= value < 1 << 62:  # as in older versions
                value = torch.tensor(value)
            if not isinstance(value, Tensor) or key not in shapes or value.shape != shapes[key]:
                raise ValueError(self._misfit(key, value, shapes.get(key)))
            value = whole(value)  # in any process the same, whatever is the matter with it
            counts = key in COUNTERS
            wanted = _WHOLE if counts else _COMPLEX if self._p.is_complex() and key != "step" else _REAL
            if (
                value.dtype not in (*wanted, *(() if counts else _REAL))
                or value.layout != torch.strided
                or value.is_meta
            ):
                raise ValueError(
                    f"the checkpoint is damaged: {key!r} of {self._name!r} is of the type {value.dtype}"
                )
            if not bool(value.isfinite().all()) or (key in _NEVER_NEGATIVE and bool((value < 0).any())):
                raise ValueError(f"the checkpoint is damaged: {key!r} of {self._name!r} is out of range")
            state[key] = int(value) if counts else self._copy(key, value)
            if not counts and not bool(state[key].isfinite().all()):
                raise ValueError(f"{key!r} of {self._name!r} in the checkpoint is out of its type's range")
        return state

    def _copy(self, key: str, value: Tensor) -> Tensor:
        if key == "step":  # which torch wants to have at hand
            return value.to("cpu", torch.float32, copy=True)
        return value.to(self._p.device, self._optimizer._state_dtype(self._p, key), copy=True)

    def _misfit(self, key: Any, value: Any, shape: tuple[int, ...] | None) -> str:
        found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        wanted = "nothing" if shape is None else f"a tensor of shape {list(shape)}"
        return (
            f"the checkpoint has {key!r} for {self._name!r} with the {found}, where {wanted} was expected: "
            f"it is damaged, or that of another model, or of an optimizer other than "
            f"{type(self._optimizer).__name__}; whether a bias was frozen matters as well"
        )


def _side(key: str) -> str:
    """Whose key it is: "m_K" is K's, "S_C_inverse" is C's."""
    return "K" if "K" in key else "C"

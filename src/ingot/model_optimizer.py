"""A torch optimizer that is given a model: it watches the layers, and follows what happens to parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ingot.capture import Tap
from ingot.distributed import reshard
from ingot.groups import Group, check_group
from ingot.model import Layer, find_layers
from ingot.rules import Pair
from ingot.stability import Rates
from ingot.statistics import Grams
from ingot.watch import Watch


@dataclass
class Joining:
    """What an optimizer knows of the Join that it is in."""

    config: Any = None  # Join's own word on it, which it never takes back
    of_replica: Any = None  # its word to the model within the same Join
    is_mean_of_all: bool = True  # whether gradients are divided by the number of all, or of those not done
    announced: list[tuple[Tensor, list[Any]]] = field(default_factory=list)  # since the last step

    @property
    def is_on(self) -> bool:
        """Whether it is in one."""
        return self.config is not None and self.config.enable


@dataclass
class Now:
    """What changes in the course of a training, in one object that is never replaced.

    Fabric and Lightning wrap an optimizer into one that has the same attributes. What either sets must be
    seen by the other.
    """

    compiled_before: bool  # whether the model was when the optimizer was made, and nothing was captured since
    paused: bool = False
    has_followed: bool = False  # whether changes of the model were looked for since the last step
    has_all_groups: bool = False
    loss_is_seen: bool = False
    seen_loss: Any = None  # what the next step is to check of it
    curvature_pass: Any = None  # that statistics come from at the moment, if not from the loss's
    grams: Grams = field(default_factory=Grams)
    rates: list[Rates] = field(default_factory=list)  # of the groups, in the step that is taken
    scratch: dict[torch.dtype, Any] = field(default_factory=dict)  # memory that steps of small layers share
    replicas: Any = None  # the processes that have replicas of the model, once one of them ran
    replica_group: Any = None  # that they have for gradients
    exchanges: list[Any] = field(default_factory=list)  # of statistics, which are on their way
    last_sent: int = -1  # the backward pass after which statistics were last sent
    joining: Joining = field(default_factory=Joining)  # of processes with different numbers of batches


class ModelOptimizer(Optimizer):
    """What an optimizer of whole models needs besides the steps that it takes.

    Parameters may be replaced, converted, resized, tied and untied while they are trained. Each keeps its
    group, and its state where that still fits.
    """

    _adamw: Group  # settings of groups that AdamW trains
    _choice: Any  # of structures, where they are not in the settings

    @abstractmethod
    def _choose(self, layers: Mapping[nn.Parameter, Layer]) -> None:
        """Choose the structures of new layers, given all layers, where that is not left to the settings."""

    @abstractmethod
    def _bind(self, layer: Layer) -> Pair:
        """The structures of a layer's factors, for its dimensions."""

    @abstractmethod
    def _is_due(self, layer: Layer) -> bool:
        """Whether the coming step wants a layer's statistics."""

    @abstractmethod
    def _collect(self, tap: Tap, x: Tensor, g: Tensor, start: int, backward_pass: object) -> None:
        """Take the statistics of one use of a layer in one backward pass."""

    @abstractmethod
    def _after_forward(self, replica: Any, output: Any) -> None:
        """Take note of a forward pass of one of several replicas of the model."""

    @abstractmethod
    def _lay_out(self, layer: Layer) -> Any:
        """How a layer is shared out over processes, None if it is not."""

    @abstractmethod
    def _laid_out(self, p: Tensor, key: str, value: Any) -> Any:
        """What of a parameter's state is this process's, if it is shared out, from all of it or its part."""

    @abstractmethod
    def _state_dtype(self, p: Tensor, key: str) -> torch.dtype:
        """The dtype of a tensor of a parameter's state."""

    @abstractmethod
    def _fitting(self, layer: Layer, state: dict[str, Any]) -> dict[str, Any]:
        """What of a state is of use for this layer's structures."""

    def _begin(self, model: nn.Module, compiled_before: bool) -> None:
        """What is not kept in checkpoints or copies."""
        self._watch = Watch(model, self, self._collect, self._after_forward)
        self._group_index: dict[Tensor, int] = {}
        self._positions: dict[Tensor, int] = {}  # among all parameters
        self._kinds: dict[Tensor, _Kind] = {}  # as parameters were when last seen
        self._now = Now(compiled_before)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as with any torch optimizer; layers of the model are preconditioned there, too.

        A bias whose weight is not trained yet becomes part of its matrix. A group without any layer has
        the settings of the others that AdamW trains, where it does not say otherwise.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"param_group must be a dict with 'params'; got {param_group!r}")
        check_group(self.defaults | param_group)
        self._follow_model()
        if not self._now.has_all_groups:  # the constructor's come one by one: layers would be incomplete
            self._append(param_group)
            return
        given = param_group["params"]
        params = given if isinstance(given, Tensor | set) else list(given)
        own = {
            p[1] if isinstance(p, tuple) else p for p in ([params] if isinstance(params, Tensor) else params)
        }
        trained = preconditionable(self.param_groups) | (
            own if param_group.get("precondition", True) else set()
        )
        decided = {weight: bias for weight, bias in self._watch.biases.items() if self.state.get(weight)}
        found = find_layers(self._watch.model, trained, decided)
        has_layers = any(p in own for layer in found.values() for p in layer.parameters)
        self._append(({} if has_layers else self._adamw) | param_group | {"params": params})
        try:
            self._renew(found)
        except ValueError:  # a structure that does not fit: nothing was hooked, so forget the group as well
            self.param_groups.pop()
            self._index_groups()
            raise

    def _append(self, group: Group) -> None:
        group.setdefault("peak_lr", 0.0)
        super().add_param_group(group)
        for name, value in group.items():
            if isinstance(value, Tensor):  # a learning rate, which schedulers change in place
                group[name] = value.clone()
        self._index_groups()

    def _renew(self, layers: dict[nn.Parameter, Layer]) -> None:
        """Watch these layers from now on; those that stay the same are left alone."""
        watched = self._watch.layers
        new = {
            weight: layer
            for weight, layer in layers.items()
            if weight not in watched
            or layer.uses != watched[weight].uses
            or layer.bias is not watched[weight].bias
        }
        self._choose(layers)
        for layer in new.values():
            layer.structures = self._bind(layer)
            layer.layout = self._lay_out(layer)
        for weight, layer in list(watched.items()):
            if weight in new or weight not in layers:
                self._watch.drop(layer)
        self._watch.attach(new.values(), self._group_index)
        self._refresh()

    def detach(self) -> None:
        """Leave the model: its hooks are removed, and the factors stay as they are."""
        self._watch.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context no statistics are taken: for backward passes that are no training steps."""
        before, self._now.paused = self._now.paused, True
        self._refresh()
        try:
            yield
        finally:
            self._now.paused = before
            self._refresh()

    @property
    def _layers(self) -> dict[nn.Parameter, Layer]:
        return self._watch.layers

    def _refresh(self) -> None:
        """Open the taps of the layers whose factors the coming step updates."""
        self._watch.open_taps(_never if self._now.paused else self._is_due)

    def _follow_model(self) -> None:
        """Take over parameters that were replaced in the model or changed their dtype or device."""
        if self._watch.has_changed:
            reshard(self._watch.model)  # which shows other parameters after a forward pass alone
            if self._watch.has_changed:
                self._replace_parameters(self._watch)
        changed = [p for p, kind in self._kinds.items() if (p.shape, p.dtype, p.device) != kind]
        for p in changed:
            self._convert(p, resized=self._kinds[p][0] != p.shape)
            self._kinds[p] = _kind(p)
        self._now.has_followed = True

    def _convert(self, p: Tensor, resized: bool) -> None:
        """Let the state of a parameter follow it; that of one with another shape is of no use."""
        if resized:
            self.state.pop(p, None)
            self._choose(self._layers)
            for layer in self._layers.values():
                if layer.weight is p:
                    layer.structures, layer.pending = self._bind(layer), None
                    layer.layout, layer.whole = self._lay_out(layer), None
            return
        state = self.state.get(p, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step":
                state[key] = value.to(p.device, self._state_dtype(p, key))

    def _replace_parameters(self, watch: Watch) -> None:
        """Train new parameters in the place of old ones, with their state where the shape is the same."""
        replaced, gone = watch.changes()
        now_is = {old: new for old, new in replaced if old in gone}
        biases = {now_is.get(w, w): None if b is None else now_is.get(b, b) for w, b in watch.biases.items()}
        for old, new in replaced:
            if new in self._group_index:
                continue
            members = self._group(old)["params"]
            self._group_index[new] = self._group_index[old]
            # Accelerate puts the parameters of a sharded model into the groups by itself.
            if all(p is not new for p in members):
                members.insert(next(i for i, p in enumerate(members) if p is old), new)
            if old in gone and old in self.state:
                state = self.state.pop(old)
                if new.shape == old.shape:
                    self.state[new] = state
                    self._kinds[new] = self._kinds[old]
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if p not in gone]
        for old in gone:
            self.state.pop(old, None)
            self._kinds.pop(old, None)
        self._index_groups()
        seen = {now_is.get(weight, weight): layer for weight, layer in watch.layers.items()}
        self._renew(find_layers(watch.model, preconditionable(self.param_groups), biases))
        for weight, layer in watch.layers.items():
            if weight in self.state:
                self.state[weight] = self._fitting(layer, self.state[weight])
            if layer.layout is not None and weight in seen and seen[weight].structures == layer.structures:
                layer.pending = seen[weight].pending  # its weight was sharded before the backward pass
        for p, state in self.state.items():
            self.state[p] = {key: self._laid_out(p, key, value) for key, value in state.items()}
        self._refresh()

    def _index_groups(self) -> None:
        self._group_index.clear()
        self._group_index |= {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        self._positions.clear()
        self._positions |= {p: i for i, p in enumerate(self._group_index)}
        for p in self._group_index:
            self._kinds.setdefault(p, _kind(p))
        for layer in self._layers.values():
            layer.plan = None  # which knows groups by their places

    def _group(self, parameter: Tensor) -> Group:
        return self.param_groups[self._group_index[parameter]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and the statistics that came with them."""
        self._follow_model()
        if set_to_none:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
        else:
            super().zero_grad(set_to_none=False)
        self._forget_statistics()
        self._now.has_followed = False
        self._refresh()

    def _forget_statistics(self) -> None:
        """Begin anew; what other processes were told is told to all of them, and forgotten by all."""
        for layer in self._layers.values():
            layer.pending = None
        for exchange in self._now.exchanges:
            exchange.end()
        self._now.exchanges.clear()

    def __getstate__(self) -> dict[str, Any]:
        # With the model, to which copies of the parameters belong.
        return super().__getstate__() | {"_followed": (self._watch.model, self._watch.biases)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        followed = state.pop("_followed", None)
        super().__setstate__(state)
        if followed is not None:  # a copy or unpickled; torch also comes here when it loads a state_dict
            model, biases = followed
            self._begin(model, compiled_before=False)
            self._index_groups()
            self._renew(find_layers(model, preconditionable(self.param_groups), biases))
            self._now.has_all_groups = True


_Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


def _never(_: Layer) -> bool:
    return False


def _kind(p: Tensor) -> _Kind:
    return p.shape, p.dtype, p.device


def preconditionable(groups: list[Group]) -> set[Tensor]:
    """The parameters that are not left to AdamW by their groups."""
    return {p for group in groups if group.get("precondition", True) for p in group["params"]}

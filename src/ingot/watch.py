"""An optimizer's eye on its model: layers with taps, and the places where parameters may be replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ingot.capture import ModelHook, Sink, Tap, install, remove
from ingot.distributed import are_several
from ingot.model import Layer, Link, links, names


class Watch:
    """The layers that an optimizer trains, with taps that report to it, for as long as it lives."""

    def __init__(
        self, model: nn.Module, optimizer: object, sink: Sink, after_forward: Callable[[Any, Any], None]
    ) -> None:
        self.model = model
        self.layers: dict[nn.Parameter, Layer] = {}
        self._layer_of: dict[Tap, Layer] = {}
        self._after_forward = weakref.WeakMethod(after_forward)
        self._of_model: list[RemovableHandle] = []
        self._sink = weakref.WeakMethod(sink)  # hooks must not keep the optimizer alive
        self._installed: dict[Tap, nn.Module] = {}
        self._names: dict[str, Tensor] = {}
        self._links: list[Link] = []
        self.has_open_taps = False
        self.close = weakref.finalize(optimizer, _remove_all, self._installed, self._of_model)
        self.close.atexit = False

    @property
    def biases(self) -> dict[Tensor, Tensor | None]:
        """Which bias belongs to which weight."""
        return {weight: layer.bias for weight, layer in self.layers.items()}

    def attach(self, layers: Iterable[Layer], trained: Container[Tensor]) -> None:
        """Put taps behind layers, and remember where all trained parameters are."""
        for layer in layers:
            self.layers[layer.weight] = layer
            for claim in layer.claims:
                flipped = claim.adapter.transposed != layer.adapter.transposed
                tap = Tap(claim.adapter, claim.module, flipped, self._sink)
                install(claim.owner, claim.family, claim.key, tap)
                layer.taps.append(tap)
                self._installed[tap], self._layer_of[tap] = claim.owner, layer
        self._names = {name: p for name, p in names(self.model).items() if p in trained}
        self._links = links(self.model)

    def drop(self, layer: Layer) -> None:
        """Take the taps of a layer away."""
        del self.layers[layer.weight]
        for tap in layer.taps:
            del self._layer_of[tap]
            remove(self._installed.pop(tap), tap)

    def layer_of(self, tap: Tap) -> Layer | None:
        """The layer that a tap is behind, if it is still watched."""
        return self._layer_of.get(tap)

    def open_taps(self, due: Callable[[Layer], bool]) -> None:
        """Let the taps of those layers through whose statistics are due, and of no other."""
        if not self._of_model and self.close.alive and are_several():
            hook = ModelHook(self._after_forward)
            self._of_model.append(self.model.register_forward_hook(hook))
        self.has_open_taps = False
        for layer in self.layers.values():
            is_due = due(layer)
            for tap in layer.taps:
                tap.active = is_due
                self.has_open_taps |= is_due

    @property
    def has_changed(self) -> bool:
        """Whether any module or parameter of the model is not what it was."""
        return any(table.get(key) is not value for table, key, value in self._links)

    def changes(self) -> tuple[list[tuple[Tensor, nn.Parameter]], set[Tensor]]:
        """Old parameters with those that have their names now, and the old ones that are gone."""
        now = names(self.model)
        pairs = [(old, now[name]) for name, old in self._names.items() if name in now]
        replaced = dict.fromkeys((old, new) for old, new in pairs if new is not old)
        return list(replaced), set(self._names.values()) - set(now.values())


def _remove_all(installed: dict[Tap, nn.Module], of_model: list[RemovableHandle]) -> None:
    for handle in of_model:
        handle.remove()
    for tap, module in installed.items():
        remove(module, tap)
    installed.clear()

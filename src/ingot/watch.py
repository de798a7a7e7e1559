"""An optimizer's eye on its model: layers with taps, and the places where parameters may be replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable

from torch import Tensor, nn

from ingot.capture import Sink, Tap, install, remove
from ingot.model import Layer, Place, find_layers, places


class Watch:
    """The layers that an optimizer trains, with taps that report to it, for as long as it lives."""

    def __init__(self, model: nn.Module, optimizer: object, sink: Sink) -> None:
        self.model = model
        self.layers: dict[nn.Parameter, Layer] = {}
        self._sink = weakref.WeakMethod(sink)  # hooks must not keep the optimizer alive
        self._installed: dict[Tap, nn.Module] = {}
        self._places: list[tuple[Place, Tensor]] = []
        self.close = weakref.finalize(optimizer, _remove_all, self._installed)
        self.close.atexit = False

    def find(self, trained: Container[Tensor]) -> dict[nn.Parameter, Layer]:
        """The model's layers as they are now."""
        joined = {layer.bias for layer in self.layers.values()}
        return find_layers(self.model, trained, joined)

    def attach(self, layers: Iterable[Layer], trained: Container[Tensor]) -> None:
        """Put taps behind layers, and remember where all trained parameters are."""
        for layer in layers:
            self.layers[layer.weight] = layer
            for claim in layer.claims:
                flipped = claim.adapter.transposed != layer.adapter.transposed
                tap = Tap(claim.adapter, claim.module, flipped, self._sink)
                install(claim.owner, claim.family, claim.key, tap)
                layer.taps.append(tap)
                self._installed[tap] = claim.owner
        everywhere = ((place, place.parameter) for place in places(self.model))
        self._places = [(place, p) for place, p in everywhere if p is not None and p in trained]

    def drop(self, layer: Layer) -> None:
        """Take the taps of a layer away."""
        del self.layers[layer.weight]
        for tap in layer.taps:
            remove(self._installed.pop(tap), tap)

    def open_taps(self, due: Callable[[Layer], bool]) -> None:
        """Let the taps of those layers through whose statistics are due, and of no other."""
        for layer in self.layers.values():
            is_due = due(layer)
            for tap in layer.taps:
                tap.active = is_due

    @property
    def has_open_taps(self) -> bool:
        return any(tap.active for layer in self.layers.values() for tap in layer.taps)

    @property
    def has_replaced(self) -> bool:
        """Whether any parameter is not where it was."""
        return any(place.parameter is not p for place, p in self._places)

    def replaced(self) -> list[tuple[Tensor, nn.Parameter, bool]]:
        """Old and new parameters, and whether the old one is still used elsewhere."""
        remaining = {p for place, p in self._places if place.parameter is p}
        pairs = {(old, new): None for place, old in self._places if (new := place.parameter) is not old}
        return [(old, new, old in remaining) for old, new in pairs if new is not None]


def _remove_all(installed: dict[Tap, nn.Module]) -> None:
    for tap, module in installed.items():
        remove(module, tap)
    installed.clear()

"""Natural gradients that replicas divide among them, where that takes less time than that each makes all."""

from __future__ import annotations

from torch import Tensor

from ingot.costs import layer_flops
from ingot.distributed import Processes
from ingot.exchange import Work, shared_work, told
from ingot.groups import Group
from ingot.model import Layer
from ingot.natural import Part, gradient_of
from ingot.precision import computing
from ingot.shortcuts import ShortcutOptimizer


class DividingOptimizer(ShortcutOptimizer):
    """Steps for which each of several processes makes some natural gradients, and tells the others of them.

    Factors are the same everywhere, and so is who makes which. Products of factors are kept where they are
    needed, so that these are divided as well.
    """

    def _step_weights(self, layers: list[Layer]) -> None:
        if self._now.replicas is not None:
            for processes, several in self._by_processes(layers).items():
                if processes is not None and several[0].layout is None:
                    self._divide(several, processes)
        super()._step_weights(layers)

    def _divide(self, layers: list[Layer], processes: Processes) -> None:
        """Have natural gradients of those layers made by one process each for which that is worth it."""
        works = {layer.weight: self._gradient_work(layer) for layer in layers}
        chosen = [layer for layer in layers if works[layer.weight].is_worth_telling]
        owners = shared_work([works[layer.weight] for layer in chosen], processes.workers)
        if owners is None:
            return
        values = []
        for layer, owner in zip(chosen, owners, strict=True):
            gradients = [gradient_of(p, self._group(p)) for p in layer.parameters]
            is_mine = owner == processes.worker
            group = self._group(layer.weight)
            values.append(super()._natural_gradient(layer, group, gradients) if is_mine else gradients)
        dtypes = [computing(self.state[layer.weight][self.rule.applied[0]].dtype) for layer in chosen]
        for layer, natural in zip(chosen, told(values, owners, dtypes, processes), strict=True):
            layer.natural = natural

    def _gradient_work(self, layer: Layer) -> Work:
        wanted = self._group(layer.weight)["share_work"]
        if wanted is False:
            return Work(0, 0, False)
        squares = self._kept_squares(layer)
        flops = layer_flops(self.rule, layer.structures, squares, layer.shape, []).gradient
        return Work(flops, sum(p.nbytes for p in layer.parameters), wanted)

    def _natural_gradient(self, layer: Layer, group: Group, gradients: list[Tensor]) -> list[Tensor]:
        if layer.natural is None:
            return super()._natural_gradient(layer, group, gradients)
        natural, layer.natural = layer.natural, None
        return natural

    def _is_usual(self, layer: Layer, parts: list[Part]) -> bool:
        return layer.natural is None and super()._is_usual(layer, parts)

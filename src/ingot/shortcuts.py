"""Shorter ways to take a step than that of ``stepping``, where it is one of the default settings."""

from __future__ import annotations

import torch
from torch import Tensor

from ingot import rows, small, stability
from ingot.compiled import take_steps
from ingot.model import Layer
from ingot.natural import Part, Scales
from ingot.precision import computing
from ingot.scalars import is_at_hand, squares
from ingot.stepping import SteppingOptimizer


class ShortcutOptimizer(SteppingOptimizer):
    """Steps that come to the same as the long way's: in few calls, in parts, or in compiled code."""

    def _step_weights(self, layers: list[Layer]) -> None:
        """Take the steps of all layers, each in the way that takes the least time."""
        others = self._step_small(layers)
        if others:
            super()._step_weights(self._step_large(self._step_compiled(others)))

    def _step_small(self, layers: list[Layer]) -> list[Layer]:
        """Take the usual steps of small layers whose numbers are at hand, and return the others.

        They share the memory that natural gradients need, and are made in few calls: where a product takes
        a tenth of a millisecond, both make a difference.
        """
        settings, rates = [small.settings_of(group) for group in self.param_groups], self._now.rates
        others: list[Layer] = []
        planned: list[tuple[Layer, small.Plan]] = []
        moved: list[tuple[Layer, small.Plan, small.Sizes]] = []
        # All layers do one thing before any does the next: code that has just run is found in the caches.
        try:
            for layer in layers:
                plan = layer.plan
                if plan is None or not plan.is_good(self.state, settings, rates):
                    plan = layer.plan = self._plan(layer)
                if plan is None:
                    others.append(layer)
                    continue
                plan.scratch.lend()
                if not plan.has_factors(self.rule):
                    plan.take_factors(self._kept(layer, self._group(layer.weight)))
                planned.append((layer, plan))
            for layer, plan in planned:
                sizes = plan.move_momenta(rates)
                if sizes is None:
                    others.append(layer)
                else:
                    moved.append((layer, plan, sizes))
        finally:
            for scratch in {*self._now.scratch.values(), *(plan.scratch for _, plan in planned)}:
                scratch.take_back()
        for layer, plan, sizes in reversed(moved):  # the last momenta are still in the caches
            plan.descend(sizes, rates)
            if self._is_looked_at(layer):
                gradients = [p.grad for p in layer.parameters if p.grad is not None]
                self._note_gain(layer, sizes.natural, squares(gradients).root_mean)
        return others

    def _plan(self, layer: Layer) -> small.Plan | None:
        """How a small layer takes its usual step, if that is what it is to take."""
        parts = self._parts(layer) if small.is_small(layer) else []
        if not parts or not self._is_usual(layer, parts):
            return None
        kept = self._kept(layer, parts[0].group)
        if computing(kept.k.entries.dtype) != layer.weight.dtype:
            return None
        if kept.scales is not None and (parts[0].group["compile"] or layer.weight.numel() > rows.LARGE):
            return None  # there are better ways
        scratch = small.scratch_for(layer, self._layers.values(), self._now.scratch)
        scratch.lend()
        return small.Plan(layer, parts, [self._group_index[part.p] for part in parts], kept, scratch)

    def _simple_scales(self, layer: Layer, parts: list[Part]) -> Scales | None:
        """What a gradient is multiplied with, if nothing else is done to it than usual; otherwise None."""
        if not self._is_usual(layer, parts):
            return None
        in_place = all(
            layer.adapter.weight_matrix(layer.module, t).data_ptr() == t.data_ptr() for t in parts[0].tensors
        )
        return self._kept(layer, parts[0].group).scales if in_place else None

    def _is_usual(self, layer: Layer, parts: list[Part]) -> bool:
        """Whether a layer takes a step of the default settings, which is not its first and not looked at."""
        state = self.state[layer.weight]
        if state["steps"] < stability.SETTLED_STEPS or len(parts) < len(layer.parameters):
            return False
        if self._is_looked_at(layer):
            return False
        if not all(part.is_simple for part in parts):
            return False
        return bool(parts[0].group["momentum"] == parts[-1].group["momentum"])

    def _step_compiled(self, layers: list[Layer]) -> list[Layer]:
        """Take the steps of all layers that can be part of compiled code, and return the others."""
        others: list[Layer] = []
        found: dict[torch.device, list[tuple[Layer, list[Part], Scales]]] = {}
        for layer in layers:
            wanted = layer.layout is None and self._group(layer.weight)["compile"]
            parts = self._parts(layer) if wanted else []
            scales = self._simple_scales(layer, parts) if parts else None
            if scales is None:
                others.append(layer)
            else:
                found.setdefault(layer.weight.device, []).append((layer, parts, scales))
        for several in found.values():
            for (layer, *_), sizes in zip(several, take_steps(several), strict=True):
                state = self.state[layer.weight]
                state["size"].copy_(sizes.usual)
                state["noise"].copy_(sizes.noise)
                state["dropped"] = state["dropped"] + ~sizes.trusted
                state["steps"] += 1
        return others

    def _step_large(self, layers: list[Layer]) -> list[Layer]:
        """Take the steps of all layers that are better moved in parts, and return the others."""
        others = []
        for layer in layers:
            is_large = layer.layout is None and layer.weight.numel() > rows.LARGE
            parts = self._parts(layer) if is_large else []
            scales = self._simple_scales(layer, parts) if parts and is_at_hand(layer.weight) else None
            if scales is not None:
                matrices = [layer.adapter.weight_matrix(layer.module, t) for t in parts[0].tensors]
                if all(matrix.is_contiguous() for matrix in matrices):
                    whole = rows.RowSteps(matrices, scales, float(parts[0].group["momentum"]))
                    self._step_in_rows(layer, parts, whole, scales.bias)
                    continue
            others.append(layer)
        return others

    def _step_in_rows(
        self, layer: Layer, parts: list[Part], whole: rows.RowSteps, of_bias: Tensor | None
    ) -> None:
        weight, *bias = parts
        count = sum(part.p.numel() for part in parts)
        natural = [part.tensors[1] * of_bias for part in bias if of_bias is not None]
        of_momentum, of_natural = whole.sums_of_squares()
        natural_size = ((of_natural + _total(natural)) / count) ** 0.5
        beside = [part.with_momentum(n) for part, n in zip(bias, natural, strict=True)]
        size = ((of_momentum + _total(beside)) / count) ** 0.5
        trusted = self._trusted(layer, weight.group, size, natural_size) is True
        if not trusted:
            beside = [part.with_momentum(torch.zeros_like(m)) for part, m in zip(bias, beside, strict=True)]
            of_momentum, natural_size = whole.sums_of_squares(with_gradient=False)
            size = ((of_momentum + _total(beside)) / count) ** 0.5
        length, *lengths = self._lengths(layer, parts, (size, natural_size))
        whole.descend(float(length), float(weight.rates.decay), with_gradient=trusted)
        steps = self.state[layer.weight]["steps"]
        for part, momentum, its_length in zip(bias, beside, lengths, strict=True):
            self._descend(part, part.keep(momentum), its_length, steps)
        self.state[layer.weight]["steps"] = steps + 1


def _total(tensors: list[Tensor]) -> float:
    """The sum of all squares of some small tensors."""
    return sum(float(t.square().sum()) for t in tensors)

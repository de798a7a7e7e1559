"""The update of the factors: the statistics of all layers, in batches of those that are alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ingot import stability
from ingot.collecting import CollectingOptimizer
from ingot.family import NORMS, NUMBERS, SIZES, Settings, Statistics
from ingot.model import Layer
from ingot.precision import computable, computing
from ingot.replicas import share_statistics
from ingot.rules import Curvature, Factor
from ingot.scalars import is_any, is_at_hand

LARGE = 1 << 16
"""Factors of more entries than this are updated one layer at a time: there, the operations take the time."""


MANY = 4
"""So many layers of one kind are updated at once even where that is not needed to keep a device busy."""


class UpdatingOptimizer(CollectingOptimizer):
    """What the factors learn from the statistics, before the weights move."""

    def _begun_factors(self, layer: Layer) -> tuple[Factor, Factor]:
        state = self.state[layer.weight]
        if self.rule.names[0] not in state:
            state |= self._first_state(layer, layer.weight.device)
        (of_k, of_c), (k, c) = layer.structures, self.rule.names
        return Factor(of_k, computable(state[k])), Factor(of_c, computable(state[c]))

    def _first_state(self, layer: Layer, device: torch.device | str) -> dict[str, Any]:
        like = torch.empty((), dtype=self._state_dtype(layer.weight, self.rule.keys[0]), device=device)
        state = self.rule.start(layer.structures, like, layer.shape[0], self._settings(layer))
        number = torch.zeros((), dtype=computing(like.dtype), device=device)
        return state | {key: number.clone() for key in SIZES} | {"steps": 0, "updates": 0}

    def _update_factors(self, layers: Iterable[Layer], scale: Tensor | None) -> None:
        """Let factors learn what their layers saw: those of the same kind at once, as one batch."""
        alike: dict[Any, list[Layer]] = {}
        for layer in layers:
            if layer.pending is not None:
                state = self.state[layer.weight]
                size = sum(state[name].numel() for name in self.rule.names)
                one = id(layer) if size > LARGE else None  # which would take more time to put together
                entries = state[self.rule.names[0]]
                key = (layer.structures, entries.shape, entries.dtype, entries.device, one)
                alike.setdefault((*key, state["updates"], self._settings(layer)), []).append(layer)
        for (*_, updates, settings), batch in alike.items():
            # A few matrices whose numbers can be looked at take less time one by one.
            one_by_one = len(batch) < MANY and is_at_hand(batch[0].weight)
            for several in [[layer] for layer in batch] if one_by_one else [batch]:
                self._update_batch(several, settings, updates, scale)

    def _share_statistics(self) -> None:
        """Let replicas of the model learn from each other's statistics, where there are any."""
        due = [layer for layer in self._layers.values() if any(tap.is_open for tap in layer.taps)]
        group = next((tap.replicas for layer in due for tap in layer.taps if tap.replicas is not None), None)
        if group is not None:
            share_statistics([(layer, self._begun_factors(layer)) for layer in due], group)

    def _update_batch(
        self, layers: list[Layer], settings: Settings, updates: int, scale: Tensor | None
    ) -> None:
        states, keys = [self.state[layer.weight] for layer in layers], (*self.rule.keys, *NUMBERS)
        factors = [{key: computable(state[key]) for key in keys if key in state} for state in states]
        seen = [self._seen(layer, scale) for layer in layers]
        dtype = self.state[layers[0].weight][self.rule.names[0]].dtype
        together = {key: _stacked([of[key] for of in factors]) for key in factors[0]}
        new = self.rule.update(layers[0].structures, together, _together(seen), settings, updates)
        new |= {key: new[key].to(dtype) for key in self.rule.keys if key in new and new[key].dtype != dtype}
        for layer, before, after in zip(layers, factors, _parts(new, len(layers)), strict=True):
            state = self.state[layer.weight]
            state |= after
            state["updates"] += 1
            if is_any(after["skipped"] > before.get("skipped", 0)):
                self._reporter.note("statistics", layer.name)
            if settings.max_factor_step is None:
                rates = [settings.precond_lr * after[key] for key in NORMS if key in after]
                if any(is_any(rate > stability.WILD) for rate in rates):
                    self._reporter.note("rate", layer.name)

    def _seen(self, layer: Layer, scale: Tensor | None) -> Statistics:
        """The statistics since the last step, in the dtype of the computation."""
        assert layer.pending is not None
        (of_k, of_c), group = layer.structures, self._group(layer.weight)
        seen = layer.pending.scaled(of_k.dim, of_c.dim, group["loss_average"] is not None, scale)
        dtype = computing(self.state[layer.weight][self.rule.names[0]].dtype)
        k, c = (side._replace(entries=side.entries.to(dtype)) for side in seen[:2])
        return seen._replace(k=k, c=c)

    def _settings(self, layer: Layer) -> Settings:
        """The numbers of a layer's coming factor update."""
        group, updates = self._group(layer.weight), self.state.get(layer.weight, {}).get("updates", 0)
        rate = group["precond_lr"]
        if callable(rate):
            rate = rate(updates)
            if not 0 <= rate <= 1:
                raise ValueError(
                    f"precond_lr must give numbers from 0 to 1; got {rate!r} for {updates} updates"
                )
        elif group["precond_warmup"]:
            rate = stability.warmed_rate(rate, updates)
        return Settings(rate, *(group[name] for name in Settings._fields[1:]))


def _stacked(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


def _together(seen: list[Statistics]) -> Statistics:
    """The statistics of several layers as those of a batch."""
    if len(seen) == 1:
        return seen[0]
    k, c = torch.stack([s.k.value for s in seen]), torch.stack([s.c.value for s in seen])
    of_u, of_g = [s.trace_u for s in seen], [s.trace_g for s in seen]
    u, g = (torch.stack([torch.as_tensor(t).to(k).view(-1, 1) for t in ts]) for ts in (of_u, of_g))
    return Statistics(Curvature(k), Curvature(c), u.view(*k.shape[:-1], 1), g.view(*k.shape[:-1], 1))


def _parts(state: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """A batch of states one by one, each in memory of its own."""
    if count == 1:
        return [state]
    return [{key: value[index].clone() for key, value in state.items()} for index in range(count)]

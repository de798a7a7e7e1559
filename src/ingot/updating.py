"""The update of the factors: the statistics of all layers, in batches of those that are alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ingot import stability
from ingot.collecting import CollectingOptimizer
from ingot.distributed import (
    Group,
    Processes,
    backward_ends,
    group_of_ones_own,
    is_distributed,
    is_sharded_model,
    shard_of,
    whole,
)
from ingot.exchange import Exchange, Work, shared_work, told
from ingot.family import NORMS, NUMBERS, SIZES, Settings, Statistics
from ingot.model import Layer
from ingot.precision import computable, computing
from ingot.rules import Curvature, Factor
from ingot.scalars import is_any, is_at_hand
from ingot.shards import Layout, layout_of

LARGE = 1 << 16
"""Factors of more entries than this are updated one layer at a time: there, the operations take the time."""


MANY = 4
"""So many layers of one kind are updated at once even where that is not needed to keep a device busy."""


class UpdatingOptimizer(CollectingOptimizer):
    """What the factors learn from the statistics, before the weights move."""

    def _begun_factors(self, layer: Layer) -> tuple[Factor, Factor]:
        if self.rule.names[0] not in self.state[layer.weight]:
            self._keep_state(layer, self._first_state(layer, layer.weight.device))
        (of_k, of_c), (k, c) = layer.structures, self.rule.names
        factors = self._factors(layer)
        return Factor(of_k, computable(factors[k])), Factor(of_c, computable(factors[c]))

    def _first_state(self, layer: Layer, device: torch.device | str) -> dict[str, Any]:
        like = torch.empty((), dtype=self._state_dtype(layer.weight, self.rule.keys[0]), device=device)
        state = self.rule.start(layer.structures, like, layer.shape[0], self._settings(layer))
        number = torch.zeros((), dtype=computing(like.dtype), device=device)
        return state | {key: number.clone() for key in SIZES} | {"steps": 0, "updates": 0}

    def _update_factors(self, layers: Iterable[Layer], scale: Tensor | None) -> None:
        """Let factors learn what their layers saw, here or in another process that tells of it."""
        learning = [layer for layer in layers if layer.pending is not None]
        if not learning:
            return
        for processes, several in self._by_processes(learning).items():
            owners = None if processes is None else shared_work(self._work(several), processes.workers)
            if processes is None or owners is None:
                self._update_here(several, scale)
                continue
            mine = [layer for layer, owner in zip(several, owners, strict=True) if owner == processes.worker]
            self._update_here(mine, scale)
            self._learn_from_others(several, owners, processes)

    def _update_here(self, layers: Iterable[Layer], scale: Tensor | None) -> None:
        """Update factors: those of the same kind at once, as one batch."""
        alike: dict[Any, list[Layer]] = {}
        for layer in layers:
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

    def _update_batch(
        self, layers: list[Layer], settings: Settings, updates: int, scale: Tensor | None
    ) -> None:
        states, keys = [self._factors(layer) for layer in layers], (*self.rule.keys, *NUMBERS)
        factors = [{key: computable(state[key]) for key in keys if key in state} for state in states]
        seen = [self._seen(layer, scale) for layer in layers]
        dtype = self.state[layers[0].weight][self.rule.names[0]].dtype
        together = {key: _stacked([of[key] for of in factors]) for key in factors[0]}
        new = self.rule.update(layers[0].structures, together, _together(seen), settings, updates)
        new |= {key: new[key].to(dtype) for key in self.rule.keys if key in new and new[key].dtype != dtype}
        for layer, before, after in zip(layers, factors, _parts(new, len(layers)), strict=True):
            self._keep_updated(layer, before, after, settings)

    def _keep_updated(
        self, layer: Layer, before: dict[str, Tensor], after: dict[str, Tensor], settings: Settings
    ) -> None:
        """Keep what an update came to, and say what was wrong with it."""
        self._keep_state(layer, after)
        self.state[layer.weight]["updates"] += 1
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

    # --- Work that is shared out over processes -----------------------------------------------------------

    def _by_processes(self, layers: list[Layer]) -> dict[Processes | None, list[Layer]]:
        """Layers by the processes that update them together."""
        found: dict[Processes | None, list[Layer]] = {}
        for layer in layers:
            processes = self._now.replicas if layer.layout is None else layer.layout.processes
            found.setdefault(processes, []).append(layer)
        return found

    def _work(self, layers: list[Layer]) -> list[Work]:
        """What each layer's update takes, and what it would take to tell others of it."""
        found = []
        for layer in layers:
            lead, wanted = layer.shape[0], self._group(layer.weight)["share_work"]
            flops = prod(lead) * 3 * sum(structure.product_flops for structure in layer.structures)
            size = sum(value.nbytes for value in self._told(layer).values())
            found.append(Work(flops, size, wanted))
        return found

    def _told(self, layer: Layer) -> dict[str, Tensor]:
        """What an update changes, in an order that all processes have."""
        state = self._factors(layer)
        return {key: state[key] for key in (*self.rule.keys, *NUMBERS) if key in state}

    def _learn_from_others(self, layers: list[Layer], owners: list[int], processes: Processes) -> None:
        """Take over what other processes made of the factors, and tell them what this one did."""
        dtypes = [computing(self.state[layer.weight][self.rule.names[0]].dtype) for layer in layers]
        before = [self._told(layer) for layer in layers]
        after = told([list(values.values()) for values in before], owners, dtypes, processes)
        for layer, owner, old, new in zip(layers, owners, before, after, strict=True):
            if owner != processes.worker:
                pairs = zip(old.items(), new, strict=True)
                state = {key: value.to(its.dtype, copy=True) for (key, its), value in pairs}
                self._keep_updated(layer, old, state, self._settings(layer))

    # --- Factors that are shared out over processes -------------------------------------------------------

    def _lay_out(self, layer: Layer) -> Layout | None:
        # The weights of tensor parallelism look the same, but all processes see the same samples.
        return layout_of(layer, self.rule, averaged=is_sharded_model(self._watch.model))

    def _laid_out(self, p: Tensor, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or is_distributed(p) == is_distributed(value):
            return value
        if is_distributed(value):
            return whole(value)
        shard = shard_of(p)
        if shard is not None and key in self.rule.keys:
            return shard.share(value)
        return shard.rows_like(value, p) if shard is not None and key in _LIKE_PARAMETERS else value

    def _keep_state(self, layer: Layer, new: dict[str, Any]) -> None:
        """Put new tensors into a layer's state: a part of each factor where these are shared out."""
        if layer.layout is not None:
            layer.whole = {key: value for key, value in new.items() if key in self.rule.keys}
        laid_out = {key: self._laid_out(layer.weight, key, value) for key, value in new.items()}
        self.state[layer.weight] |= laid_out

    def _factors(self, layer: Layer) -> dict[str, Any]:
        """A layer's state, with whole factors."""
        state = self.state[layer.weight]
        return state if layer.layout is None else state | (layer.whole or {})

    def _gather(self, layers: Iterable[Layer], keys: Iterable[str]) -> list[Layer]:
        """Get whole factors of the layers that have parts of them alone; returns these layers."""
        without = [layer for layer in layers if layer.layout is not None and layer.whole is None]
        places = [
            (layer, key) for layer in without for key in keys if key in self.state.get(layer.weight, {})
        ]
        by_mesh: dict[Any, list[tuple[Layer, str]]] = {}
        for layer, key in places:
            by_mesh.setdefault((layer.layout.shard.mesh, layer.layout.shard.axis), []).append((layer, key))
        for several in by_mesh.values():
            entries = [self.state[layer.weight][key] for layer, key in several]
            gathered = several[0][0].layout.shard.gather(entries)
            for (layer, key), value in zip(several, gathered, strict=True):
                layer.whole = (layer.whole or {}) | {key: value}
        return without

    @contextmanager
    def _whole_factors(self, layers: list[Layer], keys: Iterable[str]) -> Iterator[None]:
        """Within this context all entries of factors are here."""
        gathered = self._gather(layers, keys)
        yield
        for layer in gathered:
            layer.whole = None

    def _refresh(self) -> None:
        """Open taps; what they meet is multiplied with whole factors, which are needed at no other time."""
        super()._refresh()
        shared_out = [layer for layer in self._layers.values() if layer.layout is not None]
        if not shared_out:
            return
        due = [layer for layer in shared_out if layer.weight.requires_grad and self._is_due(layer)]
        self._gather(due, self.rule.keys)
        for layer in shared_out:
            if layer not in due:
                layer.whole = None

    # --- Statistics of several processes ------------------------------------------------------------------

    def _after_forward(self, replica: Any, output: Any) -> None:
        """Have statistics sent as soon as the backward pass of this forward pass ends, if they are due."""
        self._know_replicas(replica.process_group)
        if self._fisher == "separate" or not replica.require_backward_grad_sync or not self._due_layers():
            return
        optimizer = weakref.ref(self)

        def begins(_: Tensor) -> None:
            this = optimizer()
            current = torch._C._current_graph_task_id()
            if this is not None and this._now.last_sent != current:
                this._now.last_sent = current
                backward_ends(this._send_statistics)

        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begins)

    def _know_replicas(self, group: Group) -> None:
        """Let replicas have a group for the statistics, if they have none yet; all of them must call this."""
        if self._now.replicas is None:
            own = group_of_ones_own(group)
            self._now.replicas, self._now.replica_group = Processes((own,), own.size()), group

    def _due_layers(self) -> list[Layer]:
        """The layers whose statistics the coming step wants, seen or not: the same in each process."""
        return [layer for layer in self._layers.values() if any(tap.is_open for tap in layer.taps)]

    def _send_statistics(self) -> None:
        """Begin to tell other replicas what this one saw; what it sees afterwards is told apart."""
        due = self._due_layers()
        if due and self._now.replicas is not None:
            self._now.exchanges.append(self._exchange(due, self._now.replicas))
            for layer in due:
                layer.pending = None

    def _exchange(self, layers: list[Layer], processes: Processes) -> Exchange:
        dtypes = [computing(self._state_dtype(layer.weight, self.rule.names[0])) for layer in layers]
        short = self._group(layers[0].weight)["statistics_dtype"]
        return Exchange(zip(layers, dtypes, strict=True), processes, short)

    def _share_statistics(self) -> None:
        """Let all processes learn from each other's statistics, where there are several."""
        if self._now.replicas is None and all(layer.layout is None for layer in self._layers.values()):
            return
        due = self._due_layers()
        shared_out: dict[Any, list[Layer]] = {}
        for layer in due:
            if layer.layout is not None:
                shared_out.setdefault(layer.layout.shard.mesh, []).append(layer)
        for layers in shared_out.values():
            self._exchange(layers, layers[0].layout.processes).put_back([])
        if self._now.replicas is None or not due or shared_out:
            return
        if not self._now.exchanges:
            self._send_statistics()
        first, *others = self._now.exchanges
        first.put_back(others)
        self._now.exchanges.clear()
        for layer in due:
            if layer.pending is not None:
                self._begun_factors(layer)  # of a layer that this process did not see


_LIKE_PARAMETERS = ("momentum_buffer", "exp_avg", "exp_avg_sq")
"""The state's keys for what has a parameter's shape."""


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """All tensors of a model's output, whatever it is made of."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (tensor for value in output.values() for tensor in _tensors_in(value))
    elif isinstance(output, list | tuple):
        yield from (tensor for value in output for tensor in _tensors_in(value))
    elif is_dataclass(output) and not isinstance(output, type):
        yield from (tensor for field in fields(output) for tensor in _tensors_in(getattr(output, field.name)))


def _stacked(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


def _together(seen: list[Statistics]) -> Statistics:
    """The statistics of several layers as those of a batch."""
    if len(seen) == 1:
        return seen[0]
    k, c = torch.stack([s.k.value for s in seen]), torch.stack([s.c.value for s in seen])
    of_u, of_g = [s.trace_u for s in seen], [s.trace_g for s in seen]
    u, g = (
        torch.stack([torch.as_tensor(t, dtype=k.dtype, device=k.device).view(-1, 1) for t in ts])
        for ts in (of_u, of_g)
    )
    return Statistics(Curvature(k), Curvature(c), u.view(*k.shape[:-1], 1), g.view(*k.shape[:-1], 1))


def _parts(state: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """A batch of states one by one, each in memory of its own."""
    if count == 1:
        return [state]
    return [{key: value[index].clone() for key, value in state.items()} for index in range(count)]

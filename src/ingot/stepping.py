"""The step of the weights: natural gradients, momenta, lengths; and AdamW's, where there are no factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ingot import adamw as adamw_steps
from ingot import stability
from ingot.distributed import place_of
from ingot.groups import Group
from ingot.model import Layer, named_parameters
from ingot.natural import Kept, Part, fused_descent, gradient_of, natural_gradient
from ingot.precision import computing, put
from ingot.scalars import Flag, Number, Squares, is_at_hand, is_finite, no, number, squares, where
from ingot.shards import natural_gradient as natural_gradient_of_shard
from ingot.structures import Square
from ingot.updating import UpdatingOptimizer

GAIN_EVERY = 10
"""How long natural gradients are is noted at one of so many factor updates: it takes time."""


class Begun(NamedTuple):
    """A layer's step before the weights move: what the momenta will be, and the sizes that it depends on."""

    layer: Layer
    parts: list[Part]
    momenta: list[Tensor]
    sizes: dict[str, Squares]  # of "momentum"; of "weight", "natural" and plain "gradient" if needed


class SteppingOptimizer(UpdatingOptimizer):
    """What moves the parameters, once the factors are up to date."""

    def _parts(self, layer: Layer) -> list[Part]:
        return [self._part(p) for p in layer.parameters if p.grad is not None]

    def _part(self, p: nn.Parameter) -> Part:
        index = self._group_index[p]
        return Part(p, self.state[p], self.param_groups[index], self._now.rates[index])

    def _step_weights(self, layers: list[Layer]) -> None:
        """Take the steps of all layers, several at a time."""
        for several in _buckets(layers):
            self._step_layers(several)

    def _step_layers(self, layers: list[Layer]) -> None:
        """Take the steps of some layers in one place: all momenta first, so that sizes are read at once."""
        with self._whole_factors(layers, self.rule.applied):
            begun = [self._begun_step(layer) for layer in layers]
        for layer, parts, momenta, sizes in self._measured(begun):
            size = sizes["momentum"].root_mean
            natural_size = sizes["natural"].root_mean if "natural" in sizes else 0.0
            if "gradient" in sizes:
                self._note_gain(layer, natural_size, sizes["gradient"].root_mean)
            trusted = self._trusted(layer, parts[0].group, size, natural_size)
            if trusted is not True:
                momenta, size = self._without_gradient(layer, parts, momenta, trusted)
                natural_size = where(trusted, natural_size, 0.0)
            steps = self.state[layer.weight]["steps"]
            weight_size = sizes["weight"].root_mean if "weight" in sizes else None
            lengths = self._lengths(layer, parts, (size, natural_size), weight_size)
            for part, momentum, length in zip(parts, momenta, lengths, strict=True):
                self._descend(part, part.keep(momentum), length, steps)
            self.state[layer.weight]["steps"] = steps + 1

    def _begun_step(self, layer: Layer) -> Begun:
        """What the momenta of weight and bias will be after their natural gradients."""
        parts = self._parts(layer)
        for part in parts:
            part.begin()
        gradients = [gradient_of(p, self._group(p)) for p in layer.parameters]
        natural = self._natural_gradient(layer, parts[0].group, gradients)
        sizes = {}
        notes_gain = self._is_looked_at(layer)
        if notes_gain:
            sizes["gradient"] = _squares(layer, gradients, layer.parameters)
        if len(parts) < len(natural):  # a gradient is missing
            natural = [n for n, p in zip(natural, layer.parameters, strict=True) if p.grad is not None]
        moved = [part.p for part in parts]
        if notes_gain or parts[0].group["normalize_step"]:
            sizes["natural"] = _squares(layer, natural, moved)
        momenta = [part.with_momentum(n) for part, n in zip(parts, natural, strict=True)]
        sizes["momentum"] = _squares(layer, momenta, moved)
        # What is here is looked at when it turns out to matter; elsewhere all sizes are read at once.
        can_wait = layer.layout is None and is_at_hand(layer.weight)
        d_i, rates = layer.structures[0].dim, [part.rates for part in parts]
        if not can_wait and any(stability.may_bind(its.longest, d_i, its.max_relative) for its in rates):
            sizes["weight"] = squares([parts[0].value if parts[0].p is layer.weight else layer.weight])
        return Begun(layer, parts, momenta, sizes)

    def _natural_gradient(self, layer: Layer, group: Group, gradients: list[Tensor]) -> list[Tensor]:
        if layer.layout is None:
            return natural_gradient(layer, self._kept(layer, group), gradients)
        k, c = (self._factors(layer)[name] for name in self.rule.applied)
        dtype = computing(k.dtype)
        return natural_gradient_of_shard(layer, layer.layout, k, c, [g.to(dtype) for g in gradients])

    def _measured(self, begun: list[Begun]) -> list[Begun]:
        """The same with sizes of all that processes have of a layer, where its weight is shared out."""
        if not begun or begun[0].layer.layout is None:
            return begun
        shard, device = begun[0].layer.layout.shard, begun[0].layer.weight.device
        flat = [value for step in begun for both in step.sizes.values() for value in both]
        totals = iter(shard.summed(flat, device))
        return [
            step._replace(sizes={key: Squares(next(totals), next(totals)) for key in step.sizes})
            for step in begun
        ]

    def _kept(self, layer: Layer, group: Group) -> Kept:
        """K Kᵀ and C Cᵀ; where they are worth keeping, those that were made after the last factor update."""
        state, kept = self.state[layer.weight], layer.kept
        k, c = (state[name] for name in self.rule.applied)
        if kept is not None and kept.is_for(layer.structures, group):
            if kept.is_of(k, c):
                return kept
            if kept.has_room_for(k, c):
                layer.kept = kept.taking(k, c, layer.bias)
                return layer.kept
        layer.kept = Kept.of(layer, self.rule, group, (k, c), self._kept_for(layer, group))
        return layer.kept

    def _kept_for(self, layer: Layer, group: Group) -> int:
        """For how many steps products of a layer's factors may be kept; not at all where memory is short."""
        keep = group["cache_products"]
        if keep is None or (keep and self._choice.has_chosen(layer)):
            keep = self._choice.keeps_products(layer)
        return group["precond_every"] if keep else 0

    def _kept_squares(self, layer: Layer) -> tuple[Square, Square]:
        """How K Kᵀ and C Cᵀ are kept."""
        return self.rule.squares(layer.structures, self._kept_for(layer, self._group(layer.weight)))

    def _note_gain(self, layer: Layer, long: Number, short: Number) -> None:
        """Keep how much longer the natural gradient is than the plain one, for the diagnostics."""
        gain, state = long / stability.at_least_tiny(short), self.state[layer.weight]
        _note(state, "gain", where(is_finite(gain), gain, number(state["gain"])))

    def _is_looked_at(self, layer: Layer) -> bool:
        """Whether it is noted how long the natural gradient is in this step."""
        return layer.pending is not None and self.state[layer.weight]["updates"] % GAIN_EVERY == 1

    # --- What must not get in ---------------------------------------------------------------------------

    def _trusted(self, layer: Layer, group: Group, size: Number, natural_size: Number) -> Flag:
        """Whether a layer's natural gradient is finite and not out of all proportion to its momentum."""
        state = self.state[layer.weight]
        trusted = is_finite(size)
        if group["normalize_step"]:
            usual = number(state["size"])
            trusted = stability.is_usual(natural_size, usual, state["steps"])
            _note(state, "size", stability.usual_size(usual, size, trusted))
        self._count_dropped(layer, trusted)
        return trusted

    def _without_gradient(
        self, layer: Layer, parts: list[Part], momenta: list[Tensor], trusted: Flag
    ) -> tuple[list[Tensor], Number]:
        """Momenta after a gradient of zero where those after the real one are not trusted, and their size."""
        found = []
        for part, momentum in zip(parts, momenta, strict=True):
            other = part.with_momentum(torch.zeros_like(momentum))
            found.append(torch.where(trusted, momentum, other) if isinstance(trusted, Tensor) else other)
        size = _squares(layer, found, [part.p for part in parts])
        (step,) = self._measured([Begun(layer, parts, found, {"momentum": size})])
        return found, step.sizes["momentum"].root_mean

    def _count_dropped(self, layer: Layer, trusted: Flag) -> None:
        if trusted is not True:
            state = self.state[layer.weight]
            state["dropped"] = state["dropped"] + no(trusted)
            if trusted is False:
                self._reporter.note("gradient", layer.name)

    # --- Weights ----------------------------------------------------------------------------------------

    def _lengths(
        self, layer: Layer, parts: list[Part], sizes: tuple[Number, Number], weight_size: Number | None = None
    ) -> list[Number]:
        """What momenta are multiplied with, by their size and that of the natural gradient in them."""
        rates = [part.rates for part in parts]
        if not parts[0].group["normalize_step"]:
            return [its.lr for its in rates]
        (size, natural_size), rate, state = sizes, rates[0].momentum, self.state[layer.weight]
        noise = stability.noise_size(number(state["noise"]), natural_size, size, rate)
        _note(state, "noise", noise)

        def size_of_weight() -> Number:
            return squares([layer.weight]).root_mean if weight_size is None else weight_size

        agreement, d_i = stability.agreement(size, noise, rate), layer.structures[0].dim
        return stability.step_lengths(rates, size, agreement, d_i, size_of_weight)

    def _descend(self, part: Part, momentum: Tensor, length: Number, step: int) -> None:
        """W ← (1 - decay) W - length m."""
        p, decay = part.value, part.rates.decay
        value = p.to(computing(p.dtype))
        momentum = momentum.to(value.dtype)
        if isinstance(length, Tensor) or isinstance(decay, Tensor):
            length = torch.as_tensor(length, dtype=value.dtype, device=value.device)
            value.mul_(1 - decay).addcmul_(momentum, length, value=-1)
        elif decay and length and value.is_contiguous() and momentum.is_contiguous():
            fused_descent([value], [momentum], length, decay)
        else:
            value.mul_(1 - decay).sub_(momentum, alpha=length)
        if value is not p:
            put(p, value, self._noise(part.p, step))

    def _noise(self, p: Tensor, step: int) -> torch.Generator | None:
        """Random numbers to round a parameter with.

        They depend on the parameter and the step alone, so that a resumed run goes on as it would have, and
        replicas of a model stay the same. Parts of a parameter have different ones.
        """
        if not self._group(p)["stochastic_rounding"] or p.dtype != torch.bfloat16:
            return None
        return torch.Generator(p.device).manual_seed((place_of(p) << 44) + (step << 20) + self._positions[p])

    # --- AdamW ------------------------------------------------------------------------------------------

    def _step_adamw(self, group: Group, params: list[Tensor]) -> None:
        if not params:
            return
        for p in params:
            if p.grad is not None and p.grad.is_sparse:
                raise RuntimeError("gradients must be dense: build the embedding with sparse=False")
            if "exp_avg" not in self.state[p]:
                self.state[p] |= adamw_steps.start(p)
        bad = adamw_steps.step(params, [self.state[p] for p in params], group, self._noise)
        if bad:
            for name, p in named_parameters(self._watch.model).items():
                if p in bad:
                    self._reporter.note("gradient", name)


def _note(state: dict[str, Any], key: str, value: Number) -> None:
    """Keep a number in a parameter's state."""
    if isinstance(value, Tensor):
        state[key] = value
    else:
        state[key].fill_(value)


def _squares(layer: Layer, tensors: list[Tensor], params: Sequence[Tensor]) -> Squares:
    """Those of tensors like some of a layer's parameters, as far as this process is to count them."""
    return squares(tensors if layer.layout is None else layer.layout.own(tensors, params))


def _buckets(layers: list[Layer]) -> list[list[Layer]]:
    """Layers in one place that take their steps together: no more at a time than the largest has alone.

    What is in one place has one device, and one way to be shared out, of which each process has a part.
    """
    largest = max((layer.weight.numel() for layer in layers), default=0)
    buckets: list[list[Layer]] = []
    room, last = 0, None
    for layer in sorted(layers, key=lambda layer: layer.layout is not None):
        shard = None if layer.layout is None else layer.layout.shard
        place = (layer.weight.device, shard and (shard.mesh, shard.axis))
        size = layer.weight.numel() // (1 if shard is None else shard.count)
        if buckets and place == last and size <= room:
            buckets[-1].append(layer)
        else:
            buckets.append([layer])
            room = largest
        room, last = room - size, place
    return buckets

"""The step of the weights: natural gradients, momenta, lengths; and AdamW's, where there are no factors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ingot import adamw as adamw_steps
from ingot import stability
from ingot.collecting import CollectingOptimizer
from ingot.groups import Group
from ingot.model import Layer, named_parameters
from ingot.precision import computing, keeping, put
from ingot.rules import Pair, Product
from ingot.scalars import Flag, Number, is_finite, no, number, root_mean_square, where
from ingot.structures import Square
from ingot.structures.diagonal import Squares


class Scales(NamedTuple):
    """Diagonal K Kᵀ and C Cᵀ as numbers for the rows and columns of a gradient, and for the bias."""

    rows: Tensor
    columns: Tensor
    bias: Tensor | None


class Kept(NamedTuple):
    """The products of a layer's factors, and what they were made from."""

    structures: Pair
    kept_for: int
    sources: tuple[Tensor, Tensor]
    versions: tuple[int, int]
    products: tuple[Product, Product]
    scales: Scales | None

    def is_of(self, structures: Pair, kept_for: int, k: Tensor, c: Tensor) -> bool:
        """Whether the factors are still the same."""
        same = self.structures is structures and self.kept_for == kept_for
        same = same and self.sources[0] is k and self.sources[1] is c
        return same and self.versions == (k._version, c._version)


class Part(NamedTuple):
    """A parameter of a layer in its step."""

    p: nn.Parameter
    state: dict[str, Any]
    group: Group
    natural: Tensor

    def new_momentum(self) -> Tensor:
        """The momentum with the natural gradient added, and the weight decay where the paper adds it.

        It takes the place of the natural gradient. The old one stays until the new one is trusted.
        """
        p, state, group, natural = self
        for key in adamw_steps.KEYS & state.keys():  # which AdamW trained for a while
            del state[key]
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            natural.add_(p, alpha=group["weight_decay"])
        if not group["momentum"]:
            return natural
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, dtype=keeping(p.dtype))
        return natural.add_(state["momentum_buffer"], alpha=group["momentum"])

    def without_gradient(self, momentum: Tensor, trusted: Flag) -> Tensor:
        """The new momentum if it is trusted, otherwise what it would be after a gradient of zero."""
        zero = self._replace(natural=torch.zeros_like(momentum)).new_momentum()
        return torch.where(trusted, momentum, zero) if isinstance(trusted, Tensor) else zero

    def kept_momentum(self, momentum: Tensor) -> Tensor:
        """Put a new momentum in the place of the old one."""
        if not self.group["momentum"]:
            return momentum
        old = self.state["momentum_buffer"]
        alike = momentum.dtype == old.dtype and momentum.stride() == old.stride()
        if alike and momentum.untyped_storage().nbytes() == momentum.nbytes:
            self.state["momentum_buffer"] = momentum  # no need to write it once more
            return momentum
        return old.copy_(momentum)


class SteppingOptimizer(CollectingOptimizer):
    """What moves the parameters, once the factors are up to date."""

    def _step_layer(self, layer: Layer) -> None:
        state, group = self.state[layer.weight], self._group(layer.weight)
        natural = self._natural_gradient(layer, group)
        if layer.pending is not None:
            self._note_gain(layer, natural)
        parts = [
            Part(p, self.state[p], group if p is layer.weight else self._group(p), n)
            for p, n in zip(layer.parameters, natural, strict=True)
            if p.grad is not None
        ]
        momenta = [part.new_momentum() for part in parts]
        size = root_mean_square(momenta)
        trusted = self._trusted(layer, group, size)
        if trusted is not True:
            momenta = [part.without_gradient(m, trusted) for part, m in zip(parts, momenta, strict=True)]
            size = root_mean_square(momenta)
        lengths = self._lengths(layer, parts, size) if group["normalize_step"] else None
        for index, (part, momentum) in enumerate(zip(parts, momenta, strict=True)):
            lr = number(part.group["lr"])
            decay = lr * part.group["weight_decay"] if part.group["decoupled_weight_decay"] else 0.0
            length = lr if lengths is None else lengths[index]
            self._descend(part.p, part.kept_momentum(momentum), length, decay, state["steps"])
        state["steps"] += 1

    # --- Natural gradients ------------------------------------------------------------------------------

    def _natural_gradient(self, layer: Layer, group: Group) -> list[Tensor]:
        """C Cᵀ ∇W K Kᵀ of the weight and of its bias."""
        kept = self._kept(layer, group)
        weight, bias = layer.weight, layer.bias
        (k, c), adapter, dtype = kept.products, layer.adapter, kept.products[0].entries.dtype
        gradient = _as(adapter.weight_matrix(layer.module, self._gradient(weight, group)), dtype)
        last = None if bias is None else _as(self._gradient(bias, self._group(bias)), dtype)
        if kept.scales is not None:
            rows, columns, of_bias = kept.scales
            natural = torch.mul(gradient, rows).mul_(columns)
            beside = None if last is None or of_bias is None else last * of_bias.view(last.shape)
        elif last is None:
            natural, beside = k.apply_right(c.apply(gradient, torch.empty_like(gradient))), None
        else:
            d_i, both = gradient.shape[-1], _empty_beside(gradient)
            last = last.view(*gradient.shape[:-1], 1)
            for part, out in ((gradient, both.narrow(-1, 0, d_i)), (last, both.narrow(-1, d_i, 1))):
                result = c.apply(part, out)
                if result is not out:
                    out.copy_(result)
            both = k.apply_right(both)
            natural, beside = both.narrow(-1, 0, d_i), both.narrow(-1, d_i, 1)
        natural = adapter.matrix_weight(layer.module, natural, weight)
        return [natural] if bias is None or beside is None else [natural, beside.reshape(bias.shape)]

    def _kept(self, layer: Layer, group: Group) -> Kept:
        """K Kᵀ and C Cᵀ; where they are worth keeping, those that were made after the last factor update."""
        state, (k, c) = self.state[layer.weight], self.rule.applied
        kept_for = self._kept_for(layer, group)
        kept: Kept | None = layer.kept
        if kept is not None and kept.is_of(layer.structures, kept_for, state[k], state[c]):
            return kept
        sources = state[k], state[c]
        squares = self.rule.squares(layer.structures, kept_for)
        pairs = zip(squares, sources, strict=True)
        of_k, of_c = (Product(square, square.of(_as(a, computing(a.dtype)))) for square, a in pairs)
        versions = sources[0]._version, sources[1]._version
        scales = _scales(of_k, of_c, layer.bias is not None)
        kept = Kept(layer.structures, kept_for, sources, versions, (of_k, of_c), scales)
        layer.kept = kept if any(square.numel for square in squares) else None
        return kept

    def _kept_for(self, layer: Layer, group: Group) -> int:
        """For how many steps products of a layer's factors may be kept; not at all where memory is short."""
        return group["precond_every"] if group["cache_products"] and self._choice.keeps_products(layer) else 0

    def _kept_squares(self, layer: Layer) -> tuple[Square, Square]:
        """How K Kᵀ and C Cᵀ are kept."""
        return self.rule.squares(layer.structures, self._kept_for(layer, self._group(layer.weight)))

    def _gradient(self, p: nn.Parameter, group: Group) -> Tensor:
        if p.grad is None:
            return torch.zeros_like(p)
        return -p.grad if group["maximize"] else p.grad

    def _note_gain(self, layer: Layer, natural: list[Tensor]) -> None:
        """Keep how much longer the natural gradient is than the plain one, for the diagnostics."""
        plain = root_mean_square([p.grad for p in layer.parameters if p.grad is not None])
        gain, state = root_mean_square(natural) / stability.at_least_tiny(plain), self.state[layer.weight]
        _note(state, "gain", where(is_finite(gain), gain, number(state["gain"])))

    # --- Weights ----------------------------------------------------------------------------------------

    def _trusted(self, layer: Layer, group: Group, size: Number) -> Flag:
        """Whether a layer's new momentum is finite and not out of all proportion."""
        state = self.state[layer.weight]
        trusted = is_finite(size)
        if group["normalize_step"]:
            usual = number(state["size"])
            trusted = stability.is_usual(size, usual, state["steps"])
            _note(state, "size", stability.usual_size(usual, size, trusted))
        if trusted is not True:
            state["dropped"] = state["dropped"] + no(trusted)
            if trusted is False:
                self._reporter.note("gradient", layer.name)
        return trusted

    def _lengths(self, layer: Layer, parts: list[Part], size: Number) -> list[Number]:
        """What momenta of this size are multiplied with."""
        d_i, weight, lengths = layer.structures[0].dim, None, []
        for part in parts:
            lr, bound = number(part.group["lr"]), part.group["max_relative_step"]
            if bound is not None and (isinstance(lr, Tensor) or stability.may_bind(lr, d_i, bound)):
                weight = root_mean_square([layer.weight]) if weight is None else weight
                lengths.append(stability.step_length(lr, size, weight, d_i, bound))
            else:
                lengths.append(stability.step_length(lr, size, 0.0, d_i, None))
        return lengths

    def _descend(self, p: Tensor, momentum: Tensor, length: Number, decay: Number, step: int) -> None:
        """W ← (1 - decay) W - length m."""
        value = _as(p, computing(p.dtype))
        momentum = _as(momentum, value.dtype)
        if isinstance(length, Tensor) or isinstance(decay, Tensor):
            value.mul_(1 - decay).addcmul_(momentum, torch.as_tensor(length).to(value), value=-1)
        elif decay and length and value.is_contiguous() and momentum.is_contiguous():
            _fused_descent(value, momentum, length, decay)
        else:
            value.mul_(1 - decay).sub_(momentum, alpha=length)
        if value is not p:
            put(p, value, self._noise(p, step))

    def _noise(self, p: Tensor, step: int) -> torch.Generator | None:
        """Random numbers to round a parameter with.

        They depend on the parameter and the step alone, so that a resumed run goes on as it would have, and
        replicas of a model stay the same.
        """
        if not self._group(p)["stochastic_rounding"] or p.dtype != torch.bfloat16:
            return None
        return torch.Generator(p.device).manual_seed((step << 20) + self._positions[p])

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


def _scales(k: Product, c: Product, has_bias: bool) -> Scales | None:
    """What is kept of diagonal factors."""
    if not isinstance(k.square, Squares) or not isinstance(c.square, Squares):
        return None
    rows, columns = c.entries.unsqueeze(-1), k.entries.unsqueeze(-2)
    if not has_bias:
        return Scales(rows, columns, None)
    return Scales(rows, columns[..., :-1], c.entries * k.entries[..., -1:])


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _empty_beside(matrix: Tensor) -> Tensor:
    """Memory for a matrix and one column more, stored by columns where the matrix is."""
    *lead, rows, columns = matrix.shape
    if matrix.stride(-1) != 1 and matrix.mT.is_contiguous():
        return matrix.new_empty(*lead, columns + 1, rows).mT
    return matrix.new_empty(*lead, rows, columns + 1)


def _fused_descent(weight: Tensor, momentum: Tensor, length: float, decay: float) -> None:
    """W - length (m + decay / length W) in one pass: torch's SGD without momentum."""
    torch._fused_sgd_(
        [weight],
        [momentum],
        [],
        weight_decay=decay / length,
        momentum=0.0,
        lr=length,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _note(state: dict[str, Any], key: str, value: Number) -> None:
    """Keep a number in a parameter's state."""
    if isinstance(value, Tensor):
        state[key] = value
    else:
        state[key].fill_(value)

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

    def begin(self) -> None:
        """Make sure that there is a momentum, if there is to be one."""
        for key in adamw_steps.KEYS & self.state.keys():  # which AdamW trained for a while
            del self.state[key]
        if self.group["momentum"] and "momentum_buffer" not in self.state:
            self.state["momentum_buffer"] = torch.zeros_like(self.p, dtype=keeping(self.p.dtype))

    def decayed(self, natural: Tensor) -> Tensor:
        """The natural gradient with the weight decay where the paper adds it."""
        group = self.group
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            natural.add_(self.p, alpha=group["weight_decay"])
        return natural

    def momentum(self, natural: Tensor) -> Tensor:
        """The momentum after this natural gradient; with no momentum, the gradient itself."""
        natural = self.decayed(natural)
        if not self.group["momentum"]:
            return natural
        return accumulate(self.state["momentum_buffer"], natural, self.group["momentum"])


class SteppingOptimizer(CollectingOptimizer):
    """What moves the parameters, once the factors are up to date."""

    def _step_layer(self, layer: Layer) -> None:
        state, group = self.state[layer.weight], self._group(layer.weight)
        parts = [
            Part(p, self.state[p], group if p is layer.weight else self._group(p))
            for p in layer.parameters
            if p.grad is not None
        ]
        for part in parts:
            part.begin()
        trusted = self._trusted(layer, group)
        momenta = self._momenta(layer, group, parts, trusted)
        size = root_mean_square(momenta)
        momenta, size = self._without_overflow(layer, momenta, size)
        lengths = self._lengths(layer, parts, size) if group["normalize_step"] else None
        for index, (part, momentum) in enumerate(zip(parts, momenta, strict=True)):
            lr = number(part.group["lr"])
            decay = lr * part.group["weight_decay"] if part.group["decoupled_weight_decay"] else 0.0
            length = lr if lengths is None else lengths[index]
            self._descend(part.p, momentum, length, decay, state["steps"])
        state["steps"] += 1

    def _momenta(self, layer: Layer, group: Group, parts: list[Part], trusted: Flag) -> list[Tensor]:
        """The momenta of weight and bias after their natural gradients."""
        gradients = {p: self._gradient(p, trusted) for p in layer.parameters}
        kept = self._kept(layer, group)
        if kept.scales is not None and layer.pending is None and len(parts) == len(layer.parameters):
            momenta = _scaled_momenta(layer, parts, list(gradients.values()), kept.scales)
            if momenta is not None:
                return momenta
        natural = dict(zip(layer.parameters, self._natural_gradient(layer, kept, gradients), strict=True))
        if layer.pending is not None:
            self._note_gain(layer, list(natural.values()))
        return [part.momentum(natural[part.p]) for part in parts]

    # --- Natural gradients ------------------------------------------------------------------------------

    def _natural_gradient(self, layer: Layer, kept: Kept, gradients: dict[Any, Tensor]) -> list[Tensor]:
        """C Cᵀ ∇W K Kᵀ of the weight and of its bias."""
        weight, bias = layer.weight, layer.bias
        (k, c), adapter, dtype = kept.products, layer.adapter, kept.products[0].entries.dtype
        gradient = _as(adapter.weight_matrix(layer.module, gradients[weight]), dtype)
        last = None if bias is None else _as(gradients[bias], dtype)
        if kept.scales is not None:
            rows, columns, of_bias = kept.scales
            natural = torch.mul(gradient, rows).mul_(columns)
            beside = None if last is None or of_bias is None else last * of_bias.view(last.shape)
        elif last is None:
            natural, beside = k.apply_right(c.apply(gradient, torch.empty_like(gradient))), None
        else:
            d_i, last = gradient.shape[-1], last.view(*gradient.shape[:-1], 1)
            left = [c.apply(part, torch.empty_like(part)) for part in (gradient, last)]
            both = k.apply_right(_beside(*left))
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
        keep = group["cache_products"]
        if keep is None or (keep and self._choice.has_chosen(layer)):
            keep = self._choice.keeps_products(layer)
        return group["precond_every"] if keep else 0

    def _kept_squares(self, layer: Layer) -> tuple[Square, Square]:
        """How K Kᵀ and C Cᵀ are kept."""
        return self.rule.squares(layer.structures, self._kept_for(layer, self._group(layer.weight)))

    def _gradient(self, p: nn.Parameter, trusted: Flag) -> Tensor:
        if p.grad is None or trusted is False:
            return torch.zeros_like(p)
        gradient = p.grad if trusted is True else torch.where(torch.as_tensor(trusted), p.grad, 0)
        return -gradient if self._group(p)["maximize"] else gradient

    def _note_gain(self, layer: Layer, natural: list[Tensor]) -> None:
        """Keep how much longer the natural gradient is than the plain one, for the diagnostics."""
        plain = root_mean_square([p.grad for p in layer.parameters if p.grad is not None])
        gain, state = root_mean_square(natural) / stability.at_least_tiny(plain), self.state[layer.weight]
        _note(state, "gain", where(is_finite(gain), gain, number(state["gain"])))

    # --- What must not get in ---------------------------------------------------------------------------

    def _trusted(self, layer: Layer, group: Group) -> Flag:
        """Whether a layer's gradient is finite and not out of all proportion."""
        state = self.state[layer.weight]
        size = root_mean_square([p.grad for p in layer.parameters if p.grad is not None])
        trusted = is_finite(size)
        if group["normalize_step"]:
            usual = number(state["size"])
            trusted = stability.is_usual(size, usual, state["steps"])
            _note(state, "size", stability.usual_size(usual, size, trusted))
        self._count_dropped(layer, trusted)
        return trusted

    def _without_overflow(
        self, layer: Layer, momenta: list[Tensor], size: Number
    ) -> tuple[list[Tensor], Number]:
        """Momenta that are finite: if they grew beyond all numbers, they start anew."""
        finite = is_finite(size)
        if finite is True:
            return momenta, size
        self._count_dropped(layer, finite)
        for momentum in momenta:
            momentum.masked_fill_(torch.as_tensor(no(finite), device=momentum.device), 0.0)
        return momenta, where(finite, size, 0.0)

    def _count_dropped(self, layer: Layer, trusted: Flag) -> None:
        if trusted is not True:
            state = self.state[layer.weight]
            state["dropped"] = state["dropped"] + no(trusted)
            if trusted is False:
                self._reporter.note("gradient", layer.name)

    # --- Weights ----------------------------------------------------------------------------------------

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


def _beside(matrix: Tensor, column: Tensor) -> Tensor:
    """A matrix and one column more, stored by columns where the matrix is."""
    if matrix.stride(-1) != 1 and matrix.mT.is_contiguous():
        return torch.cat((matrix.mT, column.mT), dim=-2).mT
    return torch.cat((matrix, column), dim=-1)


CHUNK = 1 << 16
"""On a CPU so many numbers go through several operations at a time, so that they stay in its cache."""


def accumulate(momentum: Tensor, update: Tensor, rate: float) -> Tensor:
    """The momentum α₂ m + update, in place and rounded once."""
    if momentum.dtype == update.dtype:
        return torch.add(update, momentum, alpha=rate, out=momentum)
    return momentum.copy_(torch.add(update, momentum, alpha=rate))


def _scaled_momenta(
    layer: Layer, parts: list[Part], gradients: list[Tensor], scales: Scales
) -> list[Tensor] | None:
    """The momenta for diagonal factors, row by row; None if a row of the matrix is none of the momentum."""
    weight, dtype = parts[0], scales.rows.dtype
    if not weight.group["momentum"] or weight.p.dtype != dtype:
        return None
    stored = [gradients[0], weight.state["momentum_buffer"], weight.p]
    if any(not tensor.is_contiguous() for tensor in stored):
        return None
    g, m, w = (layer.adapter.weight_matrix(layer.module, tensor) for tensor in stored)
    if m.data_ptr() != stored[1].data_ptr() or m.numel() != stored[1].numel() or m.ndim != 2:
        return None
    rows, columns = scales.rows, scales.columns
    if layer.adapter.transposed:
        g, m, w, rows, columns = g.mT, m.mT, w.mT, columns.mT, rows.mT
    size = max(1, CHUNK // g.shape[1]) if g.device.type == "cpu" else len(g)
    decay = 0.0 if weight.group["decoupled_weight_decay"] else weight.group["weight_decay"]
    chunks = zip(*(tensor.split(size) for tensor in (g, m, w, rows)), strict=True)
    for g_rows, m_rows, w_rows, factors in chunks:
        natural = torch.mul(g_rows, factors).mul_(columns)
        if decay:
            natural.add_(w_rows, alpha=decay)
        accumulate(m_rows, natural, weight.group["momentum"])
    momenta = [weight.state["momentum_buffer"]]
    if len(parts) > 1 and scales.bias is not None:
        momenta.append(parts[1].momentum(gradients[1] * scales.bias.view(gradients[1].shape)))
    return momenta


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

"""An optimizer that collects statistics in backward passes: those of the loss, or others in their place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from ingot import fisher as curvature_of_losses
from ingot import health
from ingot.capture import Tap
from ingot.distributed import by_samples, is_sharded_model
from ingot.family import Rule
from ingot.groups import Group
from ingot.model import Layer
from ingot.model_optimizer import ModelOptimizer
from ingot.precision import autocast_is_on
from ingot.rules import Factor
from ingot.statistics import Pending, Use, sums_of_use


class CollectingOptimizer(ModelOptimizer):
    """What the layers' statistics come in by, until the next step takes them."""

    rule: ClassVar[Rule]

    @abstractmethod
    def _begun_factors(self, layer: Layer) -> tuple[Factor, Factor]:
        """A layer's factors in the precision that products are taken in; begun if there are none yet."""

    def _begin_collecting(self, fisher: str) -> None:
        self._fisher, self._reporter = fisher, health.Reporter()

    @torch.no_grad()
    def _collect(self, tap: Tap, x: Tensor, g: Tensor, start: int, backward_pass: object) -> None:
        """Add the statistics of one use of a layer in one backward pass."""
        if self._now.paused or (self._fisher == "separate" and self._now.curvature_pass is None):
            return
        x, g = by_samples(x), by_samples(g)
        if not g.numel():  # an empty batch, such as that of an expert without tokens
            return
        layer = self._layer_behind(tap)
        if layer is None:
            return
        if tap.replica is not None and self._now.replicas is None:
            self._after_forward(tap.replica, ())
        group, (k, c) = self._group(layer.weight), self._begun_factors(layer)
        constant = None
        if layer.bias is not None:  # which a tied module need not have
            bias = tap.adapter.bias(tap.module)
            is_its = bias is layer.bias or (bias is not None and tap.module is layer.module)
            constant = float(not tap.flipped and is_its)
        device = x.device.type
        off = torch.autocast(device, enabled=False) if autocast_is_on(device) else nullcontext()
        with off:
            x = x.to(k.entries) if x.is_floating_point() else x.to(k.entries.device)
            g = g.to(c.entries)
            use = Use(
                tap.adapter,
                tap.module,
                x,
                g,
                start=start,
                flipped=tap.flipped,
                constant=constant,
                max_rows=group["max_rows"],
                turn=self.state[layer.weight]["updates"],
            )
            sums = sums_of_use(self.rule, (k, c), use, group["approx"], self._now.grams)
        if not self._now.loss_is_seen:
            self._see_loss(layer, use, group)
        terms = use.batch * use.places if group["loss_average"] == "token" else use.batch
        layer.pending = layer.pending or Pending()
        if self._now.curvature_pass is None:
            layer.pending.add(sums, tap.flipped, terms, backward_pass)
        else:
            given = self._now.curvature_pass
            layer.pending.add(sums, tap.flipped, given.terms or terms, given, given.power)

    def _layer_behind(self, tap: Tap) -> Layer | None:
        """The layer that a tap is behind, after parameters of the model were replaced, if they were.

        A sharded model shows whole parameters in the place of its own in a backward pass.
        """
        weight, layer = tap.adapter.weight(tap.module), self._watch.layer_of(tap)
        if layer is not None and layer.layout is not None:
            return layer
        known = None if weight is None else self._layers.get(weight)
        if known is not None and self._now.has_followed:
            return known
        if is_sharded_model(self._watch.model):  # since the optimizer was made
            return layer
        self._follow_model()
        return None if weight is None else self._layers.get(weight)

    @property
    def wants_curvature(self) -> bool:
        """Whether the coming step updates factors."""
        return self._watch.has_open_taps

    @property
    def _learns(self) -> bool:
        """Whether the step that is taken may update factors."""
        return self._watch.has_open_taps or any(layer.pending is not None for layer in self._layers.values())

    def curvature(self) -> AbstractContextManager[None]:
        """With ``fisher="separate"``: the backward passes within are those that statistics are taken from.

        Together they count as one backward pass of the loss, in whose place they are, with the same means.
        Use ``torch.autograd.grad``, which leaves the parameters' gradients alone.
        """
        return self._curvature(_CurvaturePass())

    @contextmanager
    def _curvature(self, this_pass: _CurvaturePass) -> Iterator[None]:
        if self._fisher != "separate":
            raise RuntimeError(
                "statistics come from every backward pass already: make the optimizer with fisher='separate'"
            )
        if is_sharded_model(self._watch.model):
            raise RuntimeError(
                "a model that fully_shard shares out has one backward pass for each forward pass, and none "
                "for its curvature: make the optimizer with fisher='empirical', or train replicas of it"
            )
        self._now.curvature_pass = this_pass
        try:
            yield
        finally:
            self._now.curvature_pass = None

    def curvature_backward(
        self, output: Tensor, loss: str, *, samples: int | None = 1, reduction: str = "mean", dim: int = -1
    ) -> None:
        """Take the statistics from the loss's curvature at the model's output instead of from its gradient.

        It is the Fisher information by sampled targets, or the generalised Gauss-Newton matrix with
        ``samples=None``. To be called between the forward pass and ``loss.backward()``; does nothing where
        the coming step updates no factors.

        Args:
            output: The model's output, before any softmax.
            loss: ``"cross_entropy"``, ``"binary_cross_entropy"`` (of logits) or ``"mse"``.
            samples: How many targets to draw for each output, or None for the exact curvature, which takes
                one backward pass for each dimension of the output.
            reduction: Whether the loss is a ``"mean"`` or a ``"sum"``.
            dim: The dimension of classes or of the values of one prediction.
        """
        if not isinstance(output, Tensor) or not output.requires_grad:
            raise ValueError(f"output must be the model's own, with a gradient to be had; got {output!r}")
        if not -output.dim() <= dim < output.dim():
            raise ValueError(f"dim must be one of the output's {output.dim()} dimensions; got {dim!r}")
        outputs = output.numel() // output.shape[dim]
        with self._curvature(_CurvaturePass(outputs, -1 if reduction == "mean" else 0)):
            vectors = curvature_of_losses.directions(output.detach(), loss, samples, reduction, dim)
            weights = [layer.weight for layer in self._layers.values() if layer.weight.requires_grad]
            if not weights or not self.wants_curvature:
                return
            for vector in vectors:
                torch.autograd.grad(output, weights, vector, retain_graph=True, allow_unused=True)

    def _see_loss(self, layer: Layer, use: Use, group: Group) -> None:
        """Look at the first gradients at the model's end, if what the loss is a mean of matters."""
        self._now.loss_is_seen = True
        cancels = group["relative_damping"] and group["factor_start"] == "trace" and group["normalize_step"]
        if not cancels and self._now.curvature_pass is None and not use.flipped:
            weight = health.weight_of_terms(use.gradients)
            self._now.seen_loss = layer.name, weight, use.batch, use.places, group["loss_average"]

    def _check_loss(self, scale: Tensor | None) -> None:
        """Say so if the loss was not as it was declared."""
        if self._now.seen_loss is not None:
            name, weight, *declared = self._now.seen_loss
            self._now.seen_loss = None
            other = health.other_average(weight if scale is None else weight / float(scale), *declared)
            if other:
                self._reporter.note("loss", name, other)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            "_fisher": self._fisher,
            "_adamw": self._adamw,
            "_choice": self._choice,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_fisher" in state:  # a copy or unpickled; torch also comes here when it loads a state_dict
            self._begin_collecting(state["_fisher"])
        super().__setstate__(state)


class _CurvaturePass:
    """Backward passes that statistics come from instead of the loss's, as one."""

    def __init__(self, terms: int | None = None, power: int | None = None) -> None:
        self.terms, self.power = terms, power  # of which losses, and how G scales with them, if known

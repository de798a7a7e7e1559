"""The optimizers: parameter groups, state and the step loop. The mathematics is in ``rules``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as functional_adamw

from ingot import fisher as curvature_of_losses
from ingot import rules
from ingot.capture import Tap
from ingot.description import Description, describe
from ingot.groups import Group, Params, separate_adamw, structure_pair, trained_groups
from ingot.model import Layer, find_layers, is_compiled, unwrapped
from ingot.model_optimizer import ModelOptimizer, preconditionable
from ingot.rules import TRACES, Factor, InverseFree, Inverting, Pair, Rule, Settings, Statistics
from ingot.statistics import Pending, Use, sums_of_use
from ingot.structures import Factory, bind, resolve

StructureLike: TypeAlias = str | Factory

PAPER: Mapping[str, Any] = {
    "precond_warmup": 0,
    "max_factor_step": None,
    "relative_damping": False,
    "factor_start": "identity",
    "normalize_step": False,
    "max_relative_step": None,
    "decoupled_weight_decay": False,
}
"""Keyword values under which every optimizer takes exactly the paper's step: ``SINGD(model, **PAPER)``."""


class NaturalGradient(ModelOptimizer):
    """The family's common optimizer; ``SINGD``, ``INGD``, ``IKFAC`` and ``KFAC`` say which rule it follows.

    Linear layers, convolutions, embeddings and attention are preconditioned, weight and bias together as one
    matrix. All other parameters are trained by AdamW, in a parameter group of their own of the same
    optimizer; ``describe`` tells which is which.

    Args:
        model: The model to train.
        params: None trains every parameter of the model that is not frozen. Otherwise as for any torch
            optimizer: parameters, or groups of them with settings of their own (exactly these are trained).
            Groups may also name their parameters by patterns, such as ``{"params": "*.bias",
            "weight_decay": 0.0}``; the parameters that no pattern names keep the settings below. A layer's
            factors follow the group of its weight, and weight and bias may be in different groups. A group
            with ``"precondition": False`` is left to AdamW.
        lr: Learning rate, on AdamW's scale unless ``normalize_step`` is off (β₂ in the paper).
        structure: Structure of the factors: text such as ``"diagonal"`` or ``"hierarchical(15,15)"``, a
            function of the dimension such as ``ingot.structures.Diagonal``, or a pair of these for K (on the
            inputs) and C (on the outputs).
        approx: How shared weights enter the factors: ``"expand"`` or ``"reduce"``.
        loss_average: What the loss is a mean of: ``"batch"``; ``"token"`` for batch and shared positions;
            ``None`` for a sum.
        momentum: Momentum of the weights' update (α₂).
        weight_decay: Weight decay (γ).
        damping: Damping λ, relative to the mean curvature unless ``relative_damping`` is off.
        precond_lr: Step size β₁ of the factors, a number or a function of the number of updates so far.
        precond_momentum: Riemannian momentum α₁ of the factors; costs a second copy of them.
        precond_every: Steps from one update of the factors to the next (T).
        factor_dtype: The factors' dtype; None takes the weight's.
        precond_warmup: For so many first steps the factors are updated every time, and β₁ starts high.
        max_factor_step: Bound on β₁ times the spectral norm of a factor's direction, or None.
        relative_damping: Whether ``damping`` is in units of the mean traces of U and G.
        factor_start: ``"identity"``, or ``"trace"`` for the multiple of it that fits the first batch.
        normalize_step: Whether a layer's update is scaled to a root mean square of ``lr``.
        max_relative_step: Bound on that root mean square in units of the weights' own, or None.
        decoupled_weight_decay: Whether weight decay acts beside the momentum, as in AdamW, not inside it.
        adamw: Settings of the AdamW groups where they differ: ``lr``, ``betas``, ``eps``, ``weight_decay``.
        fisher: Where the curvature comes from: ``"empirical"`` takes it from the loss's own backward pass,
            ``"separate"`` only from what is given to ``curvature_backward`` or done inside ``curvature``.
    """

    rule: ClassVar[Rule]
    default_structure: ClassVar[str] = "dense"

    def __init__(
        self,
        model: nn.Module,
        params: Params | None = None,
        lr: float | Tensor = 1e-3,
        *,
        structure: StructureLike | tuple[StructureLike, StructureLike] | None = None,
        approx: str = "expand",
        loss_average: str | None = "batch",
        momentum: float = 0.9,
        weight_decay: float = 1e-2,
        damping: float = 0.1,
        precond_lr: float | Callable[[int], float] = 0.1,
        precond_momentum: float = 0.0,
        precond_every: int = 10,
        factor_dtype: torch.dtype | None = None,
        precond_warmup: int = 20,
        max_factor_step: float | None = 0.5,
        relative_damping: bool = True,
        factor_start: str = "trace",
        normalize_step: bool = True,
        max_relative_step: float | None = 0.03,
        decoupled_weight_decay: bool = True,
        adamw: Mapping[str, Any] | None = None,
        fisher: str = "empirical",
    ) -> None:
        # Every keyword but adamw is the default of a group's setting of the same name.
        defaults = {k: v for k, v in locals().items() if k not in _NOT_SETTINGS}
        defaults |= {"structure": structure or self.default_structure, "precondition": True}
        defaults |= {"betas": (0.9, 0.999), "eps": 1e-8}
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"the first argument is the model itself, got {type(model).__name__}: write "
                f"{type(self).__name__}(model), not {type(self).__name__}(model.parameters())"
            )
        if fisher not in ("empirical", "separate"):
            raise ValueError(f"fisher must be 'empirical' or 'separate'; got {fisher!r}")
        self._fisher = fisher
        self._curvature_pass: _CurvaturePass | None = None
        inner = unwrapped(model)
        self._begin(inner, is_compiled(model))
        groups = trained_groups(inner, params)
        found = find_layers(inner, preconditionable(groups))
        preconditioned = {p for layer in found.values() for p in layer.parameters}
        super().__init__(separate_adamw(groups, preconditioned, dict(adamw or {})), defaults)
        self._attach(found)
        self._has_all_groups = True

    def _bind(self, layer: Layer) -> Pair:
        """The structures of a layer's factors, for its dimensions."""
        _, d_o, d_i = layer.shape
        group = self._group(layer.weight)
        of_k, of_c = structure_pair(group["structure"])
        if layer.adapter.input_structure is not None:
            of_k = resolve(layer.adapter.input_structure)
        try:
            pair = bind(of_k, d_i), bind(of_c, d_o)
            self.rule.check(pair, group["precond_momentum"])
        except ValueError as error:
            raise ValueError(f"layer {layer.name!r}: {error}") from None
        return pair

    def _is_due(self, layer: Layer) -> bool:
        group, steps = self._group(layer.weight), self.state.get(layer.weight, {}).get("steps", 0)
        return steps < group["precond_warmup"] or steps % group["precond_every"] == 0

    def _state_dtype(self, p: Tensor, key: str) -> torch.dtype:
        factor_dtype = self._group(p)["factor_dtype"] or p.dtype
        if key in TRACES:
            return rules.computing(factor_dtype)
        return factor_dtype if key in self.rule.keys else p.dtype

    def _fitting(self, layer: Layer, state: dict[str, Any]) -> dict[str, Any]:
        pairs = zip(self.rule.names, layer.structures, strict=True)
        if all(state[name].shape[-1] == s.numel for name, s in pairs if name in state):
            return state
        return {key: value for key, value in state.items() if key == "momentum_buffer"}

    def describe(self) -> Description:
        """A table of which parameter is trained how, by which structures, at what memory; print it."""
        return describe(self, self._watch.model, self._layers)

    # --- Backward: statistics come in -------------------------------------------------------------------

    @torch.no_grad()
    def _collect(self, tap: Tap, x: Tensor, g: Tensor, start: int, backward_pass: object) -> None:
        """Add the statistics of one use of a layer in one backward pass."""
        if self._paused or (self._fisher == "separate" and self._curvature_pass is None):
            return
        if not g.numel():  # an empty batch, such as that of an expert without tokens
            return
        weight = tap.adapter.weight(tap.module)
        if not self._has_followed or weight not in self._layers:
            self._follow_model()
        if weight is None or weight not in self._layers:
            return
        layer = self._layers[weight]
        group, factors = self._group(weight), self._factors(layer, start=True)
        k, c = (Factor(s, factors[name]) for s, name in zip(layer.structures, self.rule.names, strict=True))
        constant = None
        if layer.bias is not None:  # which a tied module need not have
            constant = float(not tap.flipped and tap.adapter.bias(tap.module) is layer.bias)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(k.entries) if x.is_floating_point() else x.to(k.entries.device)
            g = g.to(c.entries)
            use = Use(tap.adapter, tap.module, x, g, start=start, flipped=tap.flipped, constant=constant)
            sums = sums_of_use(self.rule.statistic, (k, c), use, group["approx"])
        terms = use.batch * use.places if group["loss_average"] == "token" else use.batch
        layer.pending = layer.pending or Pending()
        if self._curvature_pass is None:
            layer.pending.add(sums, tap.flipped, terms, backward_pass)
        else:
            given = self._curvature_pass
            layer.pending.add(sums, tap.flipped, given.terms or terms, given, given.power)

    @property
    def wants_curvature(self) -> bool:
        """Whether the coming step updates factors."""
        return self._watch.has_open_taps

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
        self._curvature_pass = this_pass
        try:
            yield
        finally:
            self._curvature_pass = None

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
        outputs = output.numel() // output.shape[dim]
        with self._curvature(_CurvaturePass(outputs, -1 if reduction == "mean" else 0)):
            vectors = curvature_of_losses.directions(output.detach(), loss, samples, reduction, dim)
            weights = [layer.weight for layer in self._layers.values() if layer.weight.requires_grad]
            if not weights or not self.wants_curvature:
                return
            for vector in vectors:
                torch.autograd.grad(output, weights, vector, retain_graph=True, allow_unused=True)

    def _factors(self, layer: Layer, start: bool = False) -> dict[str, Tensor]:
        """A layer's factors in the precision that products are taken in; begun if there are none yet."""
        state = self.state[layer.weight]
        if start and self.rule.names[0] not in state:
            state |= self._first_factors(layer, layer.weight.device)
            state |= {"steps": 0, "updates": 0}
        kept = (key for key in (*self.rule.keys, *TRACES) if key in state)
        return {key: state[key].to(rules.computing(state[key].dtype)) for key in kept}

    def _first_factors(self, layer: Layer, device: torch.device | str) -> dict[str, Tensor]:
        dtype = self._group(layer.weight)["factor_dtype"] or layer.weight.dtype
        return self.rule.start(layer.structures, torch.empty((), dtype=dtype, device=device), layer.shape[0])

    # --- Checkpoints ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text; functions (a schedule, a structure of one's own) stay behind."""
        saved = super().state_dict()
        groups = saved["param_groups"]
        saved["param_groups"] = [{k: v for k, v in group.items() if _is_plain(v)} for group in groups]
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint, which is left as it is; functions stay those of this optimizer."""
        before = self.param_groups
        super().load_state_dict(state_dict)
        for group, old in zip(self.param_groups, before, strict=True):
            group |= {k: v for k, v in old.items() if k not in group}
        # torch casts state to its parameter's dtype, which factors need not share, and keeps the caller's own
        # tensors, which training would then change.
        own_dtype = (*self.rule.keys, *TRACES)
        saved_ids = (i for group in state_dict["param_groups"] for i in group["params"])
        parameters = (p for group in self.param_groups for p in group["params"])
        for i, p in zip(saved_ids, parameters, strict=True):
            state, saved = self.state[p], state_dict["state"].get(i, {})
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = (saved[key] if key in own_dtype else value).to(p.device, copy=True)
        for layer in self._layers.values():
            layer.pending = None
        self._refresh()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_fisher": self._fisher, "_curvature_pass": None}

    # --- Step: factors, then weights --------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the factors if it is their turn, and then every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_model()
        self._has_followed = False
        self._check_captured()
        done: set[Tensor] = set()
        for layer in self._layers.values():
            # A layer that was never captured (its module's forward was bypassed) has no factors: AdamW's.
            captured = self.rule.names[0] in self.state.get(layer.weight, {})
            if layer.weight.grad is not None and captured:
                self._update_factors(layer)
                self._step_layer(layer, layer.weight.grad)
                done.update(layer.parameters)
            layer.pending = None
        for group in self.param_groups:
            self._step_adamw(group, [p for p in group["params"] if p.grad is not None and p not in done])
        self._refresh()
        return loss

    def _check_captured(self) -> None:
        """Say so where nothing at all was captured though it should have been."""
        layers = [layer for layer in self._layers.values() if layer.weight.grad is not None]
        if not layers or any(self.rule.names[0] in self.state.get(layer.weight, {}) for layer in layers):
            return
        if self._fisher == "separate":
            raise RuntimeError(
                "no curvature was given: with fisher='separate', call optimizer.curvature_backward(output, "
                "loss) before loss.backward(), or make a backward pass inside optimizer.curvature()"
            )
        if self._compiled_before:
            self._compiled_before = False  # once is enough
            warnings.warn(
                "no layer was captured, so all are trained by AdamW: the compiled model ran before this "
                "optimizer was made, and its code has no hooks. Call torch._dynamo.reset() once after making "
                "the optimizer.",
                stacklevel=4,
            )

    def _update_factors(self, layer: Layer) -> None:
        if layer.pending is None:
            return
        group, state = self._group(layer.weight), self.state[layer.weight]
        _, d_o, d_i = layer.shape
        seen = layer.pending.scaled(d_i, d_o, group["loss_average"] is not None)
        dtype, factors = state[self.rule.names[0]].dtype, self._factors(layer)
        seen = Statistics(*(value.to(factors[self.rule.names[0]].dtype) for value in seen))
        new = self.rule.update(layer.structures, factors, seen, self._settings(layer), state["updates"])
        state |= {key: value.to(dtype) if key in self.rule.keys else value for key, value in new.items()}
        state["updates"] += 1

    def _settings(self, layer: Layer) -> Settings:
        """The numbers of a layer's coming factor update."""
        group, updates = self._group(layer.weight), self.state.get(layer.weight, {}).get("updates", 0)
        rate = group["precond_lr"]
        if callable(rate):
            rate = rate(updates)
        elif group["precond_warmup"]:
            rate = rules.warmed_rate(rate, updates)
        return Settings(rate, *(group[name] for name in Settings._fields[1:]))

    def _step_layer(self, layer: Layer, gradient: Tensor) -> None:
        state, module = self.state[layer.weight], layer.module
        bias_gradient = None
        if layer.bias is not None:
            bias_gradient = layer.bias.grad if layer.bias.grad is not None else torch.zeros_like(layer.bias)
        factors = self._factors(layer)
        matrix = layer.adapter.matrix(module, gradient, bias_gradient).to(factors[self.rule.names[0]].dtype)
        natural = self.rule.precondition(layer.structures, factors, matrix)
        updates = layer.adapter.parts(module, natural, layer.weight, layer.bias)
        for p in layer.parameters:  # which AdamW may have trained for a while
            for key in _ADAMW_KEYS & self.state[p].keys():
                del self.state[p][key]
        moved = [(p, u) for p, u in zip(layer.parameters, updates, strict=True) if p.grad is not None]
        momenta = [self._momentum(p, update) for p, update in moved]
        sizes = None
        if self._group(layer.weight)["normalize_step"]:
            sizes = rules.root_mean_square(momenta), rules.root_mean_square([layer.weight])
        for (p, _), momentum in zip(moved, momenta, strict=True):
            group = self._group(p)
            lr, length = group["lr"], group["lr"]
            if sizes is not None:
                length = rules.step_length(lr, *sizes, matrix.shape[-1], group["max_relative_step"])
            decay = lr * group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
            rules.descend(p, momentum, length, decay)
        state["steps"] += 1

    def _momentum(self, p: nn.Parameter, update: Tensor) -> Tensor:
        """A parameter's momentum with the update added, and the weight decay where the paper adds it."""
        group, state = self._group(p), self.state[p]
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            update = update + group["weight_decay"] * p
        if not group["momentum"]:
            return update
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return rules.accumulate(state["momentum_buffer"], update, group["momentum"])

    def _step_adamw(self, group: Group, params: list[Tensor]) -> None:
        if not params:
            return
        for p in params:
            if p.grad is not None and p.grad.is_sparse:
                raise RuntimeError("gradients must be dense: build the embedding with sparse=False")
            if "exp_avg" not in self.state[p]:
                zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] |= {"step": torch.zeros((), dtype=torch.float32)} | zeros
        functional_adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            exp_avgs=[self.state[p]["exp_avg"] for p in params],
            exp_avg_sqs=[self.state[p]["exp_avg_sq"] for p in params],
            max_exp_avg_sqs=[],
            state_steps=[self.state[p]["step"] for p in params],
            has_complex=any(p.is_complex() for p in params),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


_ADAMW_KEYS = frozenset({"step", "exp_avg", "exp_avg_sq"})


class _CurvaturePass:
    """Backward passes that statistics come from instead of the loss's, as one."""

    def __init__(self, terms: int | None = None, power: int | None = None) -> None:
        self.terms, self.power = terms, power  # of which losses, and how G scales with them, if known


_NOT_SETTINGS = ("self", "model", "params", "adamw", "fisher", "__class__")


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple | list) else not callable(value)


class SINGD(NaturalGradient):
    """Structured inverse-free natural gradient descent, the paper's method: any structure."""

    rule = InverseFree(adaptive=True)
    default_structure = "block_diagonal(32)"


class INGD(NaturalGradient):
    """Inverse-free natural gradient descent: SINGD with dense factors."""

    rule = InverseFree(adaptive=True)


class IKFAC(NaturalGradient):
    """Inverse-free KFAC: K Kᵀ and C Cᵀ follow KFAC's inverses to first order; any structure (SIKFAC)."""

    rule = InverseFree(adaptive=False)


class KFAC(NaturalGradient):
    """KFAC with damped inverses of dense, block-diagonal or diagonal factors, taken in float32."""

    rule = Inverting()

"""The optimizers: parameter groups, state and the step loop. The mathematics is in ``rules``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw as functional_adamw
from torch.utils.hooks import RemovableHandle

from ingot import rules
from ingot.capture import Layer, find_layers, install, summed
from ingot.groups import Group, Params, check_group, separate_adamw, structure_pair, trained_groups
from ingot.rules import TRACES, Factor, InverseFree, Inverting, Pair, Rule, Settings
from ingot.structures import Factory, bind

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


class NaturalGradient(Optimizer):
    """The family's common optimizer; ``SINGD``, ``INGD``, ``IKFAC`` and ``KFAC`` say which rule it follows.

    Linear and Conv2d layers are preconditioned, weight and bias together as one matrix. All other trainable
    parameters are trained by AdamW, in a parameter group of their own of the same optimizer.

    Args:
        model: The model to train.
        params: None trains every trainable parameter of the model. Otherwise as for any torch optimizer:
            parameters, or groups of them with settings of their own (exactly these are trained). Groups may
            also name their parameters by patterns, such as ``{"params": "*.bias", "weight_decay": 0.0}``; the
            parameters that no pattern names keep the settings below. A layer's factors follow the group of
            its weight, and weight and bias may be in different groups.
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
    ) -> None:
        # Every keyword but adamw is the default of a group's setting of the same name.
        defaults = {k: v for k, v in locals().items() if k not in _NOT_SETTINGS}
        defaults |= {"structure": structure or self.default_structure, "betas": (0.9, 0.999), "eps": 1e-8}
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"the first argument is the model itself, got {type(model).__name__}: write "
                f"{type(self).__name__}(model), not {type(self).__name__}(model.parameters())"
            )
        groups = trained_groups(model, params)
        found = find_layers(model, {p for group in groups for p in group["params"]})
        preconditioned = {p for layer in found.values() for p in layer.parameters}
        self._group_index: dict[Tensor, int] = {}
        self._layers: dict[nn.Parameter, Layer] = {}
        self._layer_of: dict[nn.Module, Layer] = {}
        self._handles: list[RemovableHandle] = []
        self._model: nn.Module | None = None  # while groups are added one by one, layers are incomplete
        super().__init__(separate_adamw(groups, preconditioned, dict(adamw or {})), defaults)
        self._model = model
        self._adopt(found)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as with any torch optimizer; layers of the model are preconditioned there, too."""
        check_group(self.defaults | param_group)
        super().add_param_group(param_group)
        members = self.param_groups[-1]["params"]
        self._group_index.update(dict.fromkeys(members, len(self.param_groups) - 1))
        if self._model is None:
            return
        try:
            self._adopt(find_layers(self._model, set(self._group_index)))
        except ValueError:  # a structure that does not fit: nothing was hooked, so forget the group as well
            self.param_groups.pop()
            self._group_index = {p: i for p, i in self._group_index.items() if i < len(self.param_groups)}
            raise

    def _adopt(self, layers: dict[nn.Parameter, Layer]) -> None:
        """Hook the layers that are new."""
        new = {weight: layer for weight, layer in layers.items() if weight not in self._layers}
        for layer in new.values():
            layer.structures = self._bind(layer)
        self._layers |= new
        for layer in new.values():
            for module in layer.modules:
                self._layer_of[module] = layer
                self._handles.append(install(module, layer.adapter, self))

    def _group(self, parameter: Tensor) -> Group:
        return self.param_groups[self._group_index[parameter]]

    def _bind(self, layer: Layer) -> Pair:
        """The structures of a layer's factors, for its dimensions."""
        _, d_o, d_i = layer.shape
        group = self._group(layer.weight)
        of_k, of_c = structure_pair(group["structure"])
        try:
            pair = bind(of_k, d_i), bind(of_c, d_o)
            self.rule.check(pair, group["precond_momentum"])
        except ValueError as error:
            raise ValueError(f"layer {layer.name!r}: {error}") from None
        return pair

    # --- Backward: statistics come in -------------------------------------------------------------------

    def wants_statistics(self, module: nn.Module) -> bool:
        """Whether the coming step updates the factors of this module."""
        weight = self._layer_of[module].weight
        group, steps = self._group(weight), self.state.get(weight, {}).get("steps", 0)
        due = steps < group["precond_warmup"] or steps % group["precond_every"] == 0
        return due and weight.requires_grad

    @torch.no_grad()
    def collect(self, module: nn.Module, x: Tensor, g: Tensor) -> None:
        """Add the statistics of one use of a module in one backward pass."""
        layer = self._layer_of[module]
        group, state = self._group(layer.weight), self._factors(layer, start=True)
        k, c = (state[name] for name in self.rule.names)
        s_k, s_c = layer.structures
        with torch.autocast(x.device.type, enabled=False):
            a, g, batch, places = layer.rows(module, x.to(k.dtype), g.to(c.dtype), group["approx"])
            terms = batch * places if group["loss_average"] == "token" else batch
            sums = summed(self.rule.statistic, (Factor(s_k, k), Factor(s_c, c)), a, g, terms)
        layer.pending = sums.plus(layer.pending)

    def _factors(self, layer: Layer, start: bool = False) -> dict[str, Tensor]:
        """A layer's factors in the precision that products are taken in; begun if there are none yet."""
        state = self.state[layer.weight]
        if start and self.rule.names[0] not in state:
            dtype = self._group(layer.weight)["factor_dtype"] or layer.weight.dtype
            like = torch.empty((), dtype=dtype, device=layer.weight.device)
            state |= self.rule.start(layer.structures, like, layer.shape[0])
            state |= {"steps": 0, "updates": 0}
        kept = (key for key in (*self.rule.keys, *TRACES) if key in state)
        return {key: state[key].to(rules.computing(state[key].dtype)) for key in kept}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and the statistics that came with them."""
        super().zero_grad(set_to_none)
        for layer in self._layers.values():
            layer.pending = None

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

    # --- Step: factors, then weights --------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the factors if it is their turn, and then every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        return loss

    def _update_factors(self, layer: Layer) -> None:
        if layer.pending is None:
            return
        group, state = self._group(layer.weight), self.state[layer.weight]
        rate, updates = group["precond_lr"], state["updates"]
        if callable(rate):
            rate = rate(updates)
        elif group["precond_warmup"]:
            rate = rules.warmed_rate(rate, updates)
        settings = Settings(rate, *(group[name] for name in Settings._fields[1:]))
        _, d_o, d_i = layer.shape
        seen = layer.pending.scaled(d_i, d_o, loss_is_mean=group["loss_average"] is not None)
        dtype = state[self.rule.names[0]].dtype
        new = self.rule.update(layer.structures, self._factors(layer), seen, settings, updates)
        state |= {key: value.to(dtype) if key in self.rule.keys else value for key, value in new.items()}
        state["updates"] = updates + 1

    def _step_layer(self, layer: Layer, gradient: Tensor) -> None:
        state, module = self.state[layer.weight], layer.modules[0]
        bias_gradient = None
        if layer.bias is not None:
            bias_gradient = layer.bias.grad if layer.bias.grad is not None else torch.zeros_like(layer.bias)
        factors = self._factors(layer)
        matrix = layer.adapter.matrix(module, gradient, bias_gradient).to(factors[self.rule.names[0]].dtype)
        natural = self.rule.precondition(layer.structures, factors, matrix)
        updates = layer.adapter.parts(module, natural, layer.weight, layer.bias)
        momenta = [self._momentum(p, update) for p, update in zip(layer.parameters, updates, strict=True)]
        sizes = None
        if self._group(layer.weight)["normalize_step"]:
            sizes = rules.root_mean_square(momenta), rules.root_mean_square([layer.weight])
        for p, momentum in zip(layer.parameters, momenta, strict=True):
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


_NOT_SETTINGS = ("self", "model", "params", "adamw", "__class__")


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

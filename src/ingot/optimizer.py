"""The optimizers: parameter groups, state and the step loop. The mathematics is in ``rules``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ingot import adamw as adamw_steps
from ingot import budget, checkpoints, health
from ingot.budget import BudgetLike, Choice
from ingot.description import Description, describe
from ingot.distributed import local, reshard, settle_gradients
from ingot.factors import Factors, factors_of
from ingot.family import NUMBERS, SIZES, InverseFree, Inverting, Rule
from ingot.groups import (
    AUTO,
    Group,
    Params,
    check_adamw,
    follow_rates,
    separate_adamw,
    structure_pair,
    trained_groups,
)
from ingot.joining import JoiningOptimizer
from ingot.model import Layer, find_layers, is_compiled, unwrapped
from ingot.model_optimizer import preconditionable
from ingot.naming import names_keywords
from ingot.observed import observed
from ingot.precision import computing, keeping, without_autocast
from ingot.rules import Pair
from ingot.scaling import loss_scale
from ingot.stability import Rates
from ingot.structures import Factory, bind, resolve

StructureLike: TypeAlias = str | Factory

PAPER: Mapping[str, Any] = MappingProxyType(
    {
        "precond_warmup": 0,
        "max_factor_step": None,
        "relative_damping": False,
        "factor_start": "identity",
        "normalize_step": False,
        "max_relative_step": None,
        "decoupled_weight_decay": False,
    }
)
"""Keyword values under which every optimizer takes exactly the paper's step: ``SINGD(model, **PAPER)``."""


_OF_ADAMW_ALONE = {
    "betas": "layers have momentum, and what has no factors is set by adamw={'betas': ...}",
    "eps": "layers have damping, and what has no factors is set by adamw={'eps': ...}",
}


class NaturalGradient(JoiningOptimizer):
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
            inputs) and C (on the outputs). ``"auto"``, for both or one of them, chooses the best for a layer
            within ``memory_budget``; what was chosen stays as long as the optimizer is used.
        memory_budget: What the whole state may take where structures are ``"auto"``, which this alone also
            means: ``"1.0x adamw"`` (the default then), ``"0.6x sgd"``, ``"500MB"``, a whole number of bytes,
            or a share of AdamW's state such as 0.8.
        approx: How shared weights enter the factors: ``"expand"`` or ``"reduce"``.
        loss_average: What the loss is a mean of: ``"batch"``; ``"token"`` for batch and shared positions;
            ``None`` for a sum.
        momentum: Momentum of the weights' update (α₂), and AdamW's β₁ unless ``betas`` says otherwise.
        weight_decay: Weight decay (γ).
        damping: Damping λ, relative to the mean curvature unless ``relative_damping`` is off.
        precond_lr: Step size β₁ of the factors, a number or a function of the number of updates so far.
        precond_momentum: Riemannian momentum α₁ of the factors; costs a second copy of them.
        precond_every: Steps from one update of the factors to the next (T).
        factor_dtype: The factors' dtype; None takes the weight's (bfloat16 for float16).
        cache_products: Whether K Kᵀ and C Cᵀ are kept between updates of the factors where that makes steps
            faster; None keeps them as far as the whole state stays within AdamW's (or the budget).
        max_rows: Statistics are taken from about so many rows of a batch (samples, or with ``"expand"``
            their places), others at each update; None takes all.
        statistics_dtype: The dtype that statistics are sent in where several processes train the model, such
            as ``torch.bfloat16`` for half the traffic; None sends them as they are.
        share_work: Whether several processes divide the updates of factors among them, and replicas the
            natural gradients as well, and tell each other what these came to; None lets them where that takes
            less time, as for large dense factors.
        precond_warmup: For so many first steps the factors are updated every time, and β₁ starts high.
        max_factor_step: Bound on β₁ times the spectral norm of a factor's direction, or None.
        relative_damping: Whether ``damping`` is in units of the mean traces of U and G.
        factor_start: ``"identity"``, or ``"trace"`` for the multiple of it that fits the first batch.
        normalize_step: Whether a layer's update is scaled to a root mean square of ``lr`` if its gradients
            are noise; where they agree with each other it is longer.
        max_relative_step: Bound on that root mean square in units of the weights' own, or None.
        decoupled_weight_decay: Whether weight decay acts beside the momentum, as in AdamW, not inside it.
        maximize: Whether to climb instead of to descend.
        stochastic_rounding: Whether bfloat16 parameters are rounded up or down at random, so that changes
            that are too small for one rounding are not lost. Other dtypes are rounded as always.
        compile: Whether the weights of layers with diagonal factors are moved by one function that
            ``torch.compile`` makes, which takes some time in the beginning.
        adamw: Settings of the AdamW groups where they differ: ``lr``, ``betas``, ``eps``, ``weight_decay``.
        fisher: Where the curvature comes from: ``"empirical"`` takes it from the loss's own backward pass,
            ``"separate"`` only from what is given to ``curvature_backward`` or done inside ``curvature``.
    """

    rule: ClassVar[Rule]
    default_structure: ClassVar[str] = "dense"

    @names_keywords(remedies=_OF_ADAMW_ALONE)
    def __init__(
        self,
        model: nn.Module,
        params: Params | None = None,
        lr: float | Tensor = 1e-3,
        *,
        structure: StructureLike | tuple[StructureLike, StructureLike] | None = None,
        memory_budget: BudgetLike | None = None,
        approx: str = "expand",
        loss_average: str | None = "batch",
        momentum: float = 0.9,
        weight_decay: float = 1e-2,
        damping: float = 0.2,
        precond_lr: float | Callable[[int], float] = 0.1,
        precond_momentum: float = 0.0,
        precond_every: int = 20,
        factor_dtype: torch.dtype | None = None,
        cache_products: bool | None = None,
        max_rows: int | None = None,
        statistics_dtype: torch.dtype | None = None,
        share_work: bool | None = None,
        precond_warmup: int = 20,
        max_factor_step: float | None = 0.5,
        relative_damping: bool = True,
        factor_start: str = "trace",
        normalize_step: bool = True,
        max_relative_step: float | None = 0.03,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        adamw: Mapping[str, Any] | None = None,
        compile: bool = False,
        fisher: str = "empirical",
    ) -> None:
        if not hasattr(self, "rule"):
            raise TypeError("NaturalGradient is what all have in common: make SINGD, INGD, IKFAC or KFAC")
        # Every keyword but adamw is the default of a group's setting of the same name.
        defaults = {k: v for k, v in locals().items() if k not in _NOT_SETTINGS}
        if structure is None:
            structure = self.default_structure if memory_budget is None else AUTO
        defaults |= {"structure": structure, "precondition": True}
        defaults["eps"] = 1e-8  # no betas: torch's schedulers would drive those of AdamW instead of momentum
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"the first argument is the model itself; got {type(model).__name__}: write "
                f"{type(self).__name__}(model), not {type(self).__name__}(model.parameters())"
            )
        if fisher not in ("empirical", "separate"):
            raise ValueError(f"fisher must be 'empirical' or 'separate'; got {fisher!r}")
        self._begin_collecting(fisher)
        adamw = check_adamw({} if adamw is None else adamw, defaults)
        inner = unwrapped(model)
        reshard(inner)
        self._begin(inner, is_compiled(model))
        groups = trained_groups(inner, params)
        found = find_layers(inner, preconditionable(groups))
        preconditioned = {p for layer in found.values() for p in layer.parameters}
        self._adamw = adamw
        self._choice = Choice(budget.DEFAULT if memory_budget is None else budget.read(memory_budget))
        super().__init__(separate_adamw(groups, preconditioned, adamw), defaults)
        if memory_budget is not None and not any(
            None in structure_pair(g["structure"]) for g in self.param_groups
        ):
            raise ValueError(
                "memory_budget is for structure='auto', which chooses what fits: leave one of them out"
            )
        self._renew(found)
        self._now.has_all_groups = True

    def _choose(self, layers: Mapping[nn.Parameter, Layer]) -> None:
        self._choice.extend(self, layers)
        for layer in layers.values():
            layer.kept = layer.plan = None  # there may be more room for products, or less

    def _bind(self, layer: Layer) -> Pair:
        """The structures of a layer's factors, for its dimensions."""
        return self._structures(layer, self._group(layer.weight), self._choice.of(layer))

    def _factories(self, layer: Layer, group: Group) -> tuple[Factory | None, Factory | None]:
        """What makes the structures of a layer; None where they are chosen."""
        of_k, of_c = structure_pair(group["structure"])
        if layer.adapter.input_structure is not None:
            of_k = resolve(layer.adapter.input_structure)
        return of_k, of_c

    def _structures(self, layer: Layer, group: Group, chosen: Pair) -> Pair:
        _, d_o, d_i = layer.shape
        of_k, of_c = self._factories(layer, group)
        try:
            pair = bind(of_k or (lambda _: chosen[0]), d_i), bind(of_c or (lambda _: chosen[1]), d_o)
            self.rule.check(pair, group["precond_momentum"])
        except ValueError as error:
            raise ValueError(f"layer {layer.name!r}: {error}") from None
        return pair

    def _is_due(self, layer: Layer) -> bool:
        group, state = self._group(layer.weight), self.state.get(layer.weight, {})
        # A layer that nothing was captured of, since its module is passed by, is AdamW's: it counts as well.
        steps = state["steps"] if "steps" in state else int(state.get("step", 0))
        return steps < group["precond_warmup"] or steps % group["precond_every"] == 0

    def _state_dtype(self, p: Tensor, key: str) -> torch.dtype:
        factor_dtype = self._group(p)["factor_dtype"] or keeping(p.dtype)
        if key in NUMBERS or key in SIZES:
            return computing(factor_dtype)
        return factor_dtype if key in self.rule.keys else keeping(p.dtype)

    def _fitting(self, layer: Layer, state: dict[str, Any]) -> dict[str, Any]:
        pairs = zip(self.rule.names, layer.structures, strict=True)
        layer.whole = None
        if all(state[name].shape[-1] == s.numel for name, s in pairs if name in state):
            return state
        return {key: value for key, value in state.items() if key == "momentum_buffer"}

    def diagnostics(self, conditions: bool = True) -> health.Diagnostics:
        """The health of each layer: print it, or send its ``scalars()`` to a logger.

        Without ``conditions`` it takes next to no time, and nothing waits for the device until the numbers
        are looked at.
        """
        return health.diagnose(self, conditions)

    def log_diagnostics(
        self, to: Any, every: int = 100, *, prefix: str = "ingot/", conditions: bool = True
    ) -> RemovableHandle:
        """Send the diagnostics after every so many steps to a logger, until the returned handle is removed.

        Args:
            to: TensorBoard's ``SummaryWriter``, or a function that takes a dict of numbers and the step, such
                as ``wandb.log`` or ``lambda scalars, step: fabric.log_dict(scalars, step)``.
            every: Steps from one report to the next.
            prefix: What the numbers' names begin with.
            conditions: Whether the factors' conditions are estimated as well.
        """
        return health.log(self, to, every, prefix, conditions)

    def describe(self) -> Description:
        """A table of which parameter is trained how, by which structures, at what memory; print it."""
        return describe(self, self._watch.model, self._layers)

    def factors(self, layer: nn.Module | Tensor | str) -> Factors:
        """What a layer's factors are now, as copies, each with its structure; dense on demand.

        Where the state is shared out over processes they are gathered: then all processes must ask.

        Args:
            layer: The module, its weight, or the name of either as in ``describe`` and ``diagnostics``.
        """
        return factors_of(self, layer)

    # --- Checkpoints ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text; functions (a schedule, a structure of one's own) stay behind."""
        return checkpoints.packed(super().state_dict())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint, which is left as it is.

        Structures, the factors' dtype and functions stay those of this optimizer: factors of another
        structure or dtype are converted. What cannot be loaded is refused before anything is changed.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, dict) else state_dict
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._follow_model()
        settings, states = checkpoints.unpacked(self, state_dict)
        for group, new in zip(self.param_groups, settings, strict=True):
            group |= {name: value for name, value in new.items() if not callable(group.get(name))}
        self.state.clear()
        self.state.update(states)
        for layer in self._layers.values():
            layer.whole = None
        self._forget_statistics()
        self._refresh()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # --- Step: factors, then weights --------------------------------------------------------------------

    @observed
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the factors if it is their turn, and then every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_model()
        self._now.has_followed = False
        settle_gradients(self._group_index)
        if self._is_asked_for_state():
            self._make_state()
            return loss
        self._check_captured()
        scale = None
        if self._learns:
            scale = loss_scale() if self._fisher == "empirical" else None
            self._check_loss(scale)
            self._now.grams.forget()
        with without_autocast(device for *_, device in self._kinds.values()):
            self._step_all(scale)
        self._refresh()
        self._reporter.after_step(self)
        return loss

    def _step_all(self, scale: Tensor | None) -> None:
        follow_rates(self.param_groups)
        self._now.rates = [Rates.of(group) for group in self.param_groups]
        self._share_statistics()
        # A layer that was never captured (its module's forward was bypassed) has no factors: AdamW's.
        layers = [
            layer
            for layer in self._layers.values()
            if layer.weight.grad is not None and self.rule.names[0] in self.state.get(layer.weight, {})
        ]
        self._update_factors(layers, scale)
        done = {id(p) for layer in layers for p in layer.parameters}
        self._step_weights(layers)
        self._forget_statistics()
        for group in self.param_groups:
            self._step_adamw(group, [p for p in group["params"] if p.grad is not None and id(p) not in done])

    def _is_asked_for_state(self) -> bool:
        """Whether this is the empty step by which torch.distributed.checkpoint lets state come to be."""
        if self.state or not all(float(group["lr"]) == 0 for group in self.param_groups):
            return False
        return not any(local(p.grad).any() for p in self._group_index if p.grad is not None)

    def _make_state(self) -> None:
        """The state that a first step of all parameters that are not frozen would leave behind."""
        preconditioned: set[Tensor] = set()
        for layer in self._layers.values():
            if layer.weight.requires_grad:
                self._begun_factors(layer)
                preconditioned.update(layer.parameters)
        for p in (p for p in self._group_index if p.requires_grad):
            if p not in preconditioned:
                self.state[p] |= adamw_steps.start(p)
            elif self._group(p)["momentum"]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, dtype=keeping(p.dtype))
            else:
                self.state[p] |= {}  # which is an entry, too: without one torch calls the state incomplete

    def _check_captured(self) -> None:
        """Say so where nothing at all was captured though it should have been."""
        factor, layers = self.rule.names[0], self._layers.values()
        seen = any(
            factor in self.state.get(layer.weight, {}) and layer.weight.grad is not None for layer in layers
        )
        if seen or all(layer.weight.grad is None for layer in layers):
            return
        if self._fisher == "separate":
            raise RuntimeError(
                "no curvature was given: with fisher='separate', call optimizer.curvature_backward(output, "
                "loss) before loss.backward(), or make a backward pass inside optimizer.curvature()"
            )
        if self._now.compiled_before:
            self._now.compiled_before = False  # once is enough
            warnings.warn(
                "no layer was captured, so all are trained by AdamW: the compiled model ran before this "
                "optimizer was made, and its code has no hooks. Call torch._dynamo.reset() once after making "
                "the optimizer.",
                stacklevel=4,
            )


_NOT_SETTINGS = ("self", "model", "params", "memory_budget", "adamw", "fisher", "__class__")


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

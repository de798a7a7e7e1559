"""Taps behind the layers of a model, through which forward and backward passes become statistics."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ingot.distributed import is_distributed, running_replica
from ingot.layers import Family, LayerAdapter

Sink = Callable[["Tap", Tensor, Tensor, int, object], None]
"""Takes a tap, the input and output gradient of a use, the first matrix used, and the backward pass."""


_KEYS = itertools.count()
_TAPS: weakref.WeakValueDictionary[int, Tap] = weakref.WeakValueDictionary()


class Tap:
    """Watches the uses of one layer's weight by one module, while its optimizer wants statistics.

    ``active`` is a plain flag, so that compiled code has two forms, with and without the tap, and need not
    be compiled again at other steps.
    """

    def __init__(
        self, adapter: LayerAdapter, module: nn.Module, flipped: bool, sink: weakref.WeakMethod[Sink]
    ) -> None:
        self.adapter, self.module, self.flipped = adapter, module, flipped
        self.active = False
        self.replica: Any = None  # of the model, whose forward pass was the last one, if there are several
        self._sink = sink
        self._key = next(_KEYS)
        _TAPS[self._key] = self

    @property
    def is_open(self) -> bool:
        """Whether statistics are wanted, and can be had: those of a frozen weight never meet its gradient."""
        if not self.active:
            return False
        weight = self.adapter.weight(self.module)
        return weight is not None and weight.requires_grad

    def __call__(self, output: Tensor, x: Tensor, start: int = 0) -> Tensor:
        if not (self.is_open and output.requires_grad):
            return output
        if torch.compiler.is_compiling():
            return _probe(output, x.detach(), self._key, start)
        if torch._C._are_functorch_transforms_active():
            return output  # what torch.func differentiates is no training step
        self.replica = running_replica()
        return _Probe.apply(output, x.detach(), self, start)  # type: ignore[no-untyped-call]

    def receive(self, x: Tensor, g: Tensor, start: int, outer_pass: int = -1) -> None:
        """Pass on what came together, if it did so in a backward pass for the weight's gradient."""
        sink, weight = self._sink(), self.adapter.weight(self.module)
        if sink is None or weight is None or not _is_wanted(weight):
            return
        sink(self, x, g, start, torch._C._current_graph_task_id() if outer_pass < 0 else outer_pass)


def _is_wanted(weight: Tensor) -> bool:
    """Whether the running backward pass computes this parameter's gradient."""
    if not weight.requires_grad:
        return False
    if is_distributed(weight):  # whose gradient is that of a whole one, which is not there yet
        return True
    # Inside of an operator autograd is switched off, and a parameter's node in the graph cannot be found.
    # It is looked up each time: who holds on to a node keeps the shape that the parameter had.
    autograd = torch._C.DispatchKey.AutogradFunctionality
    try:
        with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(autograd, False):
            node = get_gradient_edge(weight).node
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # torch declines to answer for a parameter that torch.autograd.grad was asked about: it is wanted.
        return True


# --- The probe: an identity whose backward meets the gradient of the output beside the input -------------


class _OuterPass:
    """The backward pass that a forward pass happens in: it recomputes a checkpointed segment.

    The backward of a segment is a pass of its own for the engine, but part of the same one for us. Segments
    in segments are told by there having been no ordinary forward pass in between.
    """

    def __init__(self) -> None:
        self._first = -1

    def here(self) -> int:
        """A number for that pass; -1 in an ordinary forward pass."""
        current = torch._C._current_graph_task_id()
        if current < 0 or self._first < 0:
            self._first = current
        return self._first


_outer_pass = _OuterPass()


class _Probe(torch.autograd.Function):
    """The probe in eager mode.

    The output is copied because an activation may overwrite it in place. The input is saved by autograd's
    own means, so activation checkpointing can drop and recompute it.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, tap: Tap, start: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tap, ctx.start, ctx.outer_pass = tap, start, _outer_pass.here()
        return output.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.tap.receive(x, g.detach(), ctx.start, ctx.outer_pass)
        return g, None, None, None


# In compiled code the probe is a pair of operators that the compiler does not look into. The second returns
# its argument, as a copy, so that it cannot be dropped as useless. A CUDA graph would replay its kernels
# without its Python code, so it is marked for newer versions of torch, which then cut the graph there.

_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_NOT_IN_CUDA_GRAPHS: dict[str, Any] = {} if _UNSAFE is None else {"tags": (_UNSAFE,)}


@torch.library.custom_op("ingot::probe", mutates_args=())
def _probe(output: Tensor, x: Tensor, key: int, start: int) -> Tensor:
    return output.clone()


@torch.library.custom_op("ingot::receive", mutates_args=(), **_NOT_IN_CUDA_GRAPHS)
def _receive(g: Tensor, x: Tensor, key: int, start: int) -> Tensor:
    tap = _TAPS.get(key)
    if tap is not None:
        tap.receive(x, g, start)
    return g.clone()


@_probe.register_fake
@_receive.register_fake
def _like(tensor: Tensor, x: Tensor, key: int, start: int) -> Tensor:
    return torch.empty_like(tensor)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, x, ctx.key, ctx.start = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
    (x,) = ctx.saved_tensors
    return _receive(g, x, ctx.key, ctx.start), None, None, None


_probe.register_autograd(_backward, setup_context=_keep)


# --- Hooks ----------------------------------------------------------------------------------------------


class CaptureHook:
    """The forward hook of a module, with the taps of all optimizers that train its layers.

    A copy of it, made with a copy of the model or by pickling one, has none.
    """

    def __init__(self, family: Family | None = None) -> None:
        self.family = family
        self.taps: dict[str, list[Tap]] = {}
        self._random_state: Tensor | None = None

    def __reduce__(self) -> tuple[type[CaptureHook], tuple[()]]:
        return CaptureHook, ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.family is None or not self._is_open():
            return None
        if self._random_state is not None:
            _set_random_state(module, self._random_state)
            self._random_state = None
        return self.family.capture(module, args, kwargs, output, _chained(self.taps))

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Remember the random numbers that the forward pass is going to draw, if they are drawn twice.

        They must be the same: the pass may be one of a checkpointed segment that recomputes another.
        Compiled code drops the first of both passes, since nothing uses it, and its random numbers with it.
        """
        if self.family is None or torch.compiler.is_compiling():
            return
        again = self._is_open() and self.family.draws_random_numbers(module)
        self._random_state = _random_state(module) if again else None

    def _is_open(self) -> bool:
        for taps in self.taps.values():  # at each forward pass, so with as little Python as can be
            for tap in taps:
                if tap.is_open:
                    return torch.is_grad_enabled()
        return False


class ModelHook:
    """The forward hook of a whole model: tells its optimizer which replica of it ran, if there are several.

    A copy of it tells nobody.
    """

    def __init__(self, sink: weakref.WeakMethod[Callable[[Any, Any], None]] | None = None) -> None:
        self._sink = sink

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        return ModelHook, ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._sink is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        replica, sink = running_replica(), self._sink()
        if replica is not None and sink is not None:
            sink(replica, output)


def _random_state(module: nn.Module) -> Tensor:
    device = next(module.parameters()).device
    if device.type == "cpu":
        return torch.random.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_random_state(module: nn.Module, state: Tensor) -> None:
    device = next(module.parameters()).device
    if device.type == "cpu":
        torch.random.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _chained(taps: Mapping[str, list[Tap]]) -> dict[str, Callable[..., Tensor]]:
    return {name: _Chain(several) for name, several in taps.items()}


class _Chain:
    """Several taps as one."""

    def __init__(self, taps: list[Tap]) -> None:
        self._taps = taps

    def __call__(self, output: Tensor, x: Tensor, start: int = 0) -> Tensor:
        for tap in self._taps:
            output = tap(output, x, start)
        return output


def install(module: nn.Module, family: Family, name: str, tap: Tap) -> None:
    """Put a tap behind the uses of the layer ``name`` in a module's forward."""
    hook = next(iter(_hooks(module).values()), None)
    if hook is None:
        hook = CaptureHook()
        # Before others, which may change the output, as those of tensor parallelism do.
        module.register_forward_hook(hook, with_kwargs=True, prepend=True)
        if type(family).draws_random_numbers is not Family.draws_random_numbers:
            module.register_forward_pre_hook(hook.before)
    hook.family = family
    hook.taps.setdefault(name, []).append(tap)


def remove(module: nn.Module, tap: Tap) -> None:
    """Take a tap away, and the hook with the last one."""
    for key, hook in _hooks(module).items():
        kept = {name: [t for t in taps if t is not tap] for name, taps in hook.taps.items()}
        hook.taps = {name: taps for name, taps in kept.items() if taps}
        if hook.taps:
            continue
        # By hand, since there is no handle of a hook that came with a copy of its module.
        for table in (module._forward_hooks, module._forward_hooks_with_kwargs):
            table.pop(key, None)
        for key, before in list(module._forward_pre_hooks.items()):
            if getattr(before, "__self__", None) is hook:
                del module._forward_pre_hooks[key]


def _hooks(module: nn.Module) -> dict[int, CaptureHook]:
    return {key: hook for key, hook in module._forward_hooks.items() if isinstance(hook, CaptureHook)}

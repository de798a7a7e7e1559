"""Every optimizer under every way to write a training loop: the trajectory is that of the plain loop.

A row of the table is a loop, the loop whose weights and state it must arrive at, and how exactly so.
"""

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from ..behaviour.training import FAMILY, assert_identical, held
from .small import SETTINGS, Batch, Loss, Small, batches, mean_loss, plain, sum_loss

pytestmark = pytest.mark.usefixtures("float64")

Loop = Callable[[nn.Module, Optimizer], None]


class Row(NamedTuple):
    loop: Loop
    expected: Loop = plain
    settings: Mapping[str, Any] = MappingProxyType({})  # of the optimizers of both
    own: Callable[[nn.Module], dict[str, Any]] = lambda model: {}  # of the loop's alone
    tolerance: float = 0.0
    only_default: bool = False  # where only the default settings make it so
    only_weights: bool = False  # the state has another scale


# --- Who calls backward, and when ------------------------------------------------------------------------


def closure(model: nn.Module, optimizer: Optimizer) -> None:
    """The closure computes the loss; gradients are cleared outside."""
    for batch in batches():
        optimizer.zero_grad()
        losses: list[Tensor] = []

        def compute(batch: Batch = batch, losses: list[Tensor] = losses) -> Tensor:
            losses.append(mean_loss(model, batch))
            losses[0].backward()
            return losses[0]

        assert optimizer.step(compute) is losses[0]
        assert len(losses) == 1


def lightning(model: nn.Module, optimizer: Optimizer) -> None:
    """All in the closure: the loss, then zero_grad, then backward."""
    for batch in batches():

        def compute(batch: Batch = batch) -> Tensor:
            loss = mean_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure=compute)


def micro_batches(
    model: nn.Module, optimizer: Optimizer, sizes: list[int], loss: Loss = mean_loss, divided: bool = True
) -> None:
    """The plain loop's batches in parts, a mean divided as for the whole, or not divided."""
    for tokens, labels in batches():
        optimizer.zero_grad()
        for part in zip(tokens.split(sizes), labels.split(sizes), strict=True):
            share = len(part[1]) / len(labels) if divided and loss is mean_loss else 1
            (share * loss(model, part)).backward()
        optimizer.step()


def two_models_in_turn(model: nn.Module, optimizer: Optimizer) -> None:
    """The passes of two models are interleaved, and one loop steps both optimizers."""
    twin = Small()
    settings = {name: optimizer.defaults[name] for name in SETTINGS["default"] | SETTINGS["paper"]}
    pairs = {model: optimizer, twin: type(optimizer)(twin, **settings)}
    for batch in batches():
        for each in pairs.values():
            each.zero_grad()
        losses = [mean_loss(each, batch) for each in pairs]
        for loss in reversed(losses):
            loss.backward()
        for each in pairs.values():
            each.step()
    assert_identical(held(model, optimizer), held(twin, pairs[twin]))


def copied_in_the_middle(model: nn.Module, optimizer: Optimizer) -> None:
    """Original and copy go on for themselves, and both like one that was never copied."""
    twin, of_twin = model, optimizer
    for step, batch in enumerate(batches()):
        if step == 3:
            twin, of_twin = copy.deepcopy((model, optimizer))
        for net, each in {model: optimizer, twin: of_twin}.items():
            each.zero_grad()
            mean_loss(net, batch).backward()
            each.step()
    assert twin is not model
    assert_identical(held(model, optimizer), held(twin, of_twin))


# --- Who clears the gradients ----------------------------------------------------------------------------


def cleared(model: nn.Module, optimizer: Optimizer, clear: Callable[[nn.Module, Optimizer], None]) -> None:
    for batch in batches():
        clear(model, optimizer)
        mean_loss(model, batch).backward()
        optimizer.step()


# --- Gradients changed before the step -------------------------------------------------------------------


def changed(model: nn.Module, optimizer: Optimizer, change: Callable[[nn.Module], Any]) -> None:
    for batch in batches():
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        change(model)
        optimizer.step()


def clip_norm_by_hand(model: nn.Module, bound: float = 0.1) -> None:
    norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
    assert norm > bound
    for p in model.parameters():
        p.grad.mul_(bound / (norm + 1e-6))


def clip_value_by_hand(model: nn.Module, bound: float = 0.01) -> None:
    assert max(p.grad.abs().max() for p in model.parameters()) > bound
    for p in model.parameters():
        p.grad.copy_(p.grad.clamp(-bound, bound))


def negate(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.neg_()


def hooked(model: nn.Module, optimizer: Optimizer) -> None:
    """A hook before the step clips; hooks are called once for each step, with its arguments."""
    calls = []

    def before(of: Optimizer, args: tuple, kwargs: dict) -> None:
        calls.append(("before", of, args, kwargs))
        clip_norm_by_hand(model)

    def after(of: Optimizer, args: tuple, kwargs: dict) -> None:
        calls.append(("after", of, args, kwargs))

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    plain(model, optimizer)
    for handle in handles:
        handle.remove()
    # torch gives a hook before the step the optimizer as an argument, too.
    assert calls == 6 * [("before", optimizer, (optimizer,), {}), ("after", optimizer, (optimizer,), {})]


HALF = ("head", "attention.in_proj", "norm", "position")


def without_some_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    """In two steps, one of which updates factors, half of the parameters have no gradients."""
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        for name, p in model.named_parameters():
            if step in (2, 3) and name.startswith(HALF):
                p.grad = None
        optimizer.step()


def with_some_steps_taken_back(model: nn.Module, optimizer: Optimizer) -> None:
    for step, batch in enumerate(batches()):
        before = held(model, optimizer)
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            if step in (2, 3) and name.startswith(HALF):
                p.data.copy_(before[name][0])
                optimizer.state[p] = before[name][1]


# --- A scaled loss ---------------------------------------------------------------------------------------


def scaled(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    unscale: bool = False,
    change: Callable[[nn.Module], Any] = lambda model: None,
    bad: tuple[int, ...] = (),
    parts: int = 1,
    **settings: Any,
) -> None:
    """With a GradScaler. Some batches overflow when they come first, and are repeated."""
    scaler = GradScaler("cpu", **({"init_scale": 2.0**10, "growth_interval": 1000} | settings))
    for step, batch in enumerate(batches()):
        for factor in (float("inf"), 1.0) if step in bad else (1.0,):
            optimizer.zero_grad()
            for part in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
                scaler.scale(factor * mean_loss(model, part) / parts).backward()
            if unscale:
                scaler.unscale_(optimizer)
                change(model)
            scaler.step(optimizer)
            scaler.update()
    if settings.get("enabled", True):
        growths = 6 // settings.get("growth_interval", 1000)
        assert scaler.get_scale() == 2.0 ** (10 + growths - len(bad))


# --- Groups ----------------------------------------------------------------------------------------------


def added_later(model: nn.Module, optimizer: Optimizer) -> None:
    """The optimizer was made for the head alone; the rest comes before the first step, in two groups."""
    rest = {name: p for name, p in model.named_parameters() if not name.startswith("head")}
    attention = [p for name, p in rest.items() if name.startswith("attention")]
    optimizer.add_param_group({"params": attention})
    optimizer.add_param_group({"params": [p for p in rest.values() if all(p is not q for q in attention)]})
    plain(model, optimizer)


def biases_added_later(model: nn.Module, optimizer: Optimizer) -> None:
    """Nothing was trained yet, so that a bias can still be part of its weight's matrix."""
    optimizer.add_param_group({"params": [p for name, p in model.named_parameters() if "bias" in name]})
    plain(model, optimizer)


def rest_added_later(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [model.position, *model.norm.parameters()]})
    plain(model, optimizer)


def _all_but(model: nn.Module, *parts: str) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if not any(part in name for part in parts)]


def _changing(change: Callable[[nn.Module], Any]) -> Loop:
    return partial(changed, change=change)


def _clearing(clear: Callable[[nn.Module, Optimizer], None]) -> Loop:
    return partial(cleared, clear=clear)


def _parts(*sizes: int, **options: Any) -> Loop:
    return partial(micro_batches, sizes=list(sizes), **options)


def _lr(*shape: int) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda model: {"lr": torch.full(shape, 0.01)}


SUM, CLOSE = {"settings": {"loss_average": None}}, {"tolerance": 1e-10}
# The scale of the loss cancels by default, but for AdamW's eps.
CANCELS = {"settings": {"adamw": {"eps": 0.0}}, "only_default": True, "only_weights": True, **CLOSE}

ROWS = {
    "closure": Row(closure),
    "closure of Lightning": Row(lightning),
    "two models in turn": Row(two_models_in_turn),
    "copied in the middle": Row(copied_in_the_middle),
    "gradients set to zero": Row(_clearing(lambda m, o: o.zero_grad(set_to_none=False))),
    "model.zero_grad": Row(_clearing(lambda m, o: m.zero_grad())),
    # Micro-batches
    "3 parts": Row(_parts(2, 2, 2), **CLOSE),
    "2 unequal parts": Row(_parts(1, 5), **CLOSE),
    "3 unequal parts": Row(_parts(3, 1, 2), **CLOSE),
    "3 parts of a sum": Row(_parts(2, 2, 2, loss=sum_loss), partial(plain, loss=sum_loss), **SUM, **CLOSE),
    "unequal parts of a sum": Row(
        _parts(3, 1, 2, loss=sum_loss), partial(plain, loss=sum_loss), **SUM, **CLOSE
    ),
    "3 parts, not divided": Row(_parts(2, 2, 2, divided=False), **CANCELS),
    "a sum called a mean": Row(partial(plain, loss=sum_loss), **CANCELS),
    # Gradients changed before the step
    "clip_grad_norm_, huge": Row(_changing(lambda m: clip_grad_norm_(m.parameters(), 1e9))),
    "clip_grad_value_, huge": Row(_changing(lambda m: clip_grad_value_(m.parameters(), 1e9))),
    "clip_grad_norm_": Row(
        _changing(lambda m: clip_grad_norm_(m.parameters(), 0.1)), _changing(clip_norm_by_hand), **CLOSE
    ),
    "clip_grad_value_": Row(
        _changing(lambda m: clip_grad_value_(m.parameters(), 0.01)), _changing(clip_value_by_hand)
    ),
    "hooks of the step": Row(hooked, _changing(clip_norm_by_hand)),
    "some without gradients": Row(without_some_gradients, with_some_steps_taken_back),
    "maximize": Row(partial(plain, loss=lambda m, b: -mean_loss(m, b)), own=lambda m: {"maximize": True}),
    "a loss negated": Row(partial(plain, loss=lambda m, b: -mean_loss(m, b)), _changing(negate)),
    # Scaled losses
    "scaler": Row(scaled),
    "scaler, unscale_": Row(partial(scaled, unscale=True)),
    "scaler, clipped": Row(
        partial(scaled, unscale=True, change=clip_norm_by_hand), _changing(clip_norm_by_hand)
    ),
    "scaler that grows": Row(partial(scaled, growth_interval=2)),
    "scaler that grows, unscale_": Row(partial(scaled, unscale=True, growth_interval=1)),
    "scaler, 2 parts": Row(partial(scaled, parts=2), _parts(3, 3)),
    "scaler, first step skipped": Row(partial(scaled, bad=(0,))),
    "scaler, update skipped": Row(partial(scaled, bad=(2,))),
    "scaler, no update skipped": Row(partial(scaled, bad=(3,), unscale=True)),
    "scaler, all skipped once": Row(partial(scaled, bad=(0, 1, 2, 3, 4, 5))),
    "scaler, disabled": Row(partial(scaled, enabled=False, unscale=True)),
    # Groups and their settings
    "groups added later": Row(added_later, own=lambda m: {"params": m.head.parameters()}),
    "biases added later": Row(biases_added_later, own=lambda m: {"params": _all_but(m, "bias")}),
    "AdamW's parameters added later": Row(
        rest_added_later,
        settings={"adamw": {"lr": 0.05, "weight_decay": 0.0}},
        own=lambda m: {"params": _all_but(m, "position", "norm")},
    ),
    "weight and bias apart": Row(
        plain, own=lambda m: {"params": [{"params": "*weight"}, {"params": "*bias", "weight_decay": 0.01}]}
    ),
    "lr in a tensor": Row(plain, own=_lr(), **CLOSE),
    "lr in a tensor of one entry": Row(plain, own=_lr(1), **CLOSE),
}


def _train(optimizer_class: type, settings: str, loop: Loop, **more: Any) -> dict:
    model = Small()
    own = more.pop("own", lambda model: {})(model)
    optimizer = optimizer_class(model, **SETTINGS[settings] | more | own)
    loop(model, optimizer)
    return held(model, optimizer)


_train_plainly = cache(partial(_train, loop=plain))


CASES = [(s, name) for s in SETTINGS for name, row in ROWS.items() if s == "default" or not row.only_default]


@pytest.mark.parametrize(("settings", "name"), CASES)
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_a_loop_arrives_where_the_plain_loop_does(optimizer_class, settings, name):
    row = ROWS[name]
    found = _train(optimizer_class, settings, row.loop, own=row.own, **row.settings)
    if row.expected is plain and not row.settings:
        expected = _train_plainly(optimizer_class, settings)
    else:
        expected = _train(optimizer_class, settings, row.expected, **row.settings)
    if row.only_weights:
        found, expected = ({key: value[0] for key, value in each.items()} for each in (found, expected))
    torch.testing.assert_close(found, expected, rtol=row.tolerance, atol=row.tolerance)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_the_plain_loop_moves_all_weights_and_factors(optimizer_class, settings):
    """So that the table compares more than two things that stand still."""
    model = Small()
    optimizer = optimizer_class(model, **SETTINGS[settings])
    plain(model, optimizer, steps=1)
    before = held(model, optimizer)
    plain(model, optimizer)
    after = held(model, optimizer)
    for name, (value, state) in before.items():
        assert not torch.equal(value, after[name][0]), name
        for key in (*optimizer.rule.names, "exp_avg", "exp_avg_sq", "momentum_buffer"):
            assert key not in state or not torch.equal(state[key], after[name][1][key]), (name, key)
    assert sum("exp_avg" in state for _, state in before.values()) == 3
    assert sum(optimizer.rule.names[0] in state for _, state in before.values()) == 5


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_the_scale_of_a_loss_is_not_taken_for_another_average(scale):
    """The paper's settings check a cross entropy's average at the first batch, and warn if it is another."""
    model = Small()
    optimizer = FAMILY[0](model, **SETTINGS["paper"])
    scaler = GradScaler("cpu", init_scale=scale)
    for batch in batches(1, size=16):
        scaler.scale(mean_loss(model, batch)).backward()
        scaler.step(optimizer)

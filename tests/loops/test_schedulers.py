"""Every scheduler of torch drives all groups, and the steps follow it as those of torch's optimizers do."""

import copy
import io
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from ingot import SINGD

from ..behaviour.training import FAMILY, assert_identical, assert_same, held, mlp, squares
from ..behaviour.training import batches as rows
from .small import AS_IN_PAPER, DEFAULT, Batch, Small, batches, mean_loss, plain

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 8


def _warm_up_and_cosine(optimizer: Optimizer) -> LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, 5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


def _both(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 3)),  # from a rate of 0
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": _warm_up_and_cosine,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "ChainedScheduler": _both,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 0.02, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=STEPS + 1),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=5),
}

every_scheduler = pytest.mark.parametrize("name", SCHEDULERS)


def test_every_scheduler_of_torch_is_in_the_table():
    classes = {c for c in vars(lr_scheduler).values() if isinstance(c, type) and issubclass(c, LRScheduler)}
    own = {c.__name__ for c in classes if c is not LRScheduler and not c.__name__.startswith("_")}
    assert set(SCHEDULERS) == own | {"SWALR"}


def _advance(scheduler: LRScheduler, step: int) -> None:
    """The metric, for the one that wants it, gets better for a while and then stays."""
    needs_metric = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    scheduler.step(*([max(0, 3 - step)] if needs_metric else []))


def _learn(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    mean_loss(model, batch).backward()
    optimizer.step()


def _train(
    model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, start: int = 0, stop: int = STEPS
) -> list[list[tuple[float, float]]]:
    """Train, and return the rates and momenta that the steps were taken with, for each group."""
    taken = []
    for step, batch in islice(enumerate(batches(STEPS)), start, stop):
        taken.append([(float(g["lr"]), g["momentum"]) for g in optimizer.param_groups])
        _learn(model, optimizer, batch)
        _advance(scheduler, step)
    return taken


def _pair(optimizer_class: type = SINGD, **settings) -> tuple[nn.Module, Optimizer]:
    """Three groups with rates of their own: some layers, other layers, and the rest."""
    model = Small()
    groups = [{"params": "head.*", "lr": 0.005}]
    return model, optimizer_class(model, groups, **DEFAULT | settings, adamw={"lr": 0.002})


@every_scheduler
def test_rates_and_momenta_are_those_that_adamw_gets(name):
    model, optimizer = _pair()
    rates = [group["lr"] for group in optimizer.param_groups]
    assert sorted(rates) == [0.002, 0.005, 0.01]
    found = _train(model, optimizer, SCHEDULERS[name](optimizer))
    adamw = AdamW([{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in rates])
    scheduler = SCHEDULERS[name](adamw)
    for step, taken in enumerate(found):
        assert taken == [(group["lr"], group["betas"][0]) for group in adamw.param_groups]
        adamw.step()
        _advance(scheduler, step)
    assert len({lr for (lr, _), *_ in found}) > 1  # it changes at all


@every_scheduler
def test_steps_are_those_of_rates_set_by_hand(name):
    model, optimizer = _pair()
    taken = _train(model, optimizer, SCHEDULERS[name](optimizer))
    other, by_hand = _pair()
    for numbers, batch in zip(taken, batches(STEPS), strict=True):
        for group, (lr, momentum) in zip(by_hand.param_groups, numbers, strict=True):
            group |= {"lr": lr, "momentum": momentum}
        _learn(other, by_hand, batch)
    assert_identical(held(model, optimizer), held(other, by_hand))
    constant, unscheduled = _pair()
    plain(constant, unscheduled, steps=STEPS)
    for before, after in zip(constant.parameters(), model.parameters(), strict=True):
        assert not torch.equal(before, after)


@every_scheduler
def test_a_resumed_run_is_the_uninterrupted_one(name):
    model, optimizer = _pair()
    scheduler = SCHEDULERS[name](optimizer)
    _train(model, optimizer, scheduler, 0, 4)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    schedule = copy.deepcopy(scheduler.state_dict())
    expected = _train(model, optimizer, scheduler, 4)

    other, resumed = _pair()
    again = SCHEDULERS[name](resumed)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    again.load_state_dict(schedule)
    assert _train(other, resumed, again, 4) == expected
    assert_identical(held(other, resumed), held(model, optimizer))


@pytest.mark.parametrize("layers", ["diagonal", "block_diagonal(2)"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bounded_steps_go_down_with_the_schedule(layers, compiled):
    """A rate far above the bound: steps are a share of the weights, and fall as the rate does, by whoever."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = SINGD(model, lr=0.0, structure=layers, weight_decay=0.0, compile=compiled)
    for lr, share in ((3.0, 1.0), (6.0, 1.0), (3.0, 0.5), (0.6, 0.1), (6.0, 1.0)):  # of the highest so far
        optimizer.param_groups[0]["lr"] = lr
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        squares(model(torch.randn(8, 4))).backward()
        optimizer.step()
        size, change = (float(x.square().mean().sqrt()) for x in (before, model.weight.detach() - before))
        assert change == pytest.approx(share * 0.03 * max(size, 12**-0.5))


# --- The real effect, beside torch's own optimizers ------------------------------------------------------

CYCLES = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9, base_momentum=0.5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, base_momentum=0.5),
}


def _scheduled(model: nn.Module, optimizer: Optimizer, make: Callable[[Optimizer], LRScheduler]) -> dict:
    scheduler = make(optimizer)
    for x in rows(STEPS):
        optimizer.zero_grad()
        squares(model(x)).backward()
        optimizer.step()
        scheduler.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_a_cycle_of_the_momentum_drives_that_of_layers(optimizer_class, name):
    """With factors that stay the identity the paper's step is that of SGD with momentum."""
    model, other = mlp(), mlp()
    settings = AS_IN_PAPER | {"precond_lr": 0.0, "damping": 0.0, "weight_decay": 0.1}
    optimizer = optimizer_class(model, **settings)
    sgd = SGD(other.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    assert_same(_scheduled(model, optimizer, CYCLES[name]), _scheduled(other, sgd, CYCLES[name]))


@pytest.mark.parametrize("name", [*CYCLES, "LambdaLR"])
def test_a_cycle_of_the_momentum_drives_the_first_beta_of_adamw(name):
    model, other = (nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)) for _ in range(2))
    optimizer, adamw = SINGD(model, lr=0.01), AdamW(other.parameters(), lr=0.01)
    make = (CYCLES | SCHEDULERS)[name]
    assert_identical(_scheduled(model, optimizer, make), _scheduled(other, adamw, make))


def test_betas_given_to_adamw_stay_while_the_momentum_of_layers_is_driven():
    betas = (0.7, 0.9)
    model, other = nn.Sequential(nn.LayerNorm(4)), nn.Sequential(nn.LayerNorm(4))
    optimizer, adamw = SINGD(model, adamw={"betas": betas}), AdamW(other.parameters(), betas=betas)
    still = lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False)  # noqa: E731
    assert_identical(_scheduled(model, optimizer, CYCLES["OneCycleLR"]), _scheduled(other, adamw, still))
    both = SINGD(Small(), adamw={"betas": betas})
    CYCLES["OneCycleLR"](both)
    assert [(g["momentum"], g.get("betas")) for g in both.param_groups] == [(0.95, None), (0.95, betas)]


@every_scheduler
def test_a_rate_in_a_tensor_is_driven_like_a_number(name):
    runs = []
    for lr in (0.01, torch.tensor(0.01)):
        model = Small()
        optimizer = SINGD(model, **DEFAULT | {"lr": lr})
        runs.append((_train(model, optimizer, SCHEDULERS[name](optimizer)), held(model, optimizer)))
    torch.testing.assert_close(*runs, rtol=1e-10, atol=1e-12)


def test_a_rate_in_a_tensor_belongs_to_one_optimizer():
    """Schedulers fill it in place."""
    first, second = (SINGD(Small(), lr=torch.tensor(0.01)) for _ in range(2))
    saved = first.state_dict()
    second.load_state_dict(saved)
    second.param_groups[0]["lr"].fill_(0.5)
    assert [float(group["lr"]) for group in first.param_groups] == [0.01, 0.01]
    assert float(saved["param_groups"][0]["lr"]) == 0.01


def test_a_warm_up_from_nothing_begins_with_the_factors():
    model, optimizer = _pair()
    before = held(model, optimizer)
    _train(model, optimizer, SCHEDULERS["LambdaLR"](optimizer), 0, 1)
    for name, (value, state) in held(model, optimizer).items():
        assert torch.equal(value, before[name][0]), name
        assert state.get("updates", 1) == 1
        assert state.get("step", 1) == 1
    assert optimizer.state[model.head.weight]["steps"] == 1


# --- Stochastic weight averaging -------------------------------------------------------------------------


def _normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_an_averaged_model_is_the_mean_of_the_weights_and_leaves_the_run_alone(optimizer_class):
    def run(averaging: bool) -> Iterator[dict]:
        model = _normed()
        optimizer = optimizer_class(model, **DEFAULT)
        scheduler, average = SWALR(optimizer, 0.05, anneal_epochs=3), AveragedModel(model)
        total = dict.fromkeys(dict(model.named_parameters()), 0.0)
        for x in rows(5):
            optimizer.zero_grad()
            squares(model(x)).backward()
            if averaging:  # between backward and step: nothing of it may be taken for training
                squares(average(x)).backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            total = {name: total[name] + p.detach() for name, p in model.named_parameters()}
        if averaging:
            update_bn(rows(3), average)
            means = {name: value / 5 for name, value in total.items()}
            torch.testing.assert_close(dict(average.module.named_parameters()), means)
        yield held(model, optimizer)

    assert_identical(*(next(run(averaging)) for averaging in (True, False)))

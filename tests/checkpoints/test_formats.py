"""Checkpoints in the formats that users keep them in, and all that may surround loading."""

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, SequentialLR, StepLR

from ingot import IKFAC, INGD, KFAC, PAPER, SINGD
from ingot.health import HealthWarning
from ingot.structures import Diagonal
from tests.behaviour.training import assert_identical, held, train
from tests.checkpoints.runs import SPARSE, go_on, made, resumed

FAMILY = [SINGD, INGD, IKFAC, KFAC]


def _through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    entries = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for entry in entries for tensor in _tensors(entry)]


# --- torch.save and torch.load ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"factor_dtype": torch.bfloat16},
        {"factor_dtype": torch.float64},
        {
            "params": [{"params": "*.bias", "weight_decay": 0.0, "name": "biases"}],
            "adamw": {"betas": (0.8, 0.9)},
        },
        {"maximize": True, "stochastic_rounding": True, "dtype": torch.bfloat16},
        {**PAPER, "precond_lr": 0.01, "momentum": 0.0},
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(kind, settings):
    model, optimizer = made(kind, 5, **SPARSE | settings)
    saved = _through_a_file(optimizer.state_dict())
    other_model, other = made(kind, **SPARSE | settings)
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(saved)
    assert_identical(go_on(other_model, other, 5), go_on(model, optimizer, 5))


@pytest.mark.parametrize("kind", FAMILY)
def test_state_is_tensors_alone_and_settings_are_plain(kind):
    _, optimizer = made(kind, 2, precond_momentum=0.5 if kind is SINGD else 0.0)
    saved = optimizer.state_dict()
    assert all(isinstance(v, Tensor) for state in saved["state"].values() for v in state.values())
    for group in saved["param_groups"]:
        assert {type(v) for v in group.values()} <= {int, float, str, bool, list, type(None)}
    assert isinstance(optimizer.state[next(iter(optimizer._layers))]["steps"], int)  # saving changes nothing


def test_functions_stay_when_numbers_are_loaded():
    schedule = lambda n: 0.1  # noqa: E731
    model, optimizer = made(SINGD, 3)
    _, other = resumed(model, optimizer, precond_lr=schedule)
    assert other.param_groups[0]["precond_lr"] is schedule


def test_functions_stay_behind_when_saving():
    keywords = {"structure": (Diagonal, "dense"), "precond_lr": lambda n: 0.1 / (n + 1)}
    model, optimizer = made(SINGD, 3, **keywords)
    saved = _through_a_file(optimizer.state_dict())
    other_model, other = resumed(model, optimizer, saved=saved, **keywords)
    assert other.param_groups[0]["precond_lr"] is keywords["precond_lr"]
    assert other.param_groups[0]["structure"] is keywords["structure"]
    assert_identical(go_on(other_model, other), go_on(model, optimizer))


def test_gradients_that_were_refused_are_counted_on():
    model, optimizer = made(SINGD, 2)
    go_on(model, optimizer, 1)
    model.norm.weight.grad.fill_(torch.nan)
    model.head.weight.grad.fill_(torch.nan)
    with pytest.warns(HealthWarning, match=r"'head', 'norm\.weight'"):
        optimizer.step()
    other_model, other = resumed(model, optimizer)
    for weight in (other_model.norm.weight, other_model.head.weight):
        assert other.state[weight]["dropped"] == 1
    assert_identical(held(other_model, other), held(model, optimizer))


class Bypassed(nn.Module):
    """A layer whose forward is called only when it is told to: until then AdamW trains it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.is_called = nn.Linear(4, 4), nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x) if self.is_called else nn.functional.linear(x, self.last.weight, self.last.bias)


def test_layers_that_adamw_trained_for_a_while():
    model, other_model = Bypassed(), Bypassed()
    optimizer, other = SINGD(model), SINGD(other_model)
    for is_called in (False, True):
        model.is_called = other_model.is_called = is_called
        train(model, optimizer)
        assert ("exp_avg" in optimizer.state[model.last.bias]) != is_called
        other_model.load_state_dict(copy.deepcopy(model.state_dict()))
        other.load_state_dict(_through_a_file(optimizer.state_dict()))
        assert_identical(held(other_model, other), held(model, optimizer))
        assert_identical(train(other_model, other), train(model, optimizer))


def test_a_bias_that_adamw_trains_since_its_weight_was_frozen():
    model, optimizer = made(SINGD, 2)
    model.head.weight.requires_grad_(False)
    go_on(model, optimizer)
    assert {"momentum_buffer", "exp_avg"} <= optimizer.state[model.head.bias].keys()
    other_model, other = resumed(model, optimizer)
    other_model.head.weight.requires_grad_(False)
    assert_identical(held(other_model, other), held(model, optimizer))
    assert_identical(go_on(other_model, other), go_on(model, optimizer))


# --- torch.distributed.checkpoint -------------------------------------------------------------------------

alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit:UserWarning")
OPTIONS = {
    "sharded": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@alone
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SINGD, {"precond_momentum": 0.5, "structure": ("dense", "diagonal")}),
        (IKFAC, {"stochastic_rounding": True, "dtype": torch.bfloat16}),
        (KFAC, {"params": [{"params": "*.bias", "weight_decay": 0.0}]}),
        (SINGD, PAPER),
        (SINGD, {"factor_dtype": torch.bfloat16}),
        (SINGD, {"precond_lr": lambda n: 0.1}),
        (SINGD, {"momentum": 0.0}),
    ],
)
def test_distributed_checkpoints(kind, settings, options, tmp_path):
    model, optimizer = made(kind, 4, **settings)
    options = OPTIONS[options]
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path
    )
    other_model, other = made(kind, lr=0.5, **settings)
    into = get_optimizer_state_dict(other_model, other, options=options)
    dcp.load({"optimizer": into}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other_model, other, into, options=options)
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert other.param_groups[0]["lr"] == 1e-3
    assert_identical(held(other_model, other), held(model, optimizer))
    assert_identical(go_on(other_model, other), go_on(model, optimizer))


@alone
@pytest.mark.parametrize("name", ["head.weight", "head.bias"])
def test_distributed_checkpoints_of_models_that_were_frozen_in_part(name, tmp_path):
    model, optimizer = made()
    model.get_parameter(name).requires_grad_(False)
    go_on(model, optimizer)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path)
    other_model, other = made()
    other_model.get_parameter(name).requires_grad_(False)
    into = get_optimizer_state_dict(other_model, other)
    dcp.load(into, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other_model, other, into)
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert_identical(go_on(other_model, other), go_on(model, optimizer))


@alone
@pytest.mark.parametrize("remedy", [None, "a group", "a step"])
def test_distributed_checkpoints_of_layers_that_are_passed_by(remedy, tmp_path):
    """torch asks for state before any forward pass, when it is not known that they are."""
    groups = [{"params": "last.*", "precondition": False}] if remedy == "a group" else None

    def make(steps: int) -> tuple[nn.Module, SINGD]:
        model = Bypassed()
        optimizer = SINGD(model, groups)
        train(model, optimizer, steps)
        return model, optimizer

    model, optimizer = make(4)
    assert "exp_avg" in optimizer.state[model.last.weight]
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path)
    other_model, other = make(1 if remedy == "a step" else 0)
    into = get_optimizer_state_dict(other_model, other)
    if remedy is None:
        with pytest.raises(CheckpointException, match=r"Missing key in checkpoint.*last\.weight"):
            dcp.load(into, checkpoint_id=tmp_path)
        return
    dcp.load(into, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other_model, other, into)
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert_identical(train(other_model, other), train(model, optimizer))


@alone
@pytest.mark.parametrize("kind", FAMILY)
def test_the_empty_step_of_distributed_checkpoints_is_none(kind):
    model, optimizer = made(kind, **SPARSE)
    twin_model, twin = made(kind, **SPARSE)
    before = held(model, optimizer)
    get_optimizer_state_dict(model, optimizer)
    after = held(model, optimizer)
    for name, (parameter, state) in after.items():
        assert torch.equal(parameter, before[name][0])
        assert state
        counted = [state[key] for key in ("steps", "updates", "step") if key in state]
        assert not any(counted)
    go_on(model, optimizer, 1)
    go_on(twin_model, twin, 1)
    assert {k: s.keys() for k, (_, s) in after.items()} == {
        k: s.keys() for k, (_, s) in held(twin_model, twin).items()
    }
    assert_identical(go_on(model, optimizer), go_on(twin_model, twin))


def test_a_step_with_a_rate_of_zero_is_a_step():
    model, optimizer = made(lr=0.0)
    go_on(model, optimizer, 1)
    assert optimizer.state[model.head.weight]["steps"] == 1
    norm = nn.LayerNorm(4)
    optimizer = SINGD(norm, lr=0.0)
    train(norm, optimizer, 1)
    assert optimizer.state[norm.weight]["step"] == 1


def test_a_step_without_rate_and_gradients_keeps_the_state_that_there_is():
    model, optimizer = made(steps=3)
    momenta = {p: optimizer.state[p]["momentum_buffer"].clone() for p in model.head.parameters()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.state[model.head.weight]["steps"] == 4
    for p, momentum in momenta.items():
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], 0.9 * momentum)


# --- safetensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILY)
def test_safetensors_of_the_flattened_state(kind, tmp_path: Path):
    model, optimizer = made(kind, 4, factor_dtype=torch.bfloat16)
    saved = optimizer.state_dict()
    flat = {f"{i}.{key}": value for i, state in saved["state"].items() for key, value in state.items()}
    save_file(flat, tmp_path / "optimizer.safetensors")
    state: dict[int, dict] = {}
    for name, value in load_file(tmp_path / "optimizer.safetensors").items():
        index, key = name.split(".")
        state.setdefault(int(index), {})[key] = value
    saved = {"state": state, "param_groups": copy.deepcopy(saved["param_groups"])}
    other_model, other = resumed(model, optimizer, saved=saved, factor_dtype=torch.bfloat16)
    assert_identical(go_on(other_model, other), go_on(model, optimizer))


# --- Older formats ----------------------------------------------------------------------------------------

NEWER = ("skipped", "trouble", "norm_m_K", "norm_m_C", "size", "noise", "gain", "dropped")


def _older(saved: dict) -> dict:
    """A checkpoint as it was before formats had a number."""
    for group in saved["param_groups"]:
        del group["format"], group["stochastic_rounding"]
    for state in saved["state"].values():
        for key in NEWER:
            state.pop(key, None)
        for key in {"steps", "updates"} & state.keys():
            state[key] = int(state[key])
    return saved


@pytest.mark.parametrize("kind", FAMILY)
def test_checkpoints_without_a_number_of_their_format(kind):
    model, optimizer = made(kind, 3)
    saved = _older(copy.deepcopy(optimizer.state_dict()))
    other_model, other = resumed(model, optimizer, saved=copy.deepcopy(saved))
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        assert other.state[q].keys() == optimizer.state[p].keys()
        for key, value in other.state[q].items():
            expected = torch.zeros_like(value) if key in NEWER else optimizer.state[p][key]
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
    go_on(other_model, other)


def test_state_before_any_step_may_be_missing_in_part():
    model, optimizer = made(SINGD, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {0: saved["state"][0]}
    other_model, other = resumed(model, optimizer, saved=saved)
    assert len(other.state) == 1
    go_on(other_model, other)


# --- Hooks ------------------------------------------------------------------------------------------------


def test_hooks_may_adapt_what_is_saved_and_loaded():
    _, optimizer = made(SINGD, 3)
    calls = []

    def in_half_precision(optimizer: Any, saved: dict) -> dict:
        states = {
            index: {k: v.bfloat16() if k in ("K", "C") else v for k, v in state.items()}
            for index, state in saved["state"].items()
        }
        return saved | {"state": states, "epoch": 7}

    optimizer.register_state_dict_pre_hook(lambda optimizer: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(in_half_precision)
    saved = _through_a_file(optimizer.state_dict())
    assert saved["epoch"] == 7
    assert saved["state"][0]["K"].dtype == torch.bfloat16

    def with_its_own_rate(optimizer: Any, saved: dict) -> dict:
        calls.append("before loading")
        return saved | {"param_groups": [group | {"lr": 0.5} for group in saved["param_groups"]]}

    other_model, other = made()
    other.register_load_state_dict_pre_hook(with_its_own_rate)
    other.register_load_state_dict_pre_hook(lambda optimizer, saved: calls.append(saved["epoch"]))
    other.register_load_state_dict_post_hook(lambda optimizer: calls.append(optimizer.param_groups[0]["lr"]))
    other.load_state_dict(saved)
    assert calls == ["before saving", "before loading", 7, 0.5]
    assert saved["param_groups"][0]["lr"] == 1e-3
    found = other.state[next(other_model.parameters())]["K"]
    torch.testing.assert_close(found, saved["state"][0]["K"].float(), rtol=0, atol=0)


def test_hooks_may_give_checkpoints_another_layout():
    model, optimizer = made(SINGD, 3)
    saving = optimizer.register_state_dict_post_hook(lambda optimizer, saved: {"ours": saved})
    saved = optimizer.state_dict()
    assert saved.keys() == {"ours"}
    saving.remove()
    before = held(model, optimizer)
    go_on(model, optimizer)
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, saved: saved["ours"])
    optimizer.load_state_dict(saved)
    for name, (_, state) in held(model, optimizer).items():
        assert state.keys() == before[name][1].keys()


def test_hooks_do_not_change_the_callers_dict():
    """As in torch, whose hooks are given a shallow copy."""
    _, optimizer = made(SINGD, 1)
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, saved: saved.update(note="mine"))
    optimizer.load_state_dict(saved)
    assert "note" not in saved


def test_what_a_hook_makes_of_a_checkpoint_is_checked():
    model, optimizer = made(SINGD, 2)
    before, saved = held(model, optimizer), optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, saved: {"nothing": 1})
    with pytest.raises(ValueError, match="no checkpoint"):
        optimizer.load_state_dict(saved)
    assert_identical(held(model, optimizer), before)


# --- Schedulers -------------------------------------------------------------------------------------------


def _cosine_after_warmup(optimizer: torch.optim.Optimizer) -> SequentialLR:
    parts = [StepLR(optimizer, 2, 1.5), CosineAnnealingLR(optimizer, 8)]
    return SequentialLR(optimizer, parts, milestones=[4])


SCHEDULES = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.01, total_steps=20),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "sequential": _cosine_after_warmup,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on(name):
    def go_on_by(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list:
        rates = []
        for step in range(steps):
            go_on(model, optimizer, 1, seed=step)
            schedule.step()
            rates.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        return rates

    model, optimizer = made(**SPARSE)
    schedule = SCHEDULES[name](optimizer)
    go_on_by(model, optimizer, schedule, 6)
    saved = _through_a_file({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    other_model, other = made(lr=0.7, **SPARSE)
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    other_schedule = SCHEDULES[name](other)
    other.load_state_dict(saved["optimizer"])
    other_schedule.load_state_dict(saved["schedule"])
    assert go_on_by(other_model, other, other_schedule, 6) == go_on_by(model, optimizer, schedule, 6)
    assert_identical(held(other_model, other), held(model, optimizer))


# --- When, and into what ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("times", [1, 2])
def test_loading_at_any_time_and_again(steps, times):
    model, optimizer = made(SINGD, 4, **SPARSE)
    saved = copy.deepcopy(optimizer.state_dict())
    other_model, other = made(SINGD, steps, lr=0.1, **SPARSE | {"precond_warmup": 0})
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    for _ in range(times):
        other.load_state_dict(saved)
    assert_identical(held(other_model, other), held(model, optimizer))
    assert_identical(go_on(other_model, other, 4), go_on(model, optimizer, 4))


def test_a_checkpoint_before_the_first_step():
    model, optimizer = made(SINGD, 0, **SPARSE)
    saved = _through_a_file(optimizer.state_dict())
    assert saved["state"] == {}
    other_model, other = made(SINGD, 3, **SPARSE)
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(saved)
    assert not other.state
    assert_identical(go_on(other_model, other), go_on(model, optimizer))


def test_statistics_of_the_batch_before_loading_are_forgotten():
    model, optimizer = made(SINGD, 2, precond_every=1)
    saved = copy.deepcopy(optimizer.state_dict())
    twin_model, twin = resumed(model, optimizer, precond_every=1)
    model(torch.randn(6, 3, 4)).square().sum().backward()
    optimizer.load_state_dict(saved)
    for p in model.parameters():
        p.grad = None  # not by the optimizer, who would forget as well
    loss = [m(torch.ones(6, 3, 4)).square().sum() for m in (model.eval(), twin_model.eval())]
    for value, one in zip(loss, (optimizer, twin), strict=True):
        value.backward()
        one.step()
    assert_identical(held(model, optimizer), held(twin_model, twin))


@pytest.mark.parametrize("sooner", [True, False])
def test_factors_are_due_by_the_loaded_numbers(sooner):
    """A tap that stayed open or closed would change the step after loading."""
    model, optimizer = made(SINGD, 3 if sooner else 4, **SPARSE)
    _, other = resumed(model, optimizer, **SPARSE)
    assert optimizer.wants_curvature == other.wants_curvature == sooner


def test_groups_that_were_added():
    def make(steps: int) -> tuple:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])
        whole = nn.Sequential(*model)
        optimizer = SINGD(whole, whole[0].parameters())
        optimizer.add_param_group({"params": list(whole[1].parameters()), "lr": 0.02})
        go_on(whole, optimizer, steps)
        return whole, optimizer

    model, optimizer = make(4)
    saved = copy.deepcopy(optimizer.state_dict())
    other_model, other = make(0)
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(saved)
    assert [group["lr"] for group in other.param_groups] == [1e-3, 0.02]
    assert_identical(go_on(other_model, other), go_on(model, optimizer))
    with pytest.raises(ValueError, match=r"\[2, 2\] parameters and this optimizer of \[2\]"):
        SINGD(other_model, other_model[0].parameters()).load_state_dict(saved)


def test_parameters_that_were_replaced():
    model, optimizer = made(SINGD, 4, **SPARSE)
    other_model, other = made(SINGD, 2, **SPARSE)
    for module in other_model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter)))
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_identical(held(other_model, other), held(model, optimizer))
    assert_identical(go_on(other_model, other), go_on(model, optimizer))


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("settings", [{}, {"structure": "diagonal"}, {"factor_dtype": torch.float64}])
def test_nothing_is_shared_with_the_caller(kind, settings):
    """Neither memory nor changes: a checkpoint may be loaded as often as one likes."""
    model, optimizer = made(kind, 3, structure="dense")
    saved = copy.deepcopy(optimizer.state_dict())
    untouched = copy.deepcopy(saved)
    other_model, other = resumed(model, optimizer, saved=saved, **{"structure": "dense"} | settings)
    mine = {t.untyped_storage().data_ptr() for t in _tensors([*other.state.values()])}
    theirs = {t.untyped_storage().data_ptr() for t in _tensors(saved["state"])}
    assert not mine & theirs
    go_on(other_model, other)
    assert saved["param_groups"] == untouched["param_groups"]
    assert saved["state"].keys() == untouched["state"].keys()
    torch.testing.assert_close(saved["state"], untouched["state"], rtol=0, atol=0)
    expected = held(other_model, other)
    for tensor in _tensors(saved["state"]):
        tensor.fill_(1)
    for group in saved["param_groups"]:
        group.clear()
    assert_identical(held(other_model, other), expected)
    assert math.isclose(other.param_groups[0]["lr"], 1e-3)


def test_settings_are_not_shared_with_the_caller():
    model, optimizer = made(SINGD, 1, lr=torch.tensor(1e-3), adamw={"betas": [0.8, 0.9]})
    saved = copy.deepcopy(optimizer.state_dict())
    _, other = resumed(model, optimizer, saved=saved)
    other.param_groups[0]["lr"].fill_(0.5)  # as torch's schedulers do
    assert saved["param_groups"][0]["lr"] == torch.tensor(1e-3)
    saved["param_groups"][-1]["betas"][0] = 7.0
    assert other.param_groups[-1]["betas"] == [0.8, 0.9]


def test_a_checkpoint_keeps_the_rate_of_its_time():
    _, optimizer = made(SINGD, 1, lr=torch.tensor(1e-3))
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["lr"].fill_(0.5)
    assert saved["param_groups"][0]["lr"] == torch.tensor(1e-3)

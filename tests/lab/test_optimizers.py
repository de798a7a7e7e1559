"""Optimizers by the text that asks for them."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import ingot
from ingot.lab.optimizers import OPTIMIZERS, choose
from ingot.lab.peers import Together


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(x), torch.arange(6) % 3).backward()
        optimizer.step()


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.is_there])
def test_all_train_every_parameter_and_follow_a_schedule(name):
    model = network()
    before = copy.deepcopy(list(model.parameters()))
    optimizer = choose(name).make(model)
    schedule = LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.0)
    train(model, optimizer)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    for _ in range(3):
        schedule.step()
    assert all(group["lr"] == 0 for group in optimizer.param_groups)


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.is_there])
def test_all_continue_from_their_checkpoints(name):
    if name == "official":
        pytest.skip("the official package's optimizer has no state in its checkpoints")
    model, chosen = network(), choose(name)
    optimizer = chosen.make(model)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    resumed = chosen.make(other)
    resumed.load_state_dict(saved)
    train(model, optimizer, 2)
    train(other, resumed, 2)
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()))


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.is_there])
def test_what_is_searched_is_a_setting(name):
    chosen = choose(name)
    assert {"lr", "weight_decay"} <= chosen.space.keys()
    middle = {
        key: (place.low * place.high) ** 0.5 if place.log else (place.low + place.high) / 2
        for key, place in chosen.space.items()
    }
    if name in ("KFAC", "IKFAC"):
        assert "precond_momentum" not in middle  # which the paper has for SINGD alone
    train(model := network(), chosen.with_settings(middle).make(model))


@pytest.mark.parametrize("name", ["SINGD", "INGD", "IKFAC", "KFAC"])
def test_the_papers_step_is_searched_over_the_papers_table(name):
    rows = {"lr", "weight_decay", "damping", "precond_lr"}
    rows |= {"precond_momentum"} if name in ("SINGD", "INGD") else set()
    assert choose(f"{name} paper").space.keys() == rows


def test_damping_is_searched_in_its_own_units():
    """Absolute in the paper's step; in units of the curvature else, with the default well inside."""
    ours, paper = choose("SINGD").space["damping"], choose("SINGD paper").space["damping"]
    assert (paper.low, paper.high) == (1e-4, 1.0)
    assert ours.low * 10 <= ingot.SINGD(network()).defaults["damping"] <= ours.high / 10
    assert "damping" not in choose("SINGD damping=0.3").space


def test_structures_and_settings():
    chosen = choose("singd:hierarchical(3,2) lr=2e-3 damping=0.01 approx=reduce max_relative_step=None")
    assert (chosen.name, chosen.label) == (
        "SINGD",
        "SINGD hierarchical(3,2) lr=2e-3 damping=0.01 approx=reduce max_relative_step=None",
    )
    optimizer = chosen.make(network())
    group = optimizer.param_groups[0]
    assert isinstance(optimizer, ingot.SINGD)
    assert (group["lr"], group["damping"], group["approx"]) == (2e-3, 0.01, "reduce")
    assert group["max_relative_step"] is None
    assert group["structure"] == "hierarchical(3,2)"


def test_the_dtype_of_factors():
    model = network()
    optimizer = choose("SINGD factor_dtype=bfloat16").make(model)
    train(model, optimizer)
    assert optimizer.state[model[0].weight]["K"].dtype == torch.bfloat16


def test_a_structure_for_each_side():
    assert choose("SINGD:dense/diagonal").settings["structure"] == ("dense", "diagonal")
    assert choose("SINGD:auto").make(network()).describe()


def test_a_recipes_settings_are_for_ingots_own_and_yield_to_the_users():
    common = {"approx": "reduce", "damping": 0.5}
    group = choose("SINGD damping=0.2").make(network(), common).param_groups[0]
    assert (group["approx"], group["damping"]) == ("reduce", 0.2)
    assert "approx" not in choose("AdamW").make(network(), common).param_groups[0]


def test_the_papers_step():
    group = choose("SINGD:dense paper").make(network()).param_groups[0]
    assert {key: group[key] for key in ingot.PAPER} == dict(ingot.PAPER)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("SNIGD", "did you mean 'SINGD'"),
        ("Adam", "did you mean 'AdamW'"),
        ("SINGD:diagnoal", "diagonal"),
        ("SINGD lr", "write lr=2e-3"),
        ("SINGD dampening=3", "did you mean 'damping'"),
        ("AdamW:diagonal", "no structure"),
        ("AdamW paper", "no setting of AdamW"),
    ],
)
def test_what_makes_no_sense(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        choose(text)


def test_settings_that_an_optimizer_does_not_have():
    with pytest.raises(ValueError, match=r"AdamW.*nesterov"):
        choose("AdamW nesterov=True").make(network())


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("ingot.lab.optimizers.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install pytorch_optimizer"):
        choose("SOAP")


def test_together_is_one_optimizer():
    model = network()
    first, second = model[0].parameters(), model[3].parameters()
    optimizer = Together(torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(second, lr=0.01))
    train(model, optimizer)
    assert len(optimizer.param_groups) == 2
    assert set(optimizer.state) == {*model[0].parameters(), *model[3].parameters()}
    assert optimizer.step(lambda: torch.tensor(2.0)) == 2

"""The optimizers on real models, as their libraries build them: losses fall, all parameters take part."""

from math import isfinite
from statistics import fmean

import pytest
import torch
from torch.optim import Optimizer

from ingot import IKFAC, SINGD
from tests.shares import PAGE, share_of
from tests.zoo import BUILDERS, Case, build


def _train(case: Case, optimizer: Optimizer, steps: int) -> list[float]:
    """Train; check that exactly those parameters moved that had reason to. Returns the losses."""
    before = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    reached, pulled, losses = set(), set(), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = case.loss(case.model)
        loss.backward()
        for name, p in case.model.named_parameters():
            if p.grad is not None:
                reached.add(name)
                if p.grad.any():
                    pulled.add(name)
        optimizer.step()
        losses.append(loss.item())
    assert all(map(isfinite, losses))
    for name, p in case.model.named_parameters():
        assert torch.isfinite(p).all(), name
        # In between is a gradient that is always zero, of which weight decay may still make a step.
        if name in pulled:
            assert not torch.equal(p, before[name]), f"{name} did not move"
        elif name not in reached:
            assert torch.equal(p, before[name]), f"{name} moved without a gradient"
    assert pulled
    return losses


@pytest.mark.parametrize("name", BUILDERS)
def test_singd_trains(name):
    case = build(name)
    optimizer = SINGD(case.model, lr=3e-3)
    losses = _train(case, optimizer, 20)
    assert fmean(losses[-3:]) < 0.95 * losses[0]
    share = share_of(case.model, optimizer)
    assert share.of_linear_weights > 0.95
    assert f"| `{name}` | {share} |" in PAGE.read_text("utf-8")  # else run `make models`


@pytest.mark.parametrize("name", BUILDERS)
def test_ikfac_with_diagonal_factors_trains(name):
    case = build(name)
    losses = _train(case, IKFAC(case.model, lr=3e-3, structure="diagonal"), 4)
    assert losses[-1] < losses[0]


def test_a_vocabulary_may_grow_in_the_middle_of_training():
    """transformers gives the same parameter other data, of another shape."""
    case = build("transformers/gpt2")
    optimizer = SINGD(case.model, lr=3e-3)
    losses = _train(case, optimizer, 5)
    case.model.resize_token_embeddings(40, mean_resizing=False)
    losses += _train(case, optimizer, 15)
    assert fmean(losses[-3:]) < 0.95 * losses[0]
    weight = case.model.get_input_embeddings().weight
    assert weight is case.model.lm_head.weight
    assert (len(weight), optimizer.state[weight]["updates"]) == (40, 15)
    assert set(optimizer.state) == set(case.model.parameters())


def test_adapters_may_be_injected_in_the_middle_of_training():
    """They are new parameters, to be added as to any optimizer; the rest is frozen and stays."""
    case = build("transformers/llama")
    from peft import LoraConfig, inject_adapter_in_model

    optimizer = SINGD(case.model, lr=3e-3)
    losses = _train(case, optimizer, 5)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), case.model)
    new = [p for name, p in case.model.named_parameters() if "lora" in name]
    optimizer.add_param_group({"params": new})
    losses += _train(case, optimizer, 5)
    assert losses[-1] < losses[0]
    assert all({"K", "C"} <= set(optimizer.state[p]) for p in new)


def test_a_case_is_the_same_each_time_but_for_the_seed():
    first, second, other = build("torch/unet"), build("torch/unet"), build("torch/unet", seed=1)
    assert first.loss(first.model) == second.loss(second.model)
    assert first.loss(first.model) != other.loss(other.model)

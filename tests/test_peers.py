"""Defects known from other implementations, each with a test that would notice it here."""

import copy
import gc
import io
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import unfold
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ingot import IKFAC, PAPER, SINGD, HealthWarning
from ingot.structures import bind, parse

pytestmark = pytest.mark.usefixtures("float64")

DESCENT = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "precond_lr": 0.0, "structure": "dense", **PAPER}
"""Settings with which factors stay the identity: every step is one of gradient descent."""


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def data(samples: int = 6, *shape: int) -> Tensor:
    return torch.randn(samples, *(shape or (4,)), generator=torch.Generator().manual_seed(1))


def backward(model: nn.Module, x: Tensor, **inputs: Tensor) -> None:
    (model(x, **inputs) - 1).square().flatten(1).sum(1).mean().backward()


def train(
    model: nn.Module, optimizer: Optimizer, steps: int = 3, backward: Callable[..., None] = backward
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, (1 + step) * data())
        optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


# --- Wrong numbers ----------------------------------------------------------------------------------------


def test_block_diagonal_products_transpose_the_blocks():
    structure = bind(parse("block_diagonal(2)"), 5)
    entries, x = torch.randn(structure.numel), torch.randn(5, 3)
    dense = structure.dense(entries)
    blocks = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2), torch.ones(1, 1))
    assert not torch.equal(dense, dense.mT)
    torch.testing.assert_close(structure.apply_t(entries, x), dense.mT @ x)
    torch.testing.assert_close(structure.dense(structure.self_gram(entries)), blocks * (dense.mT @ dense))


def test_one_block_makes_the_steps_of_a_dense_factor_when_it_is_not_symmetric_any_more():
    results = []
    for structure in ("dense", "block_diagonal(8)"):
        model = mlp()
        optimizer = SINGD(model, lr=0.01, precond_lr=0.05, precond_every=1, structure=structure, **PAPER)
        train(model, optimizer, 20)
        results.append(values(model))
    torch.testing.assert_close(*results)
    k = optimizer.state[model[0].weight]["K"].reshape(5, 5)
    assert not torch.allclose(k, k.mT, rtol=1e-3)


@pytest.mark.parametrize("loss_average", ["batch", None], ids=["mean", "sum"])
@pytest.mark.parametrize("optimizer_class", [IKFAC, SINGD])
def test_micro_batches_give_the_factors_of_the_whole_batch(optimizer_class, loss_average):
    factors = []
    for parts in (1, 4):
        model = mlp()
        optimizer = optimizer_class(
            model, precond_lr=0.01, precond_every=1, loss_average=loss_average, **PAPER
        )
        for _ in range(2):
            optimizer.zero_grad()
            for x in data(12).chunk(parts):
                loss = (model(x) - 1).square().sum()
                (loss / 12 if loss_average else loss).backward()
            optimizer.step()
        state = optimizer.state[model[0].weight]
        assert not torch.allclose(state["C"], torch.eye(5).flatten(), rtol=1e-4)
        factors.append((state["K"], state["C"]))
    torch.testing.assert_close(*factors)


def test_tied_weights_are_stepped_once():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second)
    optimizer, before = SINGD(model, **DESCENT), first.weight.detach().clone()
    backward(model, data())
    optimizer.step()
    torch.testing.assert_close(first.weight.detach(), before - 0.1 * first.weight.grad)


def test_a_weight_given_alone_leaves_its_bias_alone():
    model = nn.Linear(4, 3)
    before = values(model)
    train(model, SINGD(model, [model.weight]))
    assert moved(before, model) == {"weight"}


def test_groups_of_a_convolution_are_not_averaged():
    """The inputs' second moment is that of all channels, for a depthwise layer one by one."""
    model, x = nn.Conv2d(4, 8, 3, groups=4, padding=1, bias=False), data(6, 4, 5, 5)
    optimizer = SINGD(model, structure="dense", **PAPER)
    backward(model, x)
    patches = unfold(x, 3, padding=1).unflatten(1, (4, 9)).permute(1, 0, 3, 2).flatten(1, 2)
    u = patches.mT @ patches / patches.shape[1]
    seen = optimizer._layers[model.weight].pending.scaled(9, 2, loss_is_mean=True)
    torch.testing.assert_close(seen.k.value.unflatten(-1, (9, 9)), u)
    torch.testing.assert_close(9 * seen.trace_u.sum(), u.diagonal(dim1=-2, dim2=-1).sum())


def test_parameters_without_memory_of_their_own_keep_their_groups():
    """On the meta device all parameters have the same address."""
    with torch.device("meta"):
        model = mlp()
    optimizer = SINGD(model, [{"params": "0.*", "lr": 0.0}, {"params": "2.*", "lr": 0.1}], weight_decay=0.0)
    model.to_empty(device="cpu").load_state_dict(mlp().state_dict())
    before = values(model)
    train(model, optimizer)
    assert moved(before, model) == {"2.weight", "2.bias"}


def test_groups_are_found_again_after_the_model_was_converted():
    """A parameter of another dtype lies at another address."""
    model = mlp().float()
    optimizer = SINGD(model, [{"params": "0.*", "lr": 0.0}], weight_decay=0.0)
    train(model, optimizer, backward=lambda model, x: backward(model, x.float()))
    model.double()
    before = values(model)
    train(model, optimizer)
    assert moved(before, model) == {"2.weight", "2.bias"}


# --- Crashes ----------------------------------------------------------------------------------------------


def test_an_encoder_layer_is_trained_with_all_its_projections():
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    before, optimizer = values(model), SINGD(model)
    train(model, optimizer, backward=lambda model, x: backward(model, x.unsqueeze(1).expand(-1, 3, -1)))
    assert moved(before, model) == set(before)
    for weight in (model.self_attn.in_proj_weight, model.self_attn.out_proj.weight):
        assert optimizer.state[weight]["updates"] == 3


def test_a_layer_may_be_unused_in_a_step():
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    before, optimizer = values(model), SINGD(model)
    train(model, optimizer, 2, backward=lambda model, x: backward(model[0], x))
    assert moved(before, model) == {"0.weight", "0.bias"}
    train(model, optimizer, 2, backward=lambda model, x: backward(model[1], x))
    assert [optimizer.state[layer.weight]["steps"] for layer in model] == [2, 2]


def test_a_bias_may_be_frozen():
    model = mlp()
    model[0].bias.requires_grad_(False)
    before, optimizer = values(model), SINGD(model)
    train(model, optimizer)
    assert moved(before, model) == set(before) - {"0.bias"}
    assert optimizer.state[model[0].weight]["updates"] == 3


def test_a_layers_input_may_be_given_by_name():
    model = nn.Linear(4, 3)
    optimizer = SINGD(model)
    train(model, optimizer, backward=lambda model, x: (model(input=x) - 1).square().mean().backward())
    assert optimizer.state[model.weight]["updates"] == 3


def test_weights_may_be_frozen_for_a_forward_pass():
    """As for an attack on the inputs."""

    def attacked(model: nn.Module, x: Tensor) -> None:
        model.requires_grad_(False)
        output = model(x := x.requires_grad_())
        (gradient,) = torch.autograd.grad(output.sum(), x)
        model.requires_grad_(True)
        backward(model, (x + 0.1 * gradient.sign()).detach())

    model = mlp()
    before, optimizer = values(model), SINGD(model)
    train(model, optimizer, backward=attacked)
    assert moved(before, model) == set(before)
    assert optimizer.state[model[0].weight]["updates"] == 3


@pytest.mark.parametrize(
    "structure", ["block_diagonal(2)", "hierarchical(2,2)", "tril_toeplitz", "triu_toeplitz"]
)
def test_every_structure_takes_float64(structure):
    model = mlp()
    before, optimizer = values(model), SINGD(model, structure=structure)
    train(model, optimizer)
    assert moved(before, model) == set(before)
    assert optimizer.state[model[0].weight]["K"].dtype == torch.float64


def test_gradients_may_be_clipped_before_the_step():
    model = mlp()
    before, optimizer = values(model), SINGD(model, **DESCENT)
    backward(model, data())
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.01
    optimizer.step()
    steps = torch.cat([(p - before[name]).flatten() for name, p in model.named_parameters()])
    torch.testing.assert_close(steps.norm().item(), 0.1 * 0.01, rtol=1e-3, atol=0)


@pytest.mark.parametrize("optimizer_class", [SINGD, IKFAC])
def test_scaled_gradients_may_be_unscaled_and_clipped_before_the_step(optimizer_class):
    """A constant scale of the curvature cancels by default, so the steps are those without a scaler."""
    results = []
    for scaled in (True, False):
        model = mlp()
        optimizer = optimizer_class(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale((model((1 + step) * data()) - 1).square().sum(1).mean()).backward()
            scaler.unscale_(optimizer)
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
            scaler.step(optimizer)
            scaler.update()
        results.append(values(model))
    torch.testing.assert_close(*results)


def test_checkpoints_are_read_by_torchs_default_load_even_with_a_schedule_that_is_a_function():
    model, file = mlp(), io.BytesIO()
    settings = {"precond_lr": lambda updates: 0.1 / (1 + updates), "precond_every": 1}
    optimizer = SINGD(model, **settings)
    train(model, optimizer)
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    of_twin = SINGD(twin, **settings)
    of_twin.load_state_dict(torch.load(file))
    train(model, optimizer)
    train(twin, of_twin)
    torch.testing.assert_close(values(model), values(twin), rtol=0, atol=0)


def test_biases_may_be_in_a_group_without_decay():
    model = mlp()
    settings = DESCENT | {"weight_decay": 0.5}
    optimizer = SINGD(model, [{"params": "*.bias", "weight_decay": 0.0}], **settings)
    before = values(model)
    train(model, optimizer, 1, backward=lambda model, x: (0 * model(x)).sum().backward())
    expected = {name: p if "bias" in name else (1 - 0.1 * 0.5) * p for name, p in before.items()}
    torch.testing.assert_close(values(model), expected)
    assert optimizer.state[model[0].weight]["K"].numel() == 5**2


# --- Silent failures --------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Parameters of modules that have children: a class token here, a packed projection in the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(4))
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack((self.class_token.expand_as(x), x, x.roll(1, 0)), dim=1)
        return self.head(self.attention(x, x, x)[0][:, 0])


def test_parameters_of_modules_with_children_are_trained():
    model = Tokens()
    before, optimizer = values(model), SINGD(model)
    assert {"class_token", "attention.in_proj_weight", "attention.in_proj_bias"} <= set(before)
    train(model, optimizer)
    assert moved(before, model) == set(before)


def test_a_loaded_checkpoint_belongs_to_the_caller():
    model = mlp()
    optimizer = SINGD(model, adamw={"eps": 1e-6})
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    train(model, optimizer)
    assert saved["param_groups"] == before["param_groups"]
    torch.testing.assert_close(saved["state"], before["state"], rtol=0, atol=0)


def test_hooks_go_with_the_optimizer():
    model = mlp()
    optimizer = SINGD(model)
    train(model, optimizer)
    assert all(model[i]._forward_hooks for i in (0, 2))
    del optimizer
    gc.collect()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_importing_and_training_leave_the_warnings_filters_alone():
    code = """
import warnings, torch
def train(optimizer_of):
    model = torch.nn.Linear(4, 3)
    optimizer = optimizer_of(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
train(lambda model: torch.optim.AdamW(model.parameters()))  # what torch imports late has filters of its own
before = list(warnings.filters)
import ingot
train(ingot.SINGD)
assert warnings.filters == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_step_that_a_scaler_skips_does_not_cost_a_factor_update():
    model = mlp()
    optimizer = SINGD(model, precond_every=3, precond_warmup=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    updates = []
    for factor in (1, 1, 1, float("inf"), 1, 1):
        before = values(model)
        optimizer.zero_grad()
        scaler.scale(factor * (model(data()) - 1).square().sum(1).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        updates.append(optimizer.state[model[0].weight]["updates"])
        assert bool(moved(before, model)) == (factor == 1)
    assert updates == [1, 1, 1, 1, 2, 2]  # the fourth was to update, so the fifth does
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_factor_rate_that_is_too_large_for_a_sum_loss_does_no_harm():
    def run(**settings) -> bool:
        model = mlp()
        optimizer = SINGD(model, precond_lr=1.0, precond_every=1, loss_average=None, **settings)
        train(
            model, optimizer, 20, backward=lambda model, x: (100 * (model(x) - 1)).square().sum().backward()
        )
        return all(p.isfinite().all() for p in model.parameters())

    assert run()
    with warnings.catch_warnings(record=True) as said:  # where nothing bounds the factors' step
        warnings.simplefilter("always")
        assert run(**PAPER)
    assert {warning.category for warning in said} == {HealthWarning}
    assert "lower precond_lr" in str(said[0].message)


def test_activation_checkpointing_frees_the_inner_activations():
    stem, segment = nn.Linear(4, 4), mlp()
    optimizer, inner = SINGD(nn.Sequential(stem, segment)), []
    segment[1].register_forward_hook(
        lambda m, a, output: inner.append(StorageWeakRef(output.untyped_storage()))
    )
    for forgets in (False, True):
        x = stem(data())
        output = checkpoint(segment, x, use_reentrant=False) if forgets else segment(x)
        assert inner[-1].expired() is forgets
        output.sum().backward()
    assert optimizer._layers[segment[2].weight].pending is not None

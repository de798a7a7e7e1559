"""The factors that users are given: those that gradients are multiplied with, whoever asks and however."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ingot import IKFAC, INGD, KFAC, SINGD

FAMILY = [
    (SINGD, "block_diagonal(2)"),
    (SINGD, ("hierarchical(2,1)", "diagonal")),
    (INGD, "dense"),
    (IKFAC, "triu"),
    (KFAC, "dense"),
    (KFAC, "diagonal"),
]


def _step(model: nn.Module, optimizer: SINGD) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, 6)).square().mean().backward()
    optimizer.step()


def _trained(optimizer_class=SINGD, **settings) -> tuple[nn.Sequential, SINGD]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = optimizer_class(model, **settings)
    for _ in range(3):
        _step(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize(("optimizer_class", "structure"), FAMILY)
def test_natural_gradients_are_gradients_times_the_preconditioners(optimizer_class, structure, float64):
    """Without momentum and bounds a step is lr P_C ∇W P_K, with the bias in the last column."""
    plain = {"momentum": 0.0, "weight_decay": 0.0, "normalize_step": False, "max_relative_step": None}
    model, optimizer = _trained(optimizer_class, structure=structure, lr=1e-3, **plain)
    layer = model[0]
    before = torch.cat((layer.weight, layer.bias[:, None]), 1).detach().clone()
    _step(model, optimizer)
    gradient = torch.cat((layer.weight.grad, layer.bias.grad[:, None]), 1)
    factors = optimizer.factors(layer)
    p_k, p_c = factors.preconditioners()
    after = torch.cat((layer.weight, layer.bias[:, None]), 1)
    torch.testing.assert_close(before - after, 1e-3 * p_c @ gradient @ p_k)
    for side, dim in ((factors.k, 7), (factors.c, 5)):
        assert side.structure.dim == dim
        assert side.entries.shape == (side.structure.numel,)
        x = torch.randn(dim, 2)
        torch.testing.assert_close(side.apply(x), side.dense() @ x)
    row = optimizer.describe().rows[0]
    assert (str(factors.k.structure), str(factors.c.structure)) == (row.k, row.c)


def test_a_layer_is_asked_for_by_its_module_its_weight_or_their_names():
    model, optimizer = _trained()
    expected = optimizer.state[model[2].weight]
    for which in (model[2], model[2].weight, "2", "2.weight"):
        found = optimizer.factors(which)
        assert torch.equal(found.k.entries, expected["K"])
        assert torch.equal(found.c.entries, expected["C"])
    before = expected["K"].clone()
    found.k.entries.zero_()
    assert torch.equal(optimizer.state[model[2].weight]["K"], before)  # what is given is a copy


def test_groups_of_a_convolution_have_factors_each():
    model = nn.Conv1d(4, 6, 3, groups=2)
    optimizer = SINGD(model)
    model(torch.randn(8, 4, 9)).square().mean().backward()
    optimizer.step()
    p_k, p_c = optimizer.factors(model).preconditioners()
    assert (p_k.shape, p_c.shape) == ((2, 7, 7), (2, 3, 3))


def test_what_has_no_factors_is_refused_with_what_has():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.MultiheadAttention(4, 2))
    optimizer = SINGD(model)
    with pytest.raises(ValueError, match="layer '0' has no factors yet"):
        optimizer.factors("0")
    for which in (model, model[1], model[0].bias, "1.weight"):
        with pytest.raises(ValueError, match=r"no layer that has factors; there are 0, 2.in_proj"):
            optimizer.factors(which)
    with pytest.raises(ValueError, match=r"did you mean '2.in_proj'"):
        optimizer.factors("2.inproj")
    with pytest.raises(ValueError, match=r"several layers: ask for one of '2.in_proj', '2.out_proj'"):
        optimizer.factors(model[2])
    with pytest.raises(TypeError, match="its module, its weight or their name; got 0"):
        optimizer.factors(0)


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_factors_that_are_shared_out_come_whole():
    def run(shard: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        if shard:
            fully_shard(model)
        optimizer = SINGD(model, precond_every=5, precond_warmup=0)  # in between, each has its part alone
        for _ in range(2):
            _step(model, optimizer)
        assert hasattr(optimizer.state[model[0].weight]["K"], "full_tensor") == shard
        factors = optimizer.factors("0")
        return [*factors.preconditioners(), factors.k.entries, *optimizer.factors(model[1]).preconditioners()]

    for whole, expected in zip(run(True), run(False), strict=True):
        assert type(whole) is torch.Tensor
        torch.testing.assert_close(whole, expected)

"""Curvature from backward passes of its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from ingot import SINGD
from tests.behaviour.training import (
    PLAIN,
    Uses,
    assert_identical,
    backward,
    batches,
    held,
    mlp,
    moved,
    pending,
    squares,
    statistics,
    train,
)

pytestmark = pytest.mark.usefixtures("float64")


LOSSES: dict[str, Callable[[Tensor, str], Tensor]] = {
    "cross_entropy": lambda out, reduction: cross_entropy(
        out.flatten(0, -2), torch.zeros(out[..., 0].numel(), dtype=torch.long), reduction=reduction
    ),
    "binary_cross_entropy": lambda out, reduction: binary_cross_entropy_with_logits(
        out, torch.zeros_like(out), reduction=reduction
    ),
    "mse": lambda out, reduction: mse_loss(out, torch.zeros_like(out), reduction=reduction),
}


def gauss_newton(model: nn.Sequential, x: Tensor, loss: str, reduction: str = "mean") -> list[Tensor]:
    """G of both layers of an ``mlp``: Jᵀ H J, summed over the places where the weight is used."""
    hidden = model[0](x).detach()
    rows = hidden[..., 0].numel()
    h = jacrev(jacrev(lambda out: LOSSES[loss](out, reduction)))(model[1:](hidden).detach())
    h = h.reshape(rows, 3, rows, 3)
    j = jacrev(model[1:])(hidden).reshape(rows, 3, rows, 5).detach()
    return [torch.einsum("mcra,mcnd,ndrb->ab", j, h, j), torch.einsum("rarb->ab", h)]


def separate(**settings) -> tuple[nn.Sequential, SINGD]:
    model = mlp()
    return model, SINGD(model, fisher="separate", **PLAIN, **settings)


def curvatures(optimizer: SINGD) -> list[Tensor]:
    return [statistics(optimizer, weight)[1] for weight in optimizer._layers]


@pytest.mark.parametrize("loss_average", ["batch", "token", None])
@pytest.mark.parametrize("shape", [(6, 4), (3, 2, 4)], ids=["vectors", "sequences"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES)
def test_exact_curvature_is_the_generalised_gauss_newton_matrix(loss, reduction, shape, loss_average):
    model, optimizer = separate(loss_average=loss_average)
    (x,) = batches(1, *shape)
    optimizer.curvature_backward(model(x), loss, samples=None, reduction=reduction)
    torch.testing.assert_close(curvatures(optimizer), gauss_newton(model, x, loss, reduction))


def test_curvature_finds_the_classes_in_any_dimension():
    model, optimizer = separate()
    (x,) = batches(1, 3, 2, 4)
    optimizer.curvature_backward(model(x).movedim(-1, 1), "cross_entropy", samples=None, dim=1)
    torch.testing.assert_close(curvatures(optimizer), gauss_newton(model, x, "cross_entropy"))


def test_exact_curvature_does_not_depend_on_a_groups_own_loss_average():
    model, optimizer = separate(params=[{"params": "0.*", "loss_average": "token"}])
    (x,) = batches(1, 3, 2, 4)
    optimizer.curvature_backward(model(x), "mse", samples=None)
    torch.testing.assert_close(curvatures(optimizer), gauss_newton(model, x, "mse"))


@pytest.mark.parametrize("sizes", [(3, 3), (2, 4)])
def test_exact_curvature_of_micro_batches_is_that_of_the_whole_batch(sizes):
    model, optimizer = separate()
    (x,) = batches(1)
    for part in x.split(sizes):
        optimizer.curvature_backward(model(part), "mse", samples=None)
    torch.testing.assert_close(curvatures(optimizer), gauss_newton(model, x, "mse"))


@pytest.mark.parametrize("loss", LOSSES)
def test_sampled_curvature_has_the_exact_one_as_its_mean(loss):
    model, optimizer = separate()
    (x,) = batches(1, 40, 4)
    exact = gauss_newton(model, x, loss)
    for samples, tolerance in ((500, 0.05), (1, 0.6)):
        optimizer.zero_grad()
        optimizer.curvature_backward(model(x), loss, samples=samples)
        for g, expected in zip(curvatures(optimizer), exact, strict=True):
            assert 0 < (g - expected).norm() < tolerance * expected.norm()


def test_curvature_of_a_single_output_without_a_batch():
    """That of a batch of one."""
    found = []
    for shape in ((4,), (1, 4)):
        model, optimizer = separate()
        torch.manual_seed(0)
        optimizer.curvature_backward(model(torch.ones(shape)), "cross_entropy", samples=3)
        found.append(curvatures(optimizer))
    torch.testing.assert_close(*found)


def test_with_a_separate_fisher_statistics_come_from_curvature_alone():
    model, optimizer = separate()
    (x,) = batches(1)
    output = model(x)
    optimizer.curvature_backward(output, "mse")
    assert all(p.grad is None for p in model.parameters())
    before = [statistics(optimizer, weight) for weight in optimizer._layers]
    squares(output).backward()
    assert_identical([statistics(optimizer, weight) for weight in optimizer._layers], before)
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.curvature_backward(model(x), "mse", samples=3)
    assert_identical([p.grad for p in model.parameters()], gradients)
    optimizer.step()
    assert optimizer.state[model[0].weight]["updates"] == 1


def test_a_step_without_curvature_says_how_to_give_it():
    model, optimizer = separate()
    before = held(model, optimizer)
    backward(model, *batches(1))
    with pytest.raises(RuntimeError, match="curvature_backward"):
        optimizer.step()
    assert_identical(held(model, optimizer), before)


def test_curvature_is_taken_only_when_factors_are_updated():
    def both(model: nn.Module, x: Tensor) -> None:
        output = model(x)
        wanted.append(optimizer.wants_curvature)
        optimizer.curvature_backward(output, "mse")
        assert pending(optimizer) == [wanted[-1]] * 2
        squares(output).backward()

    model, wanted = mlp(), []
    optimizer = SINGD(model, fisher="separate", precond_every=2, precond_warmup=0)
    train(model, optimizer, 4, backward=both)
    assert wanted == [True, False, True, False]
    assert optimizer.state[model[0].weight]["updates"] == 2


def test_backward_passes_of_ones_own_within_curvature_count_as_one_batch():
    model, optimizer = separate()
    uses, output = Uses(model[2]), model(*batches(1))
    directions = torch.randn(2, *output.shape)
    with optimizer.curvature():
        for direction in directions:
            torch.autograd.grad(output, list(optimizer._layers), direction, retain_graph=True)
    rows = directions.flatten(0, 1)
    torch.testing.assert_close(statistics(optimizer, model[2].weight), (uses.u(1.0), 6 * rows.mT @ rows))
    assert all(p.grad is None for p in model.parameters())


def test_where_all_layers_are_frozen_no_curvature_is_needed():
    model = nn.Sequential(mlp(), nn.LayerNorm(3))
    model[0].requires_grad_(False)
    before = held(model, optimizer := SINGD(model, fisher="separate"))
    output = model(*batches(1))
    optimizer.curvature_backward(output, "mse")
    squares(output).backward()
    optimizer.step()
    assert moved(before, held(model, optimizer)) == {"1.weight", "1.bias"}


def test_an_empirical_fisher_takes_no_curvature():
    model = mlp()
    optimizer = SINGD(model)
    with pytest.raises(RuntimeError, match="fisher='separate'"), optimizer.curvature():
        pass
    with pytest.raises(RuntimeError, match="fisher='separate'"):
        optimizer.curvature_backward(model(*batches(1)), "mse")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "hinge"}, "loss must be one of 'cross_entropy'"),
        ({"loss": "mse", "samples": 0}, "samples must be at least 1"),
        ({"loss": "mse", "reduction": "none"}, "reduction must be 'mean' or 'sum'"),
    ],
)
def test_bad_arguments_of_curvature_are_refused(arguments, message):
    model, optimizer = separate()
    with pytest.raises(ValueError, match=message):
        optimizer.curvature_backward(model(*batches(1)), **arguments)
    assert pending(optimizer) == [False, False]


def test_an_unknown_fisher_is_refused():
    with pytest.raises(ValueError, match="'empirical' or 'separate'; got 'exact'"):
        SINGD(mlp(), fisher="exact")

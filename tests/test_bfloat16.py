"""Pure bfloat16, long: weights, gradients, momenta and factors, for every structure."""

import gc
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from ingot import IKFAC, SINGD
from ingot.lab.recipes.digits import split_digits
from ingot.structures import bind, parse, registered

# Everything that has a name as it is, and the combinators, which need arguments.
STRUCTURES = sorted(set(registered()) - {"upper", "lower"})
STRUCTURES += ["upper(dense(4),triu_toeplitz)", "lower(tril_toeplitz(5),block_diagonal(3))"]
WIDTHS = (16, 12, 10)


@cache
def _data() -> tuple[Tensor, Tensor]:
    """Handwritten digits of 4x4 pixels."""
    images, labels, *_ = split_digits()
    return avg_pool2d(images, 2).flatten(1).bfloat16(), labels


def _model() -> nn.Module:
    first, second, third = WIDTHS
    return nn.Sequential(nn.Linear(first, second), nn.ReLU(), nn.Linear(second, third)).bfloat16()


def _train(model, optimizer, steps: int) -> list[float]:
    x, y = _data()
    losses = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(len(y), (32,), generator=generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _born(make):
    """What a function returns, and all tensors that were born meanwhile and are still alive."""
    gc.collect()
    gc.freeze()  # hides what exists from get_objects
    made = make()
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    gc.unfreeze()
    return made, tensors


def _check(optimizer_class, structure: str, steps: int, bound: float) -> None:
    _data()  # born before

    def make():
        model = _model()
        # Products of the factors would be kept in float32.
        settings = {"structure": structure, "precond_every": 2, "cache_products": False}
        optimizer = optimizer_class(model, lr=1e-2, **settings)
        losses = _train(model, optimizer, steps)
        optimizer.zero_grad()
        return model, optimizer, losses

    (model, optimizer, losses), tensors = _born(make)
    assert sum(losses[-20:]) / 20 < bound
    # Indices that structures share are neither state nor copies.
    tensors = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    assert all(torch.isfinite(tensor).all() for tensor in tensors)
    # No copy of anything in another precision, wherever it may be kept: in float32 are only single numbers.
    of_weights = sum(p.numel() for p in model.parameters())
    of_factors = sum(bind(parse(structure), d).numel for d in (WIDTHS[0] + 1, *WIDTHS[1:], WIDTHS[1] + 1))
    storages = {t.untyped_storage().data_ptr(): t for t in tensors}.values()
    sizes = [(t.dtype, t.untyped_storage().nbytes() // t.element_size()) for t in storages]
    assert {size for dtype, size in sizes if dtype != torch.bfloat16} == {1}
    in_bfloat16 = sum(size for dtype, size in sizes if dtype == torch.bfloat16)
    assert in_bfloat16 == 2 * of_weights + of_factors  # weights, momenta, factors
    state = [value for s in optimizer.state.values() for value in s.values() if isinstance(value, Tensor)]
    assert sum(value.nbytes for value in state if value.numel() > 1) == 2 * (of_weights + of_factors)


@pytest.mark.parametrize("optimizer_class", [SINGD, IKFAC])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_short(structure, optimizer_class):
    _check(optimizer_class, structure, steps=50, bound=2.1)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_class", [SINGD, IKFAC])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_two_thousand_steps(structure, optimizer_class):
    _check(optimizer_class, structure, steps=2000, bound=0.35)

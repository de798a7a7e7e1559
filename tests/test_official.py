"""Trajectories equal those of the official package ``singd`` in float64, digit for digit.

Its block-diagonal class multiplies with the wrong transpose, so that structure is compared with a plain
reading of the paper instead, in ``test_reference.py``.
"""

import itertools
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn

import ingot

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from singd.optim.optimizer import SINGD as Official
    from singd.structures import (
        base,
        dense,
        diagonal,
        hierarchical,
        trilbottomrightdiag,
        triltoeplitz,
        triltopleftdiag,
        triubottomrightdiag,
        triutoeplitz,
        triutopleftdiag,
    )

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("float64")]

# Our name, and the official class that holds the same matrices.
STRUCTURES = {
    "dense": dense.DenseMatrix,
    "diagonal": diagonal.DiagonalMatrix,
    "hierarchical(15,15)": hierarchical.Hierarchical15_15Matrix,
    "tril_toeplitz": triltoeplitz.TrilToeplitzMatrix,
    "triu_toeplitz": triutoeplitz.TriuToeplitzMatrix,
    "rank_triu(1)": triubottomrightdiag.TriuBottomRightDiagonalMatrix,
    "rank_triu_mirrored(1)": triutopleftdiag.TriuTopLeftDiagonalMatrix,
    "rank_tril(1)": trilbottomrightdiag.TrilBottomRightDiagonalMatrix,
    "rank_tril_mirrored(1)": triltopleftdiag.TrilTopLeftDiagonalMatrix,
}


class OfficialWithAll(Official):
    """The official optimizer with every structure class it has, by our names."""

    SUPPORTED_STRUCTURES = STRUCTURES


@pytest.fixture(autouse=True)
def _let_float64_pass(monkeypatch):
    """Some official classes refuse float64 for no other reason than that it is not in a list."""
    for module in (base, dense, diagonal, hierarchical, triltoeplitz, triutoeplitz):
        if hasattr(module, "lowest_precision"):
            monkeypatch.setattr(module, "lowest_precision", lambda *dtypes: torch.float64)


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 9, bias=False), nn.ReLU(inplace=True), nn.Linear(9, 3)
    )


def _convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 5, (2, 3), padding=(1, 2), dilation=(2, 1), bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(150, 3),
    )


def _sequence() -> nn.Module:
    """Linear layers on ``[batch, positions, features]``, with an output for every position."""
    return nn.Sequential(nn.Linear(5, 33), nn.ReLU(), nn.Linear(33, 4))


MODELS = {
    "mlp": (_mlp, (7, 6)),
    "convolution": (_convolution, (4, 2, 9, 8)),
    "sequence": (_sequence, (4, 6, 5)),
}


class Setting(NamedTuple):
    every: int
    weight_decay: float
    momentum: float
    precond_momentum: float
    loss: str


# Each structure, model, rule and approximation meets one of these in turn; dense factors meet all of them.
SETTINGS = [
    Setting(1, 0.0, 0.0, 0.0, "batch"),
    Setting(1, 0.01, 0.9, 0.5, "sum"),
    Setting(3, 0.01, 0.0, 0.5, "batch"),
    Setting(3, 0.0, 0.9, 0.0, "sum"),
    Setting(3, 0.01, 0.9, 0.0, "token"),
    Setting(1, 0.0, 0.0, 0.5, "token"),
    Setting(1, 0.01, 0.9, 0.5, "batch"),
]
# Learning rates of weights and factors at which the official trajectory is far from diverging.
RATES = {"batch": (5e-3, 5e-3), "token": (5e-3, 2e-3), "sum": (5e-4, 2e-4)}
GRID = list(itertools.product(STRUCTURES, MODELS, ("expand", "reduce"), (False, True)))
CASES = [(*case, SETTINGS[i % len(SETTINGS)]) for i, case in enumerate(GRID)]
CASES += list(itertools.product(["dense"], MODELS, ["expand"], (False, True), SETTINGS))


def _loss(outputs: torch.Tensor, targets: torch.Tensor, kind: str) -> torch.Tensor:
    terms = {"sum": 1, "batch": len(outputs), "token": outputs[..., 0].numel()}[kind]
    return (outputs - targets).square().sum() / terms


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, shape, kind: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for step in range(20):
        x = torch.randn(shape[0] + step % 2, *shape[1:])
        optimizer.zero_grad()
        outputs = model(x)
        _loss(outputs, torch.randn_like(outputs) + 1, kind).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _model(name: str) -> nn.Module:
    model = MODELS[name][0]()
    torch.manual_seed(2)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    return model


@pytest.mark.parametrize(("structure", "model_name", "approx", "kfac_like", "setting"), CASES)
def test_trajectory_equals_the_official_one(structure, model_name, approx, kfac_like, setting):
    shape = MODELS[model_name][1]
    common = {"damping": 0.05, "weight_decay": setting.weight_decay, "momentum": setting.momentum}
    common["lr"], precond_lr = RATES[setting.loss]
    precond_momentum = 0.0 if kfac_like else setting.precond_momentum  # IKFAC has none
    loss_average = None if setting.loss == "sum" else setting.loss

    model = _model(model_name)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = OfficialWithAll(
        model,
        **common,
        lr_cov=precond_lr,
        alpha1=precond_momentum,
        T=setting.every,
        structures=(structure, structure),
        kfac_approx=approx,
        kfac_like=kfac_like,
        loss_average="batch+sequence" if loss_average == "token" else loss_average,
    )
    expected = _train(model, optimizer, shape, setting.loss)

    model = _model(model_name)
    optimizer = (ingot.IKFAC if kfac_like else ingot.SINGD)(
        model,
        **common,
        precond_lr=precond_lr,
        precond_momentum=precond_momentum,
        precond_every=setting.every,
        structure=structure,
        approx=approx,
        loss_average=loss_average,
        **ingot.PAPER,
    )
    actual = _train(model, optimizer, shape, setting.loss)

    for weight, layer in optimizer._layers.items():
        moved = optimizer.state[weight]["K"] - layer.structures[0].identity()
        assert moved.norm() > 1e-4  # the factors matter
    for a, e, s in zip(actual, expected, start, strict=True):
        assert torch.isfinite(e).all()
        assert (e - s).norm() > 1e-3 * s.norm()  # it went somewhere
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


def test_k_and_c_take_structures_of_their_own():
    model = _model("mlp")
    optimizer = OfficialWithAll(model, structures=("hierarchical(15,15)", "diagonal"), T=1)
    expected = _train(model, optimizer, (7, 6), "batch")
    model = _model("mlp")
    optimizer = ingot.SINGD(
        model,
        structure=("hierarchical(15,15)", "diagonal"),
        damping=1e-3,
        precond_lr=1e-2,
        precond_momentum=0.5,
        precond_every=1,
        weight_decay=0.0,
        **ingot.PAPER,
    )
    actual = _train(model, optimizer, (7, 6), "batch")
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)

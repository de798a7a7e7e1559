"""The examples of the gallery that are about no framework: each learns, and does what it says."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import ingot
from ingot import SINGD
from ingot.structures import bind, parse
from tests import test_examples
from tests.structures.oracle import project

FOLDER = Path(__file__).parents[1] / "examples"
PAGE = (FOLDER.parent / "docs" / "gallery.md").read_text("utf-8")

pytestmark = [
    pytest.mark.usefixtures("registry"),
    # torch_geometric scripts some of its functions when it is imported, which torch no longer likes.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


@pytest.fixture
def run(monkeypatch):
    """Runs an example as a script; returns its names and the optimizers it made."""

    def run(name: str) -> tuple[dict[str, Any], list[SINGD]]:
        made = []

        def observed(*args: Any, **settings: Any) -> SINGD:
            made.append(SINGD(*args, **settings))
            return made[-1]

        monkeypatch.setattr(ingot, "SINGD", observed)
        return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__"), made

    return run


def _load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name=name)


# --- Which there are --------------------------------------------------------------------------------------


def test_every_example_is_on_the_page_and_tested():
    names = {path.stem for path in FOLDER.glob("*.py")}
    shown = set(re.findall(r'--8<-- "examples/(\w+)\.py"', PAGE))
    assert names == shown | set(test_examples.NAMES)
    for name in names:
        assert f"examples/{name}.py" in PAGE
    own_tests = {"mixed_precision", "graph_network", "own_structure", "own_layer", "laplace"}
    in_processes = {"sharded"}  # tests/distributed/test_failure.py
    assert shown == own_tests | in_processes, "an example without a test"


@pytest.mark.parametrize(
    ("name", "least", "steps"),
    [
        ("mixed_precision", 0.95, 6 * 22),
        ("graph_network", 0.93, 60),
        ("own_structure", 0.95, 6 * 22),
        ("own_layer", 0.93, 6 * 22),
    ],
)
def test_an_example_learns(name, least, steps, run, capsys):
    _, (optimizer,) = run(name)
    (accuracy,) = re.findall(r"^accuracy: ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert float(accuracy) > least
    layers = [state for state in optimizer.state.values() if "K" in state]
    assert len(layers) == 2
    for state in layers:
        assert state["steps"] == steps
        assert 20 < state["updates"] < steps
        assert state["dropped"] == state["skipped"] == 0
    assert optimizer.describe().preconditioned > 0.9


# --- What they say of themselves --------------------------------------------------------------------------


def test_mixed_precision_computes_in_float16_and_in_parts(monkeypatch):
    seen = set()
    forward = nn.Linear.forward

    def watched(self, x):
        output = forward(self, x)
        if torch.is_autocast_enabled("cpu"):
            seen.add((len(x), output.dtype))
        return output

    monkeypatch.setattr(nn.Linear, "forward", watched)
    _load("mixed_precision")["main"](epochs=1)
    assert seen == {(24, torch.float16), (16, torch.float16)}


@pytest.mark.parametrize("dim", [64, 24, 12, 7])
def test_the_own_structure_keeps_the_contract(dim, float64):
    _load("own_structure")
    s = bind(parse("repeated(8)"), dim)
    a, b = torch.randn(2, 3, s.numel)
    x = torch.randn(3, dim, 5)
    dense_a, dense_b = s.dense(a), s.dense(b)
    torch.testing.assert_close(s.dense(s.matmul(a, b)), dense_a @ dense_b)
    torch.testing.assert_close(s.apply(a, x), dense_a @ x)
    torch.testing.assert_close(s.apply_t(a, x), dense_a.mT @ x)
    torch.testing.assert_close(s.inner(a, b).squeeze(-1), (dense_a * dense_b).sum((-2, -1)))
    torch.testing.assert_close(s.trace(a).squeeze(-1), dense_a.diagonal(dim1=-2, dim2=-1).sum(-1))
    torch.testing.assert_close(s.dense(s.identity()), torch.eye(dim))
    torch.testing.assert_close(s.gram(x[0]), project(s, x[0] @ x[0].mT))
    torch.testing.assert_close(s.self_gram(a[0]), project(s, dense_a[0].mT @ dense_a[0]))


def test_the_own_layer_trains_as_a_linear_layer_behind_a_normalization():
    layer = _load("own_layer")["NormalizedLinear"](12, 5)

    class Normalize(nn.Module):
        def forward(self, x):
            return normalize(x, dim=-1)

    usual = nn.Sequential(Normalize(), nn.Linear(12, 5))
    usual[1].load_state_dict(layer.state_dict())
    x, y = torch.randn(32, 12), torch.randint(0, 5, (32,))
    for model in (layer, usual):
        optimizer = SINGD(model, lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        assert optimizer.describe().preconditioned == 1
    torch.testing.assert_close(layer.weight, usual[1].weight)
    torch.testing.assert_close(layer.bias, usual[1].bias)


def test_laplace_is_less_sure_of_what_it_has_never_seen(run, capsys):
    run("laplace")
    printed = capsys.readouterr().out
    found = {line.split(":")[0]: line for line in printed.splitlines()}
    numbers = {
        name: dict(zip(NUMBERS, map(float, re.findall(r"\d\.\d+", line)), strict=True))
        for name, line in found.items()
    }
    plain, laplace = numbers["trained weights"], numbers["Laplace"]
    assert plain["accuracy"] > 0.97
    assert laplace["accuracy"] > plain["accuracy"] - 0.015
    assert laplace["test loss"] < plain["test loss"] + 0.01
    assert laplace["confidence, unknown"] < plain["confidence, unknown"] - 0.08
    assert laplace["confidence, known"] > plain["confidence, known"] - 0.05
    assert laplace["AUROC"] > plain["AUROC"] - 0.02


NUMBERS = ("accuracy", "test loss", "confidence, known", "confidence, unknown", "AUROC")


@pytest.mark.parametrize("structure", ["dense", "hierarchical(2,2)"])
def test_laplace_draws_weights_with_the_covariance_of_the_factors(structure, monkeypatch):
    """W + width C E Kᵀ with a bias in the last column, for an E that is given."""
    posterior = _load("laplace")["posterior"]
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = SINGD(model, structure=structure)
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(32, 6)), torch.randint(0, 3, (32,))).backward()
        optimizer.step()
    noise = {(7, 8): torch.randn(7, 8), (9, 3): torch.randn(9, 3)}
    draw = posterior(model, optimizer, 0.5)
    monkeypatch.setattr(torch, "randn", lambda *shape: noise[shape])
    drawn = draw()
    for i, shape in ((0, (7, 8)), (2, (9, 3))):
        state = optimizer.state[model[i].weight]
        k, c = (
            bind(parse(structure), dim).dense(state[key]) for dim, key in zip(shape, ("K", "C"), strict=True)
        )
        expected = torch.cat((model[i].weight, model[i].bias[:, None]), 1) + 0.5 * c @ noise[shape].mT @ k.mT
        found = torch.cat((drawn[f"{i}.weight"], drawn[f"{i}.bias"][:, None]), 1)
        torch.testing.assert_close(found, expected)

"""Checkpoints of other structures and dtypes are turned into what the loading optimizer keeps."""

import copy
from functools import cache
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ingot import IKFAC, INGD, KFAC, PAPER, SINGD, conversion
from ingot.checkpoints import FUNCTION
from ingot.family import NUMBERS
from ingot.structures import (
    Dense,
    Diagonal,
    LowerTriangular,
    Structure,
    UpperTriangular,
    bind,
    parse,
    registered,
)
from tests.behaviour.training import train
from tests.checkpoints.runs import SHAPE, go_on, loss, made
from tests.checkpoints.victim import Victim
from tests.structures.oracle import basis, project

DIM = 6
EXAMPLES = {
    "block_diagonal": "block_diagonal(2)",
    "hierarchical": "hierarchical(1,2)",
    "rank_tril": "rank_tril(2)",
    "rank_triu": "rank_triu(2)",
    "rank_tril_mirrored": "rank_tril_mirrored(2)",
    "rank_triu_mirrored": "rank_triu_mirrored(2)",
    "upper": "upper(dense(2),block_diagonal(2))",
    "lower": "lower(block_diagonal(2),dense(2))",
}
STRUCTURES = [EXAMPLES.get(name, name) for name in sorted(registered())]
ANY_CURVATURE = ("dense", "tril", "triu")


def _layer(structure: Any, kind: type = SINGD, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A layer with structure on the input's side alone, after two steps."""
    torch.manual_seed(0)
    model = nn.Linear(DIM, 3, bias=False)
    optimizer = kind(model, structure=(structure, "dense"), **settings)
    train(model, optimizer, 2, 8, DIM)
    return model, optimizer


@cache
def _saved(structure: str) -> dict[str, Any]:
    """The checkpoint of such a layer in float64."""
    return _layer(structure)[1].state_dict()


def _random(structure: Structure) -> Tensor:
    return structure.identity(dtype=torch.float64) + 0.2 * torch.randn(structure.numel)


def _contains(new: Structure, old: Structure) -> bool:
    """Whether every matrix of the old structure is one of the new structure."""
    old_ones, new_ones = basis(old).flatten(1).mT, basis(new).flatten(1).mT
    return bool((new_ones @ torch.linalg.lstsq(new_ones, old_ones).solution - old_ones).abs().max() < 1e-9)


def _close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# --- Factors of the inverse-free rules --------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("into", STRUCTURES)
def test_every_structure_from_others(into):
    model, optimizer = _layer(into)
    new = bind(parse(into), DIM)
    # From every third, beginning with another one each time: all of them take minutes.
    for text in STRUCTURES[STRUCTURES.index(into) % 3 :: 3]:
        old = bind(parse(text), DIM)
        saved = copy.deepcopy(_saved(text))
        entries = saved["state"][0]["K"] = _random(old)
        optimizer.load_state_dict(saved)
        k, old_k = new.dense(optimizer.state[model.weight]["K"]), old.dense(entries)
        u = torch.linalg.inv(old_k @ old_k.mT)
        if into in ANY_CURVATURE or _contains(new, old):
            _close(k @ k.mT, old_k @ old_k.mT)
        if into == "diagonal":
            _close((k @ k.mT).diagonal(), 1 / u.diagonal())
        _close(new.gram(k.mT @ torch.linalg.cholesky(u)), new.identity())  # Π̂(Kᵀ U K)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("into", STRUCTURES)
def test_curvature_of_features_that_are_alike(into):
    """As that of positive inputs, whose means are far from zero."""
    model, optimizer = _layer(into)
    new, saved = bind(parse(into), DIM), copy.deepcopy(_layer("dense")[1].state_dict())
    features = torch.rand(DIM, 50)
    root = torch.linalg.cholesky(features @ features.mT / 50 + 0.05 * torch.eye(DIM))
    saved["state"][0]["K"] = torch.linalg.inv(root).mT.flatten()
    optimizer.load_state_dict(saved)
    k = optimizer.state[model.weight]["K"]
    _close(new.gram(new.apply_t(k, root)), new.identity(), 1e-6)


def test_factors_without_an_inverse_are_refused():
    saved = Victim(structure="dense").good
    saved["state"][0]["K"].zero_()
    assert "'0" in Victim(structure="diagonal").refuses(saved)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("scale", [1e-40, 1.0, 1e40])
@pytest.mark.parametrize("into", ["triu", "diagonal", "block_diagonal(2)", "hierarchical(1,2)"])
def test_factors_of_any_scale_and_of_bad_condition(into, scale):
    model, optimizer = _layer(into)
    new, saved = bind(parse(into), DIM), copy.deepcopy(_layer("dense")[1].state_dict())
    left, right = (torch.linalg.qr(torch.randn(DIM, DIM))[0] for _ in range(2))
    old_k = left @ torch.logspace(-3, 3, DIM).diag() @ right
    saved["state"][0]["K"] = scale * old_k.flatten()
    optimizer.load_state_dict(saved)
    k = optimizer.state[model.weight]["K"] / scale
    _close(new.gram(new.apply_t(k, torch.linalg.inv(old_k).mT)), new.identity())


def test_the_same_structure_is_not_converted():
    for text in STRUCTURES:
        _, optimizer = _layer(text)
        _, other = _layer(text)
        saved = copy.deepcopy(optimizer.state_dict())
        other.load_state_dict(saved)
        torch.testing.assert_close(other.state_dict()["state"], saved["state"], rtol=0, atol=0)


@pytest.mark.usefixtures("float64")
def test_only_the_side_that_differs_is_converted():
    model, optimizer = _layer("dense")
    other_model, other = _layer("tril")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before, after = optimizer.state[model.weight], other.state[other_model.weight]
    assert after.keys() == before.keys()
    for key in after.keys() - {"K"}:
        torch.testing.assert_close(after[key], before[key], rtol=0, atol=0)


@pytest.mark.usefixtures("float64")
def test_matrices_of_convolutions_with_groups_and_of_packed_attention():
    model, optimizer = made(SINGD, 4, torch.float64, structure="dense")
    other_model, other = made(SINGD, 0, torch.float64, structure=("tril", "diagonal"))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    leads = set()
    for weight, other_weight in zip(model.parameters(), other_model.parameters(), strict=True):
        if weight not in optimizer._layers or optimizer._layers[weight].name == "position":
            continue
        before, after = optimizer.state[weight], other.state[other_weight]
        olds, news = optimizer._layers[weight].structures, other._layers[other_weight].structures
        old_k, k = olds[0].dense(before["K"]), news[0].dense(after["K"])
        leads.add(k.shape[:-2])
        _close(k @ k.mT, old_k @ old_k.mT)
        assert not k.triu(1).any()
        old_c = olds[1].dense(before["C"])
        _close(after["C"].square(), 1 / torch.linalg.inv(old_c @ old_c.mT).diagonal(dim1=-2, dim2=-1))
    assert leads == {(), (2,), (3,)}


# --- KFAC's averages --------------------------------------------------------------------------------------

INVERTIBLE = ["dense", "block_diagonal(2)", "block_diagonal(4)", "diagonal"]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("text", "into"), list(permutations(INVERTIBLE, 2)))
@pytest.mark.parametrize("relative_damping", [True, False])
def test_kfacs_averages(text, into, relative_damping):
    settings = {"relative_damping": relative_damping, "damping": 0.1}
    (_, optimizer), (model, other) = _layer(text, KFAC, **settings), _layer(into, KFAC, **settings)
    saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(saved)
    old, new = bind(parse(text), DIM), bind(parse(into), DIM)
    before, after = saved["state"][0], other.state[model.weight]
    _close(after["S_K"], project(new, old.dense(before["S_K"])))
    damping = 0.1**0.5 * before["trace_u"] if relative_damping else 0.1
    expected = torch.linalg.inv(new.dense(after["S_K"]) + damping * torch.eye(DIM))
    _close(new.dense(after["S_K_inverse"]), expected)
    for key in ("S_C", "S_C_inverse", "trace_u", "trace_g", "momentum_buffer"):
        _close(after[key], before[key])


def test_kfacs_inverses_have_the_damping_of_the_checkpoint():
    saved = copy.deepcopy(_layer("dense", KFAC, damping=0.5)[1].state_dict())
    model, other = _layer("diagonal", KFAC, damping=0.001)
    other.load_state_dict(saved)
    state = other.state[model.weight]
    assert other.param_groups[0]["damping"] == 0.5
    _close(state["S_K_inverse"], 1 / (state["S_K"] + 0.5**0.5 * state["trace_u"]), 1e-5)


def test_kfacs_averages_without_traces():
    saved = copy.deepcopy(_layer("dense", KFAC, **PAPER, damping=0.1)[1].state_dict())
    model, other = _layer("diagonal", KFAC)
    other.load_state_dict(saved)
    state = other.state[model.weight]
    _close(state["S_K_inverse"], 1 / (state["S_K"] + 0.1), 1e-5)


# --- Dtypes -----------------------------------------------------------------------------------------------

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def _dtypes(optimizer: torch.optim.Optimizer) -> list:
    states = optimizer.state_dict()["state"]
    return [
        (index, key, states[index][key].dtype) for index in sorted(states) for key in sorted(states[index])
    ]


def _assert_rounded(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Whether every tensor is what was saved, to the accuracy of the dtypes."""
    found = optimizer.state_dict()["state"]
    assert found.keys() == saved.keys()
    for index, state in saved.items():
        for key, value in state.items():
            expected = value.to(found[index][key].dtype)
            torch.testing.assert_close(found[index][key], expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [SINGD, KFAC])
@pytest.mark.parametrize(("dtype", "into"), list(permutations(DTYPES, 2)))
def test_other_dtypes_of_factors(kind, dtype, into):
    _, optimizer = made(kind, 4, factor_dtype=dtype)
    saved = copy.deepcopy(optimizer.state_dict())
    _, other = made(kind, factor_dtype=into)
    other.load_state_dict(saved)
    assert other.param_groups[0]["factor_dtype"] is into
    _assert_rounded(other, saved["state"])
    assert _dtypes(other) == _dtypes(made(kind, 4, factor_dtype=into)[1])


@pytest.mark.parametrize(("dtype", "into"), list(permutations([*DTYPES, torch.float16], 2)))
def test_other_dtypes_of_models(dtype, into):
    saved = copy.deepcopy(made(SINGD, 4, dtype)[1].state_dict())
    _, other = made(SINGD, 0, into)
    other.load_state_dict(saved)
    _assert_rounded(other, saved["state"])
    assert _dtypes(other) == _dtypes(made(SINGD, 4, into)[1])


# --- Training goes on -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (SINGD, {"structure": "dense"}, {"structure": "hierarchical(1,1)"}),
        (SINGD, {"structure": "tril_toeplitz"}, {"structure": ("dense", "rank_triu")}),
        (SINGD, {"structure": "triu", "precond_momentum": 0.5}, {"structure": "tril"}),
        (SINGD, {"structure": "dense"}, {"structure": "diagonal", "precond_momentum": 0.5}),
        (IKFAC, {"structure": "diagonal"}, {"structure": "dense", "factor_dtype": torch.bfloat16}),
        (KFAC, {"structure": "dense"}, {"structure": "block_diagonal(2)"}),
        (KFAC, {"structure": "diagonal", "factor_dtype": torch.float64}, {"structure": "dense"}),
    ],
)
def test_training_goes_on_with_another_structure(kind, before, after):
    model, optimizer = made(kind, 20, lr=0.01, **before)
    other_model, other = made(kind, **after)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for key in ("lr", "precond_momentum"):  # numbers are the checkpoint's, as in torch
        assert other.param_groups[0][key] == optimizer.param_groups[0][key]
    assert other.param_groups[0]["structure"] == after["structure"]
    assert other.param_groups[0]["factor_dtype"] == after.get("factor_dtype")
    x = torch.randn(64, *SHAPE[1:])
    losses = [loss(other_model.eval(), x).item()]
    for seed in (2, 3):
        go_on(other_model.train(), other, 15, seed=seed)
        losses.append(loss(other_model.eval(), x).item())
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(("kind", "into"), list(product([SINGD, INGD, IKFAC], repeat=2)))
def test_the_inverse_free_ones_load_each_other(kind, into):
    model, optimizer = made(kind, 3, structure="block_diagonal(2)")
    other_model, other = made(into, structure="block_diagonal(2)")
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(other.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    go_on(other_model, other)
    assert other.state_dict()["state"][0]["steps"] == 6


# --- Structures that are functions ------------------------------------------------------------------------


def _half(dim: int) -> Structure:
    return bind(parse(f"upper(dense({(dim + 1) // 2}),diagonal)"), dim)


def test_structures_by_functions_stay_and_fit_each_other():
    _, optimizer = _layer(_half)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["structure"] == FUNCTION
    _, other = _layer(_half)
    other.load_state_dict(saved)
    assert other.param_groups[0]["structure"][0] is _half
    torch.testing.assert_close(other.state_dict()["state"], saved["state"], rtol=0, atol=0)
    _, by_text = _layer("rank_triu(3)")
    by_text.load_state_dict(saved)
    torch.testing.assert_close(by_text.state_dict()["state"], saved["state"], rtol=0, atol=0)


def test_structures_by_text_are_converted_to_those_by_functions():
    model, optimizer = _layer("dense")
    other_model, other = _layer(LowerTriangular)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    k, old_k = other.state[other_model.weight]["K"], optimizer.state[model.weight]["K"]
    k, old_k = LowerTriangular(DIM).dense(k), Dense(DIM).dense(old_k)
    _close(k @ k.mT, old_k @ old_k.mT, 1e-5)


def test_structures_by_classes_are_known_by_their_names():
    """Lower and upper triangles have as many entries, which mean something else."""
    model, optimizer = _layer(LowerTriangular)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["structure"] == ("tril", "dense")
    other_model, other = _layer(UpperTriangular)
    other.load_state_dict(saved)
    k, old_k = other.state[other_model.weight]["K"], optimizer.state[model.weight]["K"]
    k, old_k = UpperTriangular(DIM).dense(k), LowerTriangular(DIM).dense(old_k)
    _close(k @ k.mT, old_k @ old_k.mT, 1e-5)


@pytest.mark.parametrize("into", ["dense", "diagonal", Diagonal])
def test_structures_by_unknown_functions_are_refused(into):
    message = Victim(structure=into).refuses(copy.deepcopy(Victim(structure=_half).optimizer.state_dict()))
    assert "functions" in message
    assert "'0'" in message


# --- What is too large ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SINGD, KFAC])
def test_too_many_rows(kind, monkeypatch):
    saved = Victim(kind, structure="dense").good
    monkeypatch.setattr(conversion, "LARGEST", 4)
    message = Victim(kind, structure="diagonal").refuses(saved)
    assert "too many rows" in message
    assert "dense(5)" in message
    assert "'0'" in message
    other = Victim(kind, structure="dense").optimizer
    other.load_state_dict(saved)  # nothing is to be converted
    monkeypatch.setattr(conversion, "LARGEST", 5)
    other = Victim(kind, structure=("dense", "diagonal")).optimizer
    other.load_state_dict(saved)  # nor is anything that has six rows
    monkeypatch.setattr(conversion, "LARGEST", 6)
    Victim(kind, structure="diagonal").optimizer.load_state_dict(saved)


def test_numbers_of_each_matrix_are_kept():
    _, optimizer = made(structure="dense", steps=4)
    _, other = made(structure="diagonal")
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    other.load_state_dict({"state": saved, "param_groups": optimizer.state_dict()["param_groups"]})
    for index, state in other.state_dict()["state"].items():
        kept = state.keys() - {"K", "C"}
        assert kept == saved[index].keys() - {"K", "C"}
        torch.testing.assert_close(
            {key: state[key] for key in kept}, {key: saved[index][key] for key in kept}, rtol=0, atol=0
        )
    assert set(NUMBERS) <= saved[0].keys()

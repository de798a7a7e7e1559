"""Arguments that make no sense are refused, with their name, what was got and what would make sense."""

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import ingot
from ingot import IKFAC, KFAC, PAPER, SINGD, NaturalGradient
from ingot.checkpoints import _KEPT
from ingot.groups import _CHECKS
from ingot.structures import Diagonal

from ..behaviour.training import hooks
from .small import DEFAULT, Small, plain

NAN, INFINITE = float("nan"), float("inf")
AT_LEAST_0, BELOW_1 = "a number of at least 0", "a number from 0 to below 1"
TRUTH = (1, None, "yes")
WRONG = TypeError, ValueError  # where either will do

BAD: dict[str, tuple[str, tuple[Any, ...]]] = {
    "lr": (
        "a number of at least 0, on AdamW's scale",
        (-1.0, NAN, INFINITE, "fast", None, True, torch.ones(2), 1j, torch.tensor(-1.0), torch.tensor(NAN)),
    ),
    "approx": ("'expand' or 'reduce'", ("expnd", None, 1)),
    "loss_average": ("'batch' for a mean over samples, .* or None for a sum", ("mean", "sum", True)),
    "momentum": (BELOW_1, (1.0, -0.1, NAN, "0.9", None, torch.tensor(2.0))),
    "weight_decay": (AT_LEAST_0, (-0.1, INFINITE, None)),
    "damping": (AT_LEAST_0, (-1, NAN, None)),
    "precond_lr": ("a number from 0 to 1, or a function", (1.5, -0.1, NAN, "x", None)),
    "precond_momentum": (BELOW_1, (1.0, -0.1, None)),
    "precond_every": ("a whole number of steps, at least 1", (0, 2.5, True, None, "10")),
    "factor_dtype": (
        r"such as torch.bfloat16 \(torch.float16 has too small a range\), or None for the weight's",
        (torch.float16, torch.int8, torch.complex64, "bfloat16", float),
    ),
    "precond_warmup": ("a whole number of steps, at least 0", (-1, 0.5, False, None)),
    "max_factor_step": (f"{BELOW_1}, or None", (1.0, -0.1, NAN, "x")),
    "relative_damping": ("True or False", TRUTH),
    "factor_start": ("'identity' or 'trace'", ("zero", None)),
    "cache_products": ("True, False, or None for as far as AdamW's memory goes", (1, "yes")),
    "max_rows": ("a whole number of rows, at least 1, or None for all", (0, 2.5, True, "10")),
    "statistics_dtype": (
        "torch.bfloat16 or another floating-point dtype, or None",
        (torch.float16, "bf16", 1),
    ),
    "share_work": ("True, False, or None for where it pays", (1, "yes")),
    "normalize_step": ("True or False", TRUTH),
    "max_relative_step": (f"{AT_LEAST_0}, or None", (-1, NAN, "x")),
    "decoupled_weight_decay": ("True or False", TRUTH),
    "maximize": ("True or False", TRUTH),
    "stochastic_rounding": ("True or False", TRUTH),
    "compile": ("True or False", TRUTH),
    "precondition": ("True, or False for AdamW", TRUTH),
    "betas": ("a pair of numbers from 0 to below 1", ((0.9,), (0.9, 1.0), (NAN, 0.9), 0.9, "ab")),
    "eps": (AT_LEAST_0, (-1e-8, NAN, None)),
}
"""For each setting of a group: what it must be, in words of the error, and values that it must not be."""

SETTINGS = [(name, wanted, value) for name, (wanted, values) in BAD.items() for value in values]
KEYWORDS = inspect.signature(SINGD).parameters.keys()


def _refuses(name: str, wanted: str, got: Any) -> Any:
    return pytest.raises(ValueError, match=f"{name} must be .*{wanted}.*; got {re.escape(repr(got))}$")


def test_every_setting_has_a_bad_case():
    assert set(BAD) == set(_CHECKS)
    assert set(BAD) - {"precondition", "betas", "eps"} | set(OTHER) == KEYWORDS


@pytest.mark.parametrize(("name", "wanted", "value"), [s for s in SETTINGS if s[0] != "precondition"])
def test_bad_settings_of_the_constructor_are_refused(name, wanted, value):
    model = Small()
    keywords = {name: value} if name in KEYWORDS else {"adamw": {name: value}}
    with _refuses(name, wanted, value):
        SINGD(model, **keywords)
    assert not hooks(model)


@pytest.mark.parametrize(("name", "wanted", "value"), SETTINGS)
def test_bad_settings_of_groups_are_refused(name, wanted, value):
    model = Small()
    with _refuses(name, wanted, value):
        SINGD(model, [{"params": "head.*", name: value}])
    optimizer = SINGD(model, model.head.parameters())
    before, seen = copy.deepcopy(optimizer.param_groups), len(hooks(model))
    with _refuses(name, wanted, value):
        optimizer.add_param_group({"params": [model.norm.weight], name: value})
    assert len(optimizer.param_groups) == len(before) == 1
    assert len(hooks(model)) == seen


@pytest.mark.parametrize(("name", "wanted", "value"), [s for s in SETTINGS if s[0] not in _KEPT])
def test_bad_settings_of_a_checkpoint_are_refused(name, wanted, value):
    optimizer = _used()
    saved = optimizer.state_dict()
    saved["param_groups"][1][name] = value
    before = copy.deepcopy(optimizer.state_dict())
    with _refuses(f"the checkpoint has a setting that makes no sense: {name}", wanted, value):
        optimizer.load_state_dict(saved)
    _assert_unchanged(optimizer, before)


def _used() -> Optimizer:
    """An optimizer with state."""
    model = Small()
    optimizer = SINGD(model, **DEFAULT)
    plain(model, optimizer, steps=1)
    return optimizer


def _assert_unchanged(optimizer: Optimizer, before: dict) -> None:
    now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    torch.testing.assert_close(now["state"], before["state"], rtol=0, atol=0)


# --- Other arguments of the constructor ------------------------------------------------------------------

OTHER: dict[str, list[tuple[Any, Any, str]]] = {
    "model": [
        (
            Small().parameters(),
            TypeError,
            r"got generator: write SINGD\(model\), not SINGD\(model.parameters",
        ),
        (None, TypeError, "got NoneType"),
        (nn.ReLU(), ValueError, "there is no parameter to train"),
        (nn.LazyLinear(3), ValueError, "run the model once on an example"),
        (nn.Embedding(5, 3, sparse=True), ValueError, "build it with sparse=False"),
    ],
    "params": [
        ([], ValueError, "there is no parameter to train"),
        (
            [{"params": "nothing.*"}],
            ValueError,
            "pattern 'nothing.*'; the model's parameters are named position,",
        ),
        (
            [{"params": "*", "lrate": 1}],
            ValueError,
            "'lrate' is no setting of a parameter group; there are lr,",
        ),
        ("head.*", WRONG, "params must be .*got 'head"),
        ({"params": "head.*"}, WRONG, "params must be .*got {'params'"),
        (nn.Parameter(torch.ones(2)), WRONG, "params must be"),
        (5, WRONG, "params must be .*got 5"),
        (1e-3, WRONG, "to set the learning rate, write lr=0.001"),
        ([{"params": "*", "dampning": 1}], ValueError, "'dampning' is no setting .*did you mean 'damping'"),
        ([{"lr": 0.1}], WRONG, "params"),
        (set(Small().parameters()), TypeError, "ordered"),
        ([{"params": "*"}, nn.Parameter(torch.ones(2))], TypeError, "put the parameters into a group"),
    ],
    "structure": [
        ("dens", ValueError, "'dens' is no structure, did you mean 'dense'"),
        (("dense",), ValueError, r"a pair for K and C; got \('dense',\)"),
        ("dense(2)", ValueError, "layer 'embedding'.* cannot fill .* leave the size out"),
        ("block_diagonal(0)", ValueError, "must be at least 1"),
        ("", WRONG, "structure .*''"),
        ((), WRONG, "a pair for K and C; got"),
        (5, TypeError, "a structure is text such as .* got 5"),
        (lambda dim: Diagonal(dim + 1), ValueError, "layer 'embedding'.* was asked for dimension"),
    ],
    "memory_budget": [
        ("1.0x adam", ValueError, "memory_budget must be text such as '1.0x adamw'.*got '1.0x adam'"),
        (-1, ValueError, "memory_budget must be .*got -1"),
        (True, ValueError, "memory_budget must be .*got True"),
        (1, ValueError, "the smallest state takes .* a share is written 1.0"),
    ],
    "adamw": [
        ({"betas": (0.9, 1.0)}, ValueError, "betas must be a pair"),
        (5, WRONG, "adamw must be .*got 5"),
        ("fast", WRONG, "adamw must be .*got 'fast'"),
        ({"params": []}, ValueError, "adamw has no settings but .* got 'params'"),
        ({"beta1": 0.9}, ValueError, "adamw has no settings but lr, betas, eps, weight_decay; got 'beta1'"),
        ({"damping": 1.0, "lr": 0.1, "structure": "dense"}, ValueError, "got 'damping', 'structure'"),
    ],
    "fisher": [
        ("exact", ValueError, "fisher must be 'empirical' or 'separate'; got 'exact'"),
        (None, ValueError, "fisher must be 'empirical' or 'separate'; got None"),
    ],
}


@pytest.mark.parametrize(
    ("name", "value", "error", "message"), [(name, *case) for name, cases in OTHER.items() for case in cases]
)
def test_bad_arguments_of_the_constructor_are_refused(name, value, error, message):
    model = Small()
    with pytest.raises(error, match=message):
        SINGD(**{"model": model} | {name: value})
    assert not hooks(model)


def test_bad_settings_of_adamw_are_refused_where_it_trains_nothing_yet():
    with pytest.raises(ValueError, match=r"adamw has no settings but .*'beta1'"):
        SINGD(nn.Linear(4, 3), adamw={"beta1": 0.9})


@pytest.mark.parametrize("optimizer_class", [SINGD, KFAC])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dampning", "; did you mean 'damping'?"),
        ("structures", "; did you mean 'structure'?"),
        ("betas", ": layers have momentum, and what has no factors is set by adamw={'betas': ...}"),
        ("foreach", "; there are model, params, lr, structure,"),
    ],
)
def test_a_keyword_that_does_not_exist_is_refused_with_what_may_be_meant(optimizer_class, name, message):
    model = Small()
    expected = re.escape(f"{optimizer_class.__name__} has no keyword {name!r}{message}")
    with pytest.raises(TypeError, match=expected):
        optimizer_class(model, **{name: 1})
    with pytest.raises(TypeError, match=expected):
        ingot.plan(model, optimizer=optimizer_class, **{name: 1})
    assert not hooks(model)


def test_what_the_family_has_in_common_is_no_optimizer():
    with pytest.raises(TypeError, match="make SINGD, INGD, IKFAC or KFAC"):
        NaturalGradient(Small())


def test_the_papers_settings_cannot_be_changed():
    with pytest.raises(TypeError):
        PAPER["precond_warmup"] = 5
    assert SINGD(Small(), **PAPER).param_groups[0]["precond_warmup"] == 0


def test_what_others_keep_in_groups_survives_a_checkpoint():
    """As timm's lr_scale, by which its schedulers find layers."""
    model = Small()
    optimizer = SINGD(model)
    optimizer.param_groups[0]["lr_scale"] = 0.5
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr_scale"] == 0.5


@pytest.mark.parametrize("structure", ["hierarchical(2,2)", "triu", ("dense", "tril_toeplitz")])
def test_kfac_says_who_can_do_what_it_cannot(structure):
    with pytest.raises(ValueError, match=r"layer '.*KFAC inverts .*choose 'dense'.* or IKFAC"):
        KFAC(Small(), structure=structure)


@pytest.mark.parametrize("optimizer_class", [KFAC, IKFAC])
def test_riemannian_momentum_is_singds(optimizer_class):
    with pytest.raises(ValueError, match="leave precond_momentum at 0, or choose SINGD"):
        optimizer_class(Small(), precond_momentum=0.5)


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        (lambda m: {"params": [m.norm.weight], "lrate": 1}, ValueError, "'lrate' is no setting"),
        (lambda m: {"params": [m.head.weight]}, ValueError, "more than one parameter group"),
        (
            lambda m: {"params": m.convolution.parameters(), "structure": "dense(2)"},
            ValueError,
            "layer 'convolution'",
        ),
        (lambda m: {"params": m.convolution.parameters(), "structure": 5}, TypeError, "a structure is text"),
        (lambda m: {"params": [m.norm.weight + 1]}, ValueError, "non-leaf"),
        (lambda m: [m.norm.weight], TypeError, "param_group must be a dict"),
        (lambda m: {"lr": 0.1}, WRONG, "params"),
    ],
)
def test_a_bad_group_that_is_added_leaves_the_optimizer_as_it_was(group, error, message):
    model = Small()
    optimizer = SINGD(model, model.head.parameters(), **DEFAULT)
    with pytest.raises(error, match=message):
        optimizer.add_param_group(group(model))
    assert len(optimizer.param_groups) == 1
    assert len(hooks(model)) == 1
    optimizer.add_param_group({"params": model.convolution.parameters()})
    plain(model, optimizer, steps=1)
    assert "K" in optimizer.state[model.convolution.weight]


# --- Arguments of other functions ------------------------------------------------------------------------


def _curvature(**arguments: Any) -> None:
    model = nn.Linear(4, 3)
    optimizer = SINGD(model, fisher="separate")
    try:
        optimizer.curvature_backward(**{"output": model(torch.ones(2, 4)), "loss": "mse"} | arguments)
    finally:
        assert optimizer._layers[model.weight].pending is None


def _log(**arguments: Any) -> None:
    optimizer = SINGD(nn.Linear(4, 3))
    try:
        optimizer.log_diagnostics(**{"to": print} | arguments)
    finally:
        assert not optimizer._optimizer_step_post_hooks


CALLS: dict[Callable[..., None], list[tuple[str, Any, Any, str]]] = {
    _curvature: [
        ("loss", "hinge", ValueError, "loss must be one of 'cross_entropy', .*'mse'; got 'hinge'"),
        ("loss", nn.functional.mse_loss, ValueError, "loss must be one of 'cross_entropy'.* got <function"),
        ("samples", 0, ValueError, "samples must be at least 1, or None for the exact curvature; got 0"),
        ("samples", 1.5, WRONG, "samples must be .* got 1.5"),
        ("samples", "2", WRONG, "samples must be .* got '2'"),
        ("dim", 7, (IndexError, ValueError), "dim.* got 7"),
        ("output", None, WRONG, "output must be .* got None"),
        ("output", torch.ones(2, 3), (RuntimeError, ValueError), "output must"),
        ("samples", -1, ValueError, "samples must be at least 1, .* got -1"),
        ("reduction", "none", ValueError, "reduction must be 'mean' or 'sum'; got 'none'"),
        ("reduction", None, ValueError, "reduction must be 'mean' or 'sum'; got None"),
    ],
    _log: [
        ("to", 5, TypeError, "to a SummaryWriter or to a function of a dict and the step, not to 5"),
        ("to", None, TypeError, "to a SummaryWriter .* not to None"),
        ("every", 0, ValueError, "every must be a whole number of steps, at least 1; got 0"),
        ("every", 2.5, WRONG, "every must be a whole number .* got 2.5"),
        ("every", "x", WRONG, "every must be a whole number .* got 'x'"),
        ("every", -5, ValueError, "every must be a whole number .* got -5"),
    ],
}


@pytest.mark.parametrize(
    ("call", "name", "value", "error", "message"),
    [(call, *case) for call, cases in CALLS.items() for case in cases],
)
def test_bad_arguments_of_calls_are_refused(call, name, value, error, message):
    with pytest.raises(error, match=message):
        call(**{name: value})


def test_every_argument_of_calls_has_a_bad_case():
    """But for those that may be anything."""
    of_curvature, of_log = ({name for name, *_ in cases} for cases in CALLS.values())
    assert of_curvature == inspect.signature(SINGD.curvature_backward).parameters.keys() - {"self"}
    assert of_log == inspect.signature(SINGD.log_diagnostics).parameters.keys() - {
        "self",
        "prefix",
        "conditions",
    }


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda own: None, "give what optimizer.state_dict.* returned.*; got 'NoneType'"),
        (lambda own: {"model": 1, "optimizer": own}, r"got \['model', 'optimizer'\]"),
        (
            lambda own: own | {"param_groups": own["param_groups"][:1]},
            r"groups of \[\d+\] .*of \[\d+, 3\]: make it for",
        ),
        (lambda own: own | {"param_groups": 5}, "damaged: its groups or its state"),
        (lambda own: own | {"state": []}, "damaged: its groups or its state"),
        (lambda own: own | {"state": {99: {}}}, "damaged: its state does not belong to its parameters"),
        (lambda own: own | {"state": {0: 5}}, "damaged: the state of '.*' is 5"),
    ],
)
def test_what_is_no_checkpoint_is_refused(saved, message):
    optimizer = _used()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved(optimizer.state_dict()))
    _assert_unchanged(optimizer, before)

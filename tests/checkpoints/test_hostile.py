"""Damaged, foreign and hostile checkpoints are refused with words that help, and nothing is changed."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ingot import IKFAC, INGD, KFAC, SINGD
from ingot.checkpoints import _KEPT, FORMAT
from ingot.groups import _CHECKS
from ingot.structures import Dense
from tests.behaviour.training import train
from tests.checkpoints.victim import Victim

LAYER, NORM = 0, 4
"""Indices of a weight with factors and of a parameter that AdamW trains."""


@pytest.fixture(scope="module")
def victims():
    torch.set_num_threads(1)
    victims = [Victim()]
    yield victims
    victims[-1].goes_on_like_its_twin()


@pytest.fixture
def victim(victims) -> Victim:
    """One for all attacks, since none should have any effect; another one after an attack that had."""
    if victims[-1].is_spoilt:
        victims.append(Victim())
    return victims[-1]


def test_what_the_victim_saved_is_good():
    """So that it is the damage for which the checkpoints below are refused, and changes would be seen."""
    victim = Victim()
    victim.optimizer.load_state_dict(victim.good)
    for check in (victim.is_as_before, victim.goes_on_like_its_twin):
        with pytest.raises(AssertionError):
            check()


# --- Tensors of the state ---------------------------------------------------------------------------------


class Evil:
    """Looks like a tensor of any kind, and strikes when it is looked at."""

    shape = torch.Size([1])
    dtype = torch.float32

    def _strike(self, *_: Any) -> Any:
        raise RuntimeError("evil")

    __eq__ = __bool__ = __getattr__ = __len__ = __iter__ = __float__ = __int__ = __index__ = _strike
    __hash__ = object.__hash__


class Shapeless:
    """Has a shape that is none."""

    shape = 3


class Any_:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def _other_type(value: torch.Tensor) -> torch.Tensor:
    return value.long() if value.is_floating_point() else value.float()


BAD = {
    "nothing": lambda value: None,
    "text": lambda value: "K",
    "a number": lambda value: 1.5,
    "a list": lambda value: [value],
    "an array": lambda value: value.numpy(),
    "a function": lambda value: torch.zeros_like,
    "an object": lambda value: Evil(),
    "one dimension more": lambda value: value.unsqueeze(0),
    "more entries": lambda value: value.new_zeros([*value.shape[:-1], 29]),
    "another type": _other_type,
    "text in bytes": lambda value: value.to(torch.uint8) if value.is_floating_point() else value.half(),
    "not a number": lambda value: value.float() * torch.nan,
    "infinity": lambda value: value.float() + torch.inf,
    "more than its type holds": lambda value: torch.full_like(value, 1e300, dtype=torch.float64),
    "complex": lambda value: value.to(torch.complex64),
    "sparse": lambda value: value.to_sparse(),
    "without contents": lambda value: value.to("meta"),
}
FACTORS = ["K", "C", "trace_u", "trace_g", "skipped", "trouble", "norm_m_K", "norm_m_C", "momentum_buffer"]
FACTORS += ["size", "noise", "gain", "dropped", "steps", "updates"]
PLACES = [(LAYER, key) for key in FACTORS] + [(NORM, key) for key in ("step", "exp_avg", "exp_avg_sq")]


def test_all_places_are_attacked(victim):
    found = {(i, key) for i in (LAYER, NORM) for key in victim.good["state"][i]}
    assert found == set(PLACES)


@pytest.mark.parametrize(("index", "key"), PLACES)
@pytest.mark.parametrize("bad", BAD)
def test_bad_state(victim, index, key, bad):
    changed = victim.good
    changed["state"][index][key] = BAD[bad](changed["state"][index][key])
    message = victim.refuses(changed)
    assert repr(key) in message
    assert ("0.weight" if index == LAYER else "1.weight") in message


@pytest.mark.parametrize("key", ["steps", "updates"])
@pytest.mark.parametrize("value", [-1, torch.tensor(-3), torch.tensor(-(2**40))])
def test_negative_counters(victim, key, value):
    changed = victim.good
    changed["state"][LAYER][key] = value
    assert repr(key) in victim.refuses(changed)


def test_state_in_eight_bits():
    victim = Victim()
    changed = victim.good
    changed["state"][LAYER]["K"] = changed["state"][LAYER]["K"].to(torch.float8_e4m3fn)
    victim.loads(changed)  # or refuses it


def test_counters_that_no_tensor_holds(victim):
    changed = victim.good
    changed["state"][LAYER]["steps"] = 10**30
    assert "'steps'" in victim.refuses(changed)


@pytest.mark.parametrize(
    ("index", "key"),
    [(LAYER, key) for key in ("skipped", "trouble", "dropped", "size", "trace_u", "trace_g")]
    + [(NORM, "step"), (NORM, "exp_avg_sq")],
)
def test_numbers_that_are_never_negative(victim, index, key):
    changed = victim.good
    changed["state"][index][key] = -1 - changed["state"][index][key]
    assert repr(key) in victim.refuses(changed)


@pytest.mark.parametrize(("index", "key"), [(LAYER, k) for k in ("C", "steps", "updates")] + PLACES[-3:])
def test_missing_state(victim, index, key):
    changed = victim.good
    del changed["state"][index][key]
    assert ("0.weight" if index == LAYER else "1.weight") in victim.refuses(changed)


@pytest.mark.parametrize("index", [LAYER, 1, NORM])
@pytest.mark.parametrize("key", ["unheard_of", "S_K", "max_exp_avg_sq", 7, None, ("K",)])
def test_extra_state(victim, index, key):
    changed = victim.good
    changed["state"][index][key] = torch.zeros(())
    assert repr(key) in victim.refuses(changed)


def test_momentum_of_a_parameter_that_adamw_trains(victim):
    changed = victim.good
    changed["state"][NORM]["momentum_buffer"] = torch.zeros(5)
    assert "'momentum_buffer' for '1.weight'" in victim.refuses(changed)


@pytest.mark.parametrize("bad", [None, 3, "state", [], torch.zeros(3), Evil])
def test_state_of_a_parameter_that_is_none(victim, bad):
    changed = victim.good
    changed["state"][LAYER] = bad() if bad is Evil else bad  # of which pytest would fall victim
    assert "0.weight" in victim.refuses(changed)


# --- Settings ---------------------------------------------------------------------------------------------

NONSENSE = {
    "a function": lambda n: 0.1,
    "a class": int,
    "an object": object(),
    "text": "nonsense",
    "bytes": b"expand",
    "a list": [1],
    "a dict": {},
    "not a number": float("nan"),
    "infinity": float("inf"),
    "negative": -1,
    "complex": 1j,
    "a function in a list": [0.5, len],
    "a tensor that is not a number": torch.tensor(torch.nan),
    "a negative tensor": torch.tensor(-1.0),
    "a complex tensor": torch.tensor(1j),
    "an array": np.ones(3),
    "an evil object": Evil(),
    "an object like any": Any_(),
}


@pytest.mark.parametrize("setting", sorted(_CHECKS.keys() - _KEPT))
@pytest.mark.parametrize("bad", NONSENSE)
def test_bad_settings(victim, setting, bad):
    changed = victim.good
    changed["param_groups"][1][setting] = NONSENSE[bad]
    message = victim.refuses(changed)
    assert setting in message or "function" in message


@pytest.mark.parametrize("setting", ["lr", "momentum", "damping", "eps"])
def test_settings_beyond_all_numbers(victim, setting):
    changed = victim.good
    changed["param_groups"][0][setting] = 10**400
    assert setting in victim.refuses(changed)


@pytest.mark.parametrize("setting", ["initial_lr", "swa_lr", "max_lr", "base_momentum"])
@pytest.mark.parametrize("bad", ["text", float("nan"), None])
def test_bad_settings_of_schedulers(victim, setting, bad):
    changed = victim.good
    changed["param_groups"][0][setting] = bad
    assert setting in victim.refuses(changed)


def test_settings_that_contain_themselves(victim):
    changed, betas = victim.good, []
    betas.append(betas)
    changed["param_groups"][0]["betas"] = betas
    assert "betas" in victim.refuses(changed)


@pytest.mark.parametrize("setting", sorted(_CHECKS.keys() - {"precond_every", "betas"}))
def test_missing_settings_stay_as_they_are(setting):
    victim = Victim()
    changed = victim.good
    del changed["param_groups"][0][setting]
    assert victim.loads(changed)


def test_riemannian_momentum_does_not_come_in_by_a_checkpoint():
    """By one from before the first step, nor by one whose structures were functions."""
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    early = SINGD(model, structure="dense", precond_momentum=0.5).state_dict()
    assert "momentum" in Victim(IKFAC).refuses(early)
    assert "momentum" in Victim(IKFAC).refuses(_saved(SINGD, structure=Dense, precond_momentum=0.5))


def test_unheard_of_settings(victim):
    changed = victim.good
    changed["param_groups"][0]["amsgrad"] = True
    assert "'amsgrad'" in victim.refuses(changed)


@pytest.mark.parametrize("bad", ["", "dence", "dense(", "dense(2)", 3, None, ["dense"], ["dense", 1], Evil])
def test_bad_structures(victim, bad):
    changed = victim.good
    changed["param_groups"][0]["structure"] = bad() if bad is Evil else bad
    assert "structure" in victim.refuses(changed)


def test_structures_of_endless_text(victim):
    changed = victim.good
    changed["param_groups"][0]["structure"] = "upper(" * 10**5
    assert "structure" in victim.refuses(changed)


def test_evil_factors_beside_structures_that_were_functions(victim):
    changed = victim.good
    del changed["param_groups"][0]["structure"]
    changed["state"][LAYER]["K"] = Shapeless()
    assert "'0'" in victim.refuses(changed)


@pytest.mark.parametrize("number", [FORMAT + 1, 10**30, "1", None, 1.5, Evil])
def test_newer_formats(victim, number):
    changed = victim.good
    changed["param_groups"][0]["format"] = number() if number is Evil else number
    assert "upgrade ingot" in victim.refuses(changed)


# --- The whole --------------------------------------------------------------------------------------------


def _without(key: str):
    return lambda good: {k: v for k, v in good.items() if k != key}


def _with(key: str, value: Any):
    return lambda good: good | {key: value}


def _groups(change):
    return lambda good: good | {"param_groups": change(good["param_groups"])}


def _members(*indices: Any):
    return _groups(lambda groups: [groups[0] | {"params": list(indices)}, groups[1]])


WHOLE = {
    "nothing": (lambda good: None, "state_dict"),
    "a number": (lambda good: 3, "int"),
    "text": (lambda good: "checkpoint.pt", "str"),
    "a list": (lambda good: [good], "list"),
    "an object": (lambda good: Evil(), "Evil"),
    "empty": (lambda good: {}, "'state'"),
    "that of a whole run": (lambda good: {"model": {}, "optimizer": good}, "'optimizer'"),
    "that of a model": (lambda good: nn.Linear(2, 2).state_dict(), "'weight'"),
    "no state": (_without("state"), "'state'"),
    "no groups": (_without("param_groups"), "'param_groups'"),
    "state is nothing": (_with("state", None), "damaged"),
    "state is a list": (_with("state", [{}]), "damaged"),
    "state is an object": (_with("state", Evil()), "damaged"),
    "state of no parameter": (lambda good: good | {"state": good["state"] | {99: {}}}, "one to one"),
    "state by names": (lambda good: good | {"state": {"0.weight": {}}}, "one to one"),
    "groups are nothing": (_with("param_groups", None), "damaged"),
    "groups are a dict": (_with("param_groups", {0: {}}), "damaged"),
    "groups are text": (_with("param_groups", "lr"), "damaged"),
    "groups are an object": (_with("param_groups", Evil()), "damaged"),
    "a group is nothing": (_groups(lambda groups: [groups[0], None]), "damaged"),
    "a group is a list": (_groups(lambda groups: [groups[0], []]), "damaged"),
    "a group is an object": (_groups(lambda groups: [groups[0], Evil()]), "damaged"),
    "a group has no members": (_groups(lambda groups: [groups[0], {"lr": 1}]), "damaged"),
    "no group": (_groups(lambda groups: []), "[4, 2]"),
    "one group": (_groups(lambda groups: groups[:1]), "[4, 2]"),
    "three groups": (_groups(lambda groups: [*groups, groups[0]]), "[4, 2]"),
    "groups in another order": (_groups(lambda groups: groups[::-1]), "[4, 2]"),
    "too few members": (_members(0, 1, 2), "[4, 2]"),
    "too many members": (_members(0, 1, 2, 3, 6), "[4, 2]"),
    "a member twice": (_members(0, 1, 2, 2), "one to one"),
    "a member twice, without state": (lambda good: _members(0, 1, 2, 2)(good | {"state": {}}), "one to one"),
    "a member of both": (_members(0, 1, 2, 4), "one to one"),
    "another member": (_members(0, 1, 2, 77), "one to one"),
    "members are mixed up": (_members(1, 0, 2, 3), "0.weight"),
    "a member is nothing": (_members(0, 1, 2, None), "damaged"),
    "a member is a list": (_members(0, 1, 2, [3]), "damaged"),
    "a member is a tensor": (_members(0, 1, 2, torch.tensor(3)), "damaged"),
    "a member is an object": (_members(0, 1, 2, Evil()), "damaged"),
    "members are a number": (_groups(lambda groups: [groups[0] | {"params": 4}, groups[1]]), "damaged"),
}


@pytest.mark.parametrize("bad", WHOLE)
def test_bad_as_a_whole(victim, bad):
    change, words = WHOLE[bad]
    assert words in victim.refuses(change(victim.good))


# --- Those of others --------------------------------------------------------------------------------------


def _saved(kind: type, model: nn.Module | None = None, **settings: Any) -> dict:
    model = model or nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    optimizer = kind(model, **settings)
    train(model, optimizer, 2)
    return optimizer.state_dict()


def _torchs(kind: type):
    """One of torch's optimizers with groups of the same sizes."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return kind(
            [{"params": [*model[0].parameters(), *model[2].parameters()]}, {"params": model[1].parameters()}],
            lr=1e-3,
        )

    return make


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_that_of_torchs_optimizers(victim, kind):
    assert "another optimizer" in victim.refuses(_saved(_torchs(kind)))
    message = victim.refuses(_saved(lambda model: kind(model.parameters(), lr=1e-3)))
    assert "another optimizer" in message  # and not that the model is another one


@pytest.mark.parametrize("kind", [SINGD, INGD, IKFAC])
def test_kfacs_and_the_others_refuse_each_other(kind):
    assert f"an optimizer other than {kind.__name__}" in Victim(kind).refuses(_saved(KFAC))
    assert "an optimizer other than KFAC" in Victim(KFAC).refuses(_saved(kind, structure="dense"))


MODELS = {
    "wider": nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
    "more classes": nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 4)),
    "deeper": nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3), nn.Linear(3, 3)),
    "without a bias": nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)),
    "without a norm": nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)),
    "with another norm": nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3)),
}


@pytest.mark.parametrize("model", MODELS)
def test_that_of_another_model(victim, model):
    message = victim.refuses(_saved(SINGD, MODELS[model], structure="dense"))
    assert "another model" in message or "same model" in message


def test_that_of_a_model_with_other_parameters_frozen(victim):
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    assert "frozen" in victim.refuses(_saved(SINGD, model, structure="dense"))


# --- Many changes at random -------------------------------------------------------------------------------


def _places(tree: Any, path: tuple = ()) -> list[tuple]:
    """The paths to all that a tree of dicts and lists holds."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in entries for place in _places(value, (*path, key)))]


def _damage(tree: dict, chance: random.Random) -> None:
    """Remove, replace or copy something anywhere."""
    places = _places(tree)[1:]
    *path, key = chance.choice(places)
    holder = tree
    for step in path:
        holder = holder[step]
    what = chance.choice(["remove", "replace", "copy"])
    if what == "remove":
        del holder[key]
    elif what == "replace":
        others = [None, -1, 3, 0.5, "text", [], {}, torch.ones(()), torch.ones(5), len, object()]
        holder[key] = chance.choice(others)
    else:
        source = tree
        for step in chance.choice(places):
            source = source[step]
        holder[key] = copy.deepcopy(source)


@pytest.mark.parametrize("seed", range(100))
def test_random_damage(seed):
    """What is accepted all the same is a checkpoint, and loaded as it is."""
    victim, chance = Victim(), random.Random(seed)
    damaged = victim.good
    for _ in range(chance.randint(1, 3)):
        _damage(damaged, chance)
    if victim.loads(damaged):
        train(victim.model, victim.optimizer, 2)

"""An optimizer that is given checkpoints it should refuse."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ingot import SINGD
from ingot.checkpoints import _KEPT
from tests.behaviour.training import assert_identical, backward, batches, held, train

_OWN = _KEPT | {"format"}
"""What stays that of the optimizer."""


class Victim:
    """An optimizer between a backward pass and its step, and a twin that nobody gives anything to."""

    def __init__(self, kind: type = SINGD, **settings: Any) -> None:
        self._runs = [_run(kind, settings) for _ in range(2)]
        self.model, self.optimizer = self._runs[0]
        self._good = copy.deepcopy(self.optimizer.state_dict())
        self._loads: list = []
        self.optimizer.register_load_state_dict_post_hook(self._loads.append)
        self._before = _all_of(self.optimizer)
        self.is_spoilt = False

    @property
    def good(self) -> dict:
        """A checkpoint to do damage to."""
        return copy.deepcopy(self._good)

    def refuses(self, state_dict: Any) -> str:
        """Whether a checkpoint is refused as one, with no change to anything; returns what was said."""
        self.is_spoilt = True
        with pytest.raises(ValueError, match="checkpoint") as refusal:
            self.optimizer.load_state_dict(state_dict)
        self.is_as_before()
        self.is_spoilt = False
        return str(refusal.value)

    def loads(self, state_dict: Any) -> bool:
        """Whether a checkpoint is loaded, all of it; otherwise it was refused."""
        given = copy.deepcopy(state_dict)
        try:
            self.optimizer.load_state_dict(state_dict)
        except ValueError as error:
            message = str(error)
        else:
            _assert_loaded(self.optimizer, given)
            return True
        assert "checkpoint" in message
        self.is_as_before()
        self.goes_on_like_its_twin()
        return False

    def is_as_before(self) -> None:
        """Whether all that can be seen is."""
        assert not self._loads
        now = _all_of(self.optimizer)
        assert now["settings"] == self._before["settings"]
        assert_identical(now["state"], self._before["state"])
        assert now["taps"] == self._before["taps"]

    def goes_on_like_its_twin(self) -> None:
        """Whether all that cannot be seen is as before, too."""
        ends = []
        for model, optimizer in self._runs:
            optimizer.step()  # with the statistics of the backward pass before
            ends.append(train(model, optimizer, 2, seed=5))
        assert_identical(*ends)


def _run(kind: type, settings: dict) -> tuple:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    optimizer = kind(model, **{"structure": "dense", "precond_every": 2, "precond_warmup": 2} | settings)
    train(model, optimizer, 4)
    optimizer.zero_grad()
    backward(model, next(batches(1, seed=3)))
    return model, optimizer


def _assert_loaded(optimizer: torch.optim.Optimizer, given: dict) -> None:
    found = optimizer.state_dict()
    for group, given_group in zip(found["param_groups"], given["param_groups"], strict=True):
        assert {k: group[k] for k in given_group if k not in _OWN} == {
            k: v for k, v in given_group.items() if k not in _OWN
        }
        for index, given_index in zip(group["params"], given_group["params"], strict=True):
            state = found["state"].get(index, {})
            for key, value in given["state"].get(given_index, {}).items():
                expected = torch.as_tensor(value).to(state[key].dtype)
                torch.testing.assert_close(state[key], expected, rtol=0, atol=0)


def _all_of(optimizer: torch.optim.Optimizer) -> dict:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    members = [list(map(id, group["params"])) for group in optimizer.param_groups]
    layers = optimizer._layers.values()
    return {
        "settings": copy.deepcopy((groups, members, optimizer.defaults)),
        "state": held(optimizer._watch.model, optimizer),
        "taps": [(tap.active, id(layer.pending)) for layer in layers for tap in layer.taps],
    }

"""Processes that run out of batches before others do, within torch's ``Join``.

Join is told what takes part, ``Join([model, optimizer])``, and has a process that is done answer the messages
of those that are not. For each of their forward passes it is told which layers' statistics are about to come,
and adds zeros to these. In the end it gets the state of those that went on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ingot.distributed import Group, Processes, all_processes, last_of, same_everywhere
from ingot.dividing import DividingOptimizer
from ingot.model import Layer


class JoinHook:
    """What a process does that is done, as Join asks for it."""

    def __init__(self, optimizer: JoiningOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Answer the messages of one forward and backward pass of the others."""
        self._optimizer._answer()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All are done: have the state of one of the last."""
        self._optimizer._take_state_of_the_last(is_last_joiner)


class JoiningOptimizer(DividingOptimizer):
    """What torch's ``Joinable`` has, and what Join needs to be told."""

    @property
    def join_device(self) -> torch.device:
        return next(iter(self._group_index)).device

    @property
    def join_process_group(self) -> Group:
        return self._now.replica_group or all_processes()

    def join_hook(self, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
        """For Join, which gives all that take part the same settings."""
        self._now.joining.is_mean_of_all = divide_by_initial_world_size
        return JoinHook(self)

    @property
    def _join_config(self) -> Any:
        return self._now.joining.config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        if config.enable and config.is_first_joinable:
            raise ValueError("Join is told first of the model: write Join([model, optimizer])")
        if config.enable and self._fisher == "separate":
            raise ValueError(
                "fisher='separate' has no place in Join, where all of an iteration's messages must be known "
                "in its forward pass: make the optimizer with fisher='empirical'"
            )
        self._now.joining.config, self._now.joining.of_replica = config, None

    # --- A process that goes on ---------------------------------------------------------------------------

    def _after_forward(self, replica: Any, output: Any) -> None:
        super()._after_forward(replica, output)
        joining, config = self._now.joining, replica._join_config
        if not config.enable:
            return
        joining.of_replica = joining.of_replica or config
        if not joining.is_on or joining.of_replica is not config:
            raise RuntimeError(
                "the model is in a Join that does not know of the optimizer, whose messages nobody would "
                "answer in a process that is done: write Join([model, optimizer])"
            )
        due = self._due_layers() if replica.require_backward_grad_sync else []
        joining.announced.append(self._announced(due, is_done=False))

    def _announced(self, due: list[Layer], is_done: bool) -> tuple[Tensor, list[Any]]:
        """A message on which layers' statistics will come, and how many processes go on."""
        numbers = [not is_done, *(layer in due for layer in self._layers.values())]
        flags = torch.tensor(numbers, dtype=torch.int32, device=self.join_device)
        return flags, self._now.replicas.sum_(flags)

    def _share_statistics(self) -> None:
        joining = self._now.joining
        if joining.is_on and self._now.replicas is not None:
            if self._due_layers() and not joining.announced:
                raise RuntimeError(
                    "the model's forward pass was not seen, as where it is compiled, so that processes that "
                    "are done were not told of it: leave Join or torch.compile out"
                )
            for flags, works in joining.announced:
                for work in works:
                    work.wait()
                if not joining.is_mean_of_all:
                    for exchange in self._now.exchanges:
                        exchange.processes = exchange.processes._replace(averaged=int(flags[0]))
            joining.announced.clear()
        super()._share_statistics()

    def _by_processes(self, layers: list[Layer]) -> dict[Processes | None, list[Layer]]:
        if self._now.joining.is_on:
            return {None: layers}  # those that are done do not work any more
        return super()._by_processes(layers)

    # --- A process that is done ---------------------------------------------------------------------------

    def _answer(self) -> None:
        self._know_replicas(self.join_process_group)
        flags, works = self._announced([], is_done=True)
        for work in works:
            work.wait()
        due = [layer for layer, flag in zip(self._layers.values(), flags.tolist()[1:], strict=True) if flag]
        if due:
            self._forget_statistics()
            self._exchange(due, self._now.replicas).end()

    def _take_state_of_the_last(self, is_last: bool) -> None:
        if self._now.replicas is None:  # nobody had a batch
            return
        (group,) = self._now.replicas.groups
        states = [self.state.get(p, {}) for p in self._group_index]
        devices = [p.device for p in self._group_index]
        found = same_everywhere(states, devices, last_of(is_last, group, self.join_device), group)
        for p, state in zip(self._group_index, found, strict=True):
            self.state[p] = state
        self._forget_statistics()
        self._refresh()

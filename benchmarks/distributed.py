"""What several processes send each other, how long steps take, and what that comes to in large clusters.

``make distributed``, with PROCESSES=4 for four, prints the tables of the page docs/distributed.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import GPT
from ingot import SINGD
from ingot.lab.tables import markdown_table
from ingot.planning import plan

EVERY = 20
STRUCTURES = ("diagonal", "block_diagonal(32)", "dense")
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SENT = {"all_reduce": 0, ALL_GATHER: 1, "all_to_all_single": 1}
"""Messages, and which argument of each is what a process sends."""


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """The optimizer's messages within, by name: how many, and how many bytes this process sends."""
    found: dict[str, list[int]] = {}
    before = {name: getattr(dist, name) for name in SENT}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            of = found.setdefault(name, [0, 0])
            of[0] += 1
            of[1] += args[SENT[name]].nbytes
            return before[name](*args, **kwargs)

        return call

    try:
        for name in SENT:
            setattr(dist, name, counting(name))
        yield found
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


class Trained:
    """A small GPT with an optimizer, as a replica or in shards."""

    def __init__(self, kind: str, make: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(0)
        self.model = GPT(d=128, depth=2, length=64)
        self.called: nn.Module = self.model
        self.weights = sum(p.nbytes for p in self.model.parameters())
        if kind == "FSDP2":
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        elif dist.get_world_size() > 1:
            self.called = DistributedDataParallel(self.model)
        self.optimizer = make(self.model)

    def step(self) -> tuple[float, dict[str, list[int]]]:
        tokens = torch.randint(0, 65, (8, 64))
        began = time.perf_counter()
        self.optimizer.zero_grad()
        with counted() as sent:
            nn.functional.cross_entropy(self.called(tokens).flatten(0, 1), tokens.flatten()).backward()
            self.optimizer.step()
        return time.perf_counter() - began, sent


def measured(kind: str) -> list[list[str]]:
    """Rows of messages and bytes at steps with and without an update, and of times beside AdamW's."""
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4)
    }
    settings: dict[str, Any] = {"lr": 1e-4, "precond_every": EVERY, "precond_warmup": 0}
    for structure in STRUCTURES:
        makers[structure] = partial(SINGD, structure=structure, loss_average="token", **settings)
    trained = {name: Trained(kind, make) for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in trained}
    sent: dict[str, list[dict[str, list[int]]]] = {name: [] for name in trained}
    for _ in range(2 * EVERY + 1):
        for name, one in trained.items():  # interleaved, so that all have the same machine
            seconds, messages = one.step()
            times[name].append(seconds)
            sent[name].append(messages)
    rows = []
    for name, one in trained.items():
        plain, update = (_summed(sent[name][index]) for index in (EVERY + 1, 2 * EVERY))
        usual = median(b / a for a, b in zip(times["AdamW"][1:], times[name][1:], strict=True))
        rows.append([kind, name, _text(plain, one.weights), _text(update, one.weights), f"{usual:.2f}"])
    return rows


def _summed(messages: dict[str, list[int]]) -> tuple[int, int]:
    return sum(n for n, _ in messages.values()), sum(size for _, size in messages.values())


def _text(found: tuple[int, int], weights: int) -> str:
    messages, size = found
    return f"{messages}, {size / weights:.3f}" if messages else "0"


# --- Large clusters, on paper -------------------------------------------------------------------------------

SHAPES = {
    "GPT-2 XL": (48, [(1600, 4800), (1600, 1600), (1600, 6400), (6400, 1600)]),
    "Llama-7B": (32, [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]),
}
"""Numbers of blocks, and inputs and outputs of the linear layers of each."""


def constants() -> tuple[float, float]:
    """Seconds for a message, and for each of its bytes, of an all-reduce here."""
    found = []
    for size in (1, 1 << 22):
        tensor = torch.ones(size)
        each = []
        for _ in range(8):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            each.append(time.perf_counter() - began)
        found.append(median(each))
    return found[0], (found[1] - found[0]) / (4 << 22)


def simulated(latency: float, per_byte: float) -> list[list[str]]:
    """What a ring of so many processes takes for the gradients, and for the statistics beside them."""
    rows = []
    for name, (depth, layers) in SHAPES.items():
        with torch.device("meta"):
            blocks = nn.Sequential(*(nn.Linear(i, o) for i, o in layers))
        weights = 4 * depth * sum(i * o for i, o in layers)
        for structure in STRUCTURES:
            factors = depth * sum(
                row.state_bytes
                for row in plan(blocks, structure=structure, momentum=0.0, cache_products=False).rows
            )
            for processes in (8, 64, 1024):
                gradients = _ring(weights, processes, latency, per_byte)
                statistics = _ring(factors, processes, latency, per_byte) / EVERY
                share = f"{statistics / gradients:.4f}"
                rows.append(
                    [name, structure, str(processes), f"{gradients:.2f} s", f"{statistics:.4f} s", share]
                )
    return rows


def _ring(size: int, processes: int, latency: float, per_byte: float) -> float:
    """An all-reduce in a ring sends all but one part twice; latency grows with the number of steps."""
    return 2 * (processes - 1) * (latency / 2 + size / processes * per_byte / 2)


def main() -> None:
    """Measure, and print tables."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [*measured("DDP"), *measured("FSDP2")]
    latency, per_byte = constants()
    if dist.get_rank() == 0:
        columns = ["", "optimizer", "messages, bytes / weights", "at an update", "iteration / AdamW"]
        print(f"{dist.get_world_size()} processes\n\n{markdown_table(columns, rows)}\n")
        print(f"A message takes {1e3 * latency:.2f} ms and {1e9 * per_byte:.2f} ns for each byte.\n")
        columns = ["model", "structure", "processes", "gradients", "statistics, a step", "share"]
        print(markdown_table(columns, simulated(latency, per_byte)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

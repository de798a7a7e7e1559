"""How time and memory grow with the dimension d of a square layer, for each structure.

Times are those of the optimizer's step, and of functions that it calls. Memory is that of the optimizer while
it trains a layer with d inputs and few outputs: whatever has d x d entries there is a factor's doing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import ingot
from benchmarks import memory
from benchmarks.complexity import KINDS, PAPER
from benchmarks.contenders import LR
from benchmarks.measured import Scaling
from benchmarks.workloads import Batch
from ingot.rules import Curvature, Factor, curvature, ingd, move
from ingot.structures import bind, parse

DIMS = (512, 724, 1024, 1448, 2048, 2896, 4096)
REPEATS = 3

ROWS = {"diagonal": 512, "rank_triu(1)": 1024, "hierarchical(15,15)": 512}
MANY_ROWS = 256
LAYERS = {
    "diagonal": 384,
    "dense": 1,
    "block_diagonal(30)": 8,
    "hierarchical(15,15)": 16,
    "rank_triu(1)": 256,
}
MANY_LAYERS = 128
"""Rows of a batch, and layers whose factors are updated in one go, for each structure and else.

A single diagonal has only d numbers, and its time would be that of starting operations, whatever d is. These
are enough for the work on numbers to outweigh that, and few enough for the processor's caches; composed
structures start more operations and need more.
"""

SGD = "SGD"

SHORTEST = 0.005
"""Seconds that a measurement takes at least, by repeating what is shorter."""

OUTPUTS, BATCH = 8, 16

Work: TypeAlias = Callable[[], object]


def works(structure: str, d: int, rows: int | None = None) -> dict[str, Work]:
    """What is timed, by its kind. Factors are the identity and a little noise, so that nothing explodes."""
    s = bind(parse(structure), d)
    one = s.identity()
    layers = LAYERS.get(structure, MANY_LAYERS)
    factor = Factor(s, _noisy(one))
    many, h = Factor(s, _noisy(one.expand(layers, -1))), Curvature(_noisy(one.expand(layers, -1)))
    batch = torch.randn(rows or ROWS.get(structure, MANY_ROWS), d)

    def update_both() -> object:
        m_k, m_c = ingd(many, many, h, h, 1e-3)
        return move(many, m_k, 1e-3), move(many, m_c, 1e-3)

    found: dict[str, Work] = {
        "gradient": plain_step(structure, d),
        "statistics": lambda: _statistics(factor, batch.mT),
        "factors": update_both,
    }
    return {kind: found[kind] for kind in KINDS}


def _statistics(factor: Factor, x: Tensor) -> Tensor:
    s, entries = factor
    return s.sandwich(entries, s.gram(x)) if s.gram_first(x.shape[-1]) else curvature(factor, x)


def _noisy(entries: Tensor) -> Tensor:
    return entries + 1e-4 * torch.randn_like(entries)


def plain_step(structure: str, d: int) -> Work:
    """The optimizer's step of a d x d layer while the factors stay as they are."""
    layer = nn.Linear(d, d, bias=False)
    settings: dict[str, Any] = {"lr": LR, "precond_every": 10, "precond_warmup": 0}
    optimizer = ingot.SINGD(layer, structure=structure, **settings)
    layer(torch.randn(BATCH, d)).square().mean().backward()
    optimizer.step()  # the only one with an update
    return optimizer.step


def sgd_step(d: int) -> Work:
    """The step of SGD with momentum, which touches each entry a fixed number of times, whatever d is."""
    layer = nn.Linear(d, d, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=LR, momentum=0.9)
    layer(torch.randn(BATCH, d)).square().mean().backward()
    return optimizer.step


def seconds(work: Work) -> float:
    """The time of one execution, as the mean over enough of them."""
    start, count = perf_counter(), 0
    while not count or perf_counter() - start < SHORTEST:
        work()
        count += 1
    return (perf_counter() - start) / count


def measure(
    dims: Sequence[int] = DIMS, repeats: int = REPEATS, progress: Callable[[str], None] = lambda _: None
) -> Scaling:
    """All structures, kinds and dimensions in turns; the fastest of some repeats, since noise only adds."""
    torch.manual_seed(0)
    cases = [(structure, d) for structure in PAPER for d in dims]
    cases += [(SGD, d) for d in dims]
    best: dict[tuple[str, str, int], float] = {}
    for number in range(repeats):
        progress(f"repeat {number + 1} of {repeats}")
        random.Random(number).shuffle(cases)
        for structure, d in cases:
            found = {SGD: sgd_step(d)} if structure == SGD else works(structure, d)
            for kind, work in found.items():
                if not number:
                    work()  # caches and plans of a first time are nobody's
                key = kind, structure, d
                best[key] = min(seconds(work), best.get(key, float("inf")))
    progress("memory")
    used = {structure: [layer_memory(structure, d) for d in dims] for structure in PAPER}
    return Scaling(
        dims=list(dims),
        seconds={kind: {s: [best[kind, s, d] for d in dims] for s in PAPER} for kind in KINDS},
        largest_bytes={s: [largest for largest, _ in points] for s, points in used.items()},
        state_bytes={s: [state for _, state in points] for s, points in used.items()},
        sgd_seconds=[best[SGD, SGD, d] for d in dims],
    )


def layer_memory(structure: str, d: int) -> tuple[int, int]:
    """Bytes of the largest single allocation in a training step with a factor update, and of the state."""

    def batch() -> Batch:
        return torch.randn(BATCH, d), torch.randint(OUTPUTS, (BATCH,))

    # A dense factor for the few outputs is small whatever d is: all that grows belongs to the inputs.
    make = partial(ingot.SINGD, structure=(structure, "dense"), precond_every=2, precond_warmup=0)
    model = partial(nn.Linear, d, OUTPUTS, bias=False)
    spans = memory.training(model, batch, make)
    return spans["update"].largest, memory.kept_bytes(spans)

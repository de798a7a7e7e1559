"""Two ways to the same result, measured in turns, so that their ratio holds on a noisy machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.measured import PathResult

ROUNDS = 9
SHORTEST = 0.004  # seconds of a turn at least
TOLERANCE = 1e-4

Way: TypeAlias = Callable[[], Tensor]
Ways: TypeAlias = tuple[Way, Way]
Shape: TypeAlias = Mapping[str, int]


@dataclass(frozen=True)
class FastPath:
    """A fast path.

    Attributes:
        name: What the fast way does.
        replaces: What the plain way does.
        build: Makes both ways, the plain one first, for a shape. Each call does the work once and returns
            what came out; ways that change something in place have copies of their own.
        shapes: Where it is measured.
    """

    name: str
    replaces: str
    build: Callable[..., Ways]
    shapes: Sequence[Shape]


def measure(
    paths: Sequence[FastPath], rounds: int = ROUNDS, progress: Callable[[str], None] = lambda _: None
) -> list[PathResult]:
    found = []
    for path in paths:
        progress(path.name)
        found += [_measured(path, shape, rounds) for shape in path.shapes]
    return found


def _measured(path: FastPath, shape: Shape, rounds: int) -> PathResult:
    torch.manual_seed(0)
    plain, fast = path.build(**shape)
    error = relative_error(fast(), plain())
    text = ", ".join(f"{name} = {value}" for name, value in shape.items())
    if not error <= TOLERANCE:
        raise ValueError(f"{path.name} ({text}) differs from {path.replaces} by {error:.1e}")
    count = _repetitions(plain)
    speedups = [_seconds(plain, count) / _seconds(fast, count) for _ in range(rounds)]
    return PathResult(path.name, path.replaces, text, speedups, error)


def relative_error(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def _repetitions(way: Way) -> int:
    once = median(_seconds(way, 1) for _ in range(3))
    return max(1, round(SHORTEST / once))


def _seconds(way: Way, count: int) -> float:
    start = perf_counter()
    for _ in range(count):
        way()
    return perf_counter() - start

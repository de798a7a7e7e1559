"""What was measured: the records, their ratios, and the file that keeps them."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

import torch

import ingot
from benchmarks.contenders import TIME_REFERENCE, peer_versions

# --- Times ------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """A median, and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high)


@dataclass(frozen=True)
class Kinds:
    """Mean milliseconds in each round: of steps with an update of the factors, and of those without."""

    update: list[float]
    plain: list[float]  # empty where every step is an update, or nobody can tell

    def at(self, every: int | None) -> list[float]:
        """The mean over whole intervals of so many steps."""
        if every in (None, 1) or not self.plain:
            return self.update
        return [
            (update + (every - 1) * plain) / every
            for update, plain in zip(self.update, self.plain, strict=True)
        ]


@dataclass(frozen=True)
class Timing:
    """What one optimizer took with one model, at one interval T between updates of its factors."""

    title: str
    package: str
    structure: str
    every: int | None
    iteration: Kinds
    step: Kinds
    state_bytes: int
    finite: bool

    @property
    def name(self) -> str:
        return self.title if self.every is None else f"{self.title}, T={self.every}"

    def iterations(self) -> list[float]:
        return self.iteration.at(self.every)

    def steps(self) -> list[float]:
        return self.step.at(self.every)


def ratio(mine: Sequence[float], reference: Sequence[float]) -> Spread | None:
    """Round by round, as far as both took part."""
    pairs = list(zip(mine, reference, strict=False))
    return spread([a / b for a, b in pairs]) if pairs else None


@dataclass
class Times:
    """All timings of one model."""

    title: str
    timings: list[Timing]

    def find(self, title_or_package: str, structure: str = "", every: int | None = None) -> Timing | None:
        """An optimizer by its title, or by package and structure, at an interval if it has one."""
        for timing in self.timings:
            known = title_or_package in (timing.title, timing.package)
            if known and timing.structure == structure and timing.every in (every, None):
                return timing
        return None

    @property
    def reference(self) -> Timing:
        found = self.find(TIME_REFERENCE)
        assert found is not None, "every measurement has SGD in it"
        return found


# --- Memory, scaling, fast paths --------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes."""

    state: int  # kept by the optimizer from step to step
    peak: int  # of an iteration: weights, gradients, activations, state and all
    update_peak: int  # of an iteration that updates the factors, too


@dataclass
class Scaling:
    """Seconds and bytes by the dimension: ``seconds[kind][structure]`` has one entry for each of ``dims``."""

    dims: list[int]
    seconds: dict[str, dict[str, list[float]]]
    largest_bytes: dict[str, list[int]]
    state_bytes: dict[str, list[int]]
    sgd_seconds: list[float]  # of SGD's step with the same layer


@dataclass(frozen=True)
class PathResult:
    """One fast path at one shape: how many times as fast it is, round by round."""

    name: str
    replaces: str
    shape: str
    speedups: list[float]
    error: float


# --- All together -----------------------------------------------------------------------------------------


@dataclass
class Results:
    """A whole run; a part that was not measured is empty."""

    conditions: dict[str, Any] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)
    alone: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # milliseconds by model and title
    memory: dict[str, dict[str, Memory]] = field(default_factory=dict)
    scaling: Scaling | None = None
    fast_paths: list[PathResult] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = asdict(self)
        content["memory"] = {
            model: {title: memory._asdict() for title, memory in found.items()}
            for model, found in self.memory.items()
        }
        path.write_text(json.dumps(_rounded(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Results:
        content = json.loads(path.read_text("utf-8"))
        return cls(
            conditions=content["conditions"],
            times={
                model: Times(found["title"], [_timing(one) for one in found["timings"]])
                for model, found in content["times"].items()
            },
            alone=content.get("alone", {}),
            memory={
                model: {title: Memory(**memory) for title, memory in found.items()}
                for model, found in content["memory"].items()
            },
            scaling=Scaling(**content["scaling"]) if content["scaling"] else None,
            fast_paths=[PathResult(**one) for one in content["fast_paths"]],
        )


def _timing(content: dict[str, Any]) -> Timing:
    kinds: dict[str, Any] = {kind: Kinds(**content.pop(kind)) for kind in ("iteration", "step")}
    return Timing(**content, **kinds)


def _rounded(value: Any) -> Any:
    """Numbers with the digits that may mean something, so that the file can be read."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def conditions(threads: int) -> dict[str, Any]:
    """Where and when it was measured, with which versions."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "processor": processor(),
        "cores": len(_cores()),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ingot": ingot.__version__,
        "peers": peer_versions(),
    }


def processor() -> str:
    """The processor's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def _cores() -> set[int]:
    import os

    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return affinity(0) if affinity else set(range(os.cpu_count() or 1))


def mean(values: Sequence[float]) -> list[float]:
    """The mean as a list, which is empty where there is nothing to average."""
    return [fmean(values)] if values else []

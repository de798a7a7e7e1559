"""What ingot promises of its speed and memory, and whether a run keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TypeAlias

from benchmarks.complexity import KINDS, PAPER, expected_exponent, exponent
from benchmarks.contenders import DEFAULT_EVERY, DEFAULTS, OFFICIAL_NAMES, STATE_REFERENCE, TIME_REFERENCE
from benchmarks.measured import Results, Spread, Timing, ratio, spread
from ingot import SINGD

Measure: TypeAlias = Callable[[Results], Spread | None]


@dataclass(frozen=True)
class Target:
    """A promise: what is measured, for which model (or all), and the bound that it is to keep."""

    structure: str
    claim: str
    model: str
    limit: float
    at_least: bool
    measure: Measure


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured, None if nothing was; the median decides whether it was reached."""

    target: Target
    measured: Spread | None

    @property
    def reached(self) -> bool | None:
        if self.measured is None:
            return None
        value, limit = self.measured.median, self.target.limit
        return value >= limit if self.target.at_least else value <= limit


def verdicts(results: Results) -> list[Verdict]:
    return [Verdict(target, target.measure(results)) for target in targets()]


def targets() -> list[Target]:
    return [*_speed(), *_never_slower(), *_memory(), *_growth()]


# --- The table of targets ---------------------------------------------------------------------------------

MODELS = ("mlp", "vgg", "vit", "gpt")
Limits: TypeAlias = float | Mapping[str, float]  # for all models, or for those that are named

STEP_AT_10: Mapping[str, Limits] = {
    "diagonal": 2.5,
    "block_diagonal(30)": 2.0,
    "hierarchical(15,15)": 1.8,
    "tril_toeplitz": 70.0,
    "triu_toeplitz": 70.0,
}
"""Official step time / ingot's, at T = 10."""

PLAIN_STEP: Mapping[str, Limits] = {"dense": 1.8}
"""Official step time / ingot's, of steps that leave the factors as they are."""

ITERATION_AT_1: Mapping[str, Limits] = {
    "diagonal": {"mlp": 1.3, "vgg": 1.5},
    "block_diagonal(30)": 1.4,
    "hierarchical(15,15)": 1.5,
    "dense": 1.05,
    "tril_toeplitz": 30.0,
    "triu_toeplitz": 30.0,
}
"""Official iteration time / ingot's, at T = 1."""

ITERATION_AT_10: Mapping[str, Limits] = {
    "diagonal": 1.03,
    "block_diagonal(30)": {"mlp": 1.4, "vgg": 1.2, "gpt": 1.05},
    "hierarchical(15,15)": {"mlp": 1.6, "vgg": 1.2, "gpt": 1.07},
    "dense": {"mlp": 4.8, "vgg": 2.4, "gpt": 1.65},
    "tril_toeplitz": {"mlp": 4.2, "vgg": 1.5, "gpt": 1.35},
    "triu_toeplitz": {"mlp": 4.2, "vgg": 1.5, "gpt": 1.35},
}
"""Ingot's iteration time / SGD's, at T = 10."""

DEFAULTS_BESIDE_ADAMW = 1.15
"""Iteration time of SINGD as it comes / AdamW's."""

STATE_OF_ADAMW = 0.55
PEAK_OF_ADAMW = 1.02
EXPONENT_TOLERANCE = 0.2
LARGEST_ALLOCATION = 0.25  # of a d x d matrix, which even in half precision is twice as much


# --- What is measured -------------------------------------------------------------------------------------

Part: TypeAlias = Callable[[Timing], list[float]]


def step(timing: Timing) -> list[float]:
    return timing.steps()


def plain_step(timing: Timing) -> list[float]:
    return timing.step.plain


def update_step(timing: Timing) -> list[float]:
    return timing.step.update


def iteration(timing: Timing) -> list[float]:
    return timing.iterations()


def speedup(results: Results, model: str, structure: str, every: int, part: Part) -> Spread | None:
    """How many times as long the official package takes."""
    if model not in results.times:
        return None
    find = results.times[model].find
    ours, official = find("ingot", structure, every), find("singd", structure, every)
    return ratio(part(official), part(ours)) if ours and official else None


def iteration_beside(
    results: Results, model: str, structure: str, reference: str, package: str = "ingot", every: int = 10
) -> Spread | None:
    """Ingot's iteration time in units of a first-order optimizer's."""
    if model not in results.times:
        return None
    find = results.times[model].find
    ours, other = find(package, structure, every), find(reference)
    return ratio(ours.iterations(), other.iterations()) if ours and other else None


def defaults_beside_adamw(results: Results, model: str) -> Spread | None:
    """Iteration time of SINGD as it comes in units of AdamW's, in turns with all others."""
    of = (SINGD.default_structure, STATE_REFERENCE, "ingot, defaults", DEFAULT_EVERY)
    return iteration_beside(results, model, *of)


def alone_beside_adamw(results: Results, model: str) -> Spread | None:
    """The same where each has a process of its own."""
    found = results.alone.get(model, {})
    return ratio(found[DEFAULTS], found[STATE_REFERENCE]) if DEFAULTS in found else None


def memory_beside_adamw(results: Results, model: str, structure: str, field: str) -> Spread | None:
    found = results.memory.get(model, {})
    ours, adamw = found.get(f"ingot SINGD {structure}"), found.get(STATE_REFERENCE)
    return spread([getattr(ours, field) / getattr(adamw, field)]) if ours and adamw else None


def exponent_gap(results: Results, structure: str, kind: str) -> Spread | None:
    """How far the fitted exponent is from that of the paper's formula."""
    scaling = results.scaling
    if scaling is None:
        return None
    fitted = exponent(scaling.dims, scaling.seconds[kind][structure])
    return spread([abs(fitted - expected_exponent(scaling.dims, PAPER[structure][kind]))])


def largest_allocation(results: Results, structure: str) -> Spread | None:
    """In units of a d x d matrix, at the d where that is most."""
    scaling = results.scaling
    if scaling is None:
        return None
    points = zip(scaling.largest_bytes[structure], scaling.dims, strict=True)
    return spread([max(size / (4 * d * d) for size, d in points)])


# --- Targets of it ----------------------------------------------------------------------------------------


def _speed() -> Iterator[Target]:
    tables: tuple[tuple[str, Mapping[str, Limits], int, Part], ...] = (
        ("step at T=10, official / ingot", STEP_AT_10, 10, step),
        ("step without update, official / ingot", PLAIN_STEP, 10, plain_step),
        ("iteration at T=1, official / ingot", ITERATION_AT_1, 1, iteration),
    )
    for claim, table, every, part in tables:
        for structure, model, limit in _entries(table):
            measure = partial(speedup, model=model, structure=structure, every=every, part=part)
            yield Target(structure, claim, model, limit, True, measure)
    for structure, model, limit in _entries(ITERATION_AT_10):
        measure = partial(iteration_beside, model=model, structure=structure, reference=TIME_REFERENCE)
        yield Target(structure, "iteration at T=10, ingot / SGD", model, limit, False, measure)
    for model in MODELS:
        measure = partial(iteration_beside, model=model, structure="diagonal", reference=STATE_REFERENCE)
        yield Target("diagonal", "iteration at T=10, ingot / AdamW", model, 1.0, False, measure)
        for measure_defaults, where in (
            (defaults_beside_adamw, ""),
            (alone_beside_adamw, ", each in a process of its own"),
        ):
            claim = f"iteration at T={DEFAULT_EVERY}, defaults / AdamW{where}"
            measure = partial(measure_defaults, model=model)
            yield Target(SINGD.default_structure, claim, model, DEFAULTS_BESIDE_ADAMW, False, measure)


def _never_slower() -> Iterator[Target]:
    """The official package is no faster with any structure and model, at any T."""
    for structure, (name, part), every, model in product(
        OFFICIAL_NAMES, (("step", step), ("iteration", iteration)), (1, 10), MODELS
    ):
        claim = f"{name} at T={every}, official / ingot: never slower"
        measure = partial(speedup, model=model, structure=structure, every=every, part=part)
        yield Target(structure, claim, model, 1.0, True, measure)


def _memory() -> Iterator[Target]:
    for field, claim, limit in (
        ("state", "state, ingot / AdamW", STATE_OF_ADAMW),
        ("peak", "peak memory in training, ingot / AdamW", PEAK_OF_ADAMW),
        ("update_peak", "peak memory at updates, ingot / AdamW", PEAK_OF_ADAMW),
    ):
        for model in MODELS:
            measure = partial(memory_beside_adamw, model=model, structure="diagonal", field=field)
            yield Target("diagonal", claim, model, limit, False, measure)


def _growth() -> Iterator[Target]:
    for structure in PAPER:
        for kind in KINDS:
            measure = partial(exponent_gap, structure=structure, kind=kind)
            claim = f"exponent of time ({kind}), difference to the paper's"
            yield Target(structure, claim, "", EXPONENT_TOLERANCE, False, measure)
        if structure != "dense":
            measure = partial(largest_allocation, structure=structure)
            claim = "largest allocation in training, in d x d matrices"
            yield Target(structure, claim, "", LARGEST_ALLOCATION, False, measure)


def _entries(table: Mapping[str, Limits]) -> Iterator[tuple[str, str, float]]:
    for structure, limits in table.items():
        of_models = limits if isinstance(limits, Mapping) else dict.fromkeys(MODELS, limits)
        for model, limit in of_models.items():
            yield structure, model, limit

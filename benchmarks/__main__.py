"""Command line: measure, keep what was measured, and write the page of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import alone, fast_paths, memory, report, scaling, side_by_side, timing
from benchmarks.contenders import contenders
from benchmarks.measured import Results, conditions
from benchmarks.workloads import WORKLOADS

DESCRIPTION = "What ingot's optimizers cost beside their peers. All take turns in one process."


def measure_times(results: Results, chosen: argparse.Namespace) -> None:
    for name in chosen.models:
        workload = WORKLOADS[name]
        taking_part = contenders(chosen.every, workload.per_token, chosen.only)
        rounds = chosen.rounds or workload.rounds
        results.times[name] = timing.measure(workload, taking_part, rounds, progress(name))
        results.save(chosen.out / "results.json")


def measure_alone(results: Results, chosen: argparse.Namespace) -> None:
    for name in chosen.models:
        rounds = chosen.rounds or alone.ROUNDS
        results.alone[name] = alone.measure(name, rounds, chosen.threads, progress(f"{name}, alone"))


def measure_memory(results: Results, chosen: argparse.Namespace) -> None:
    for name in chosen.models:
        workload, tell = WORKLOADS[name], progress(f"{name}, memory")
        found = results.memory[name] = {}
        for contender in contenders((2,), workload.per_token, chosen.only):
            if contender.slow or "," in contender.title:  # whose memory is that of the others
                continue
            tell(contender.title)
            torch.manual_seed(0)
            splits = contender.splits or contender.every is None
            found[contender.title] = memory.measure(
                workload.model, workload.batch, contender.make, splits=splits
            )


def measure_scaling(results: Results, chosen: argparse.Namespace) -> None:
    results.scaling = scaling.measure(chosen.dims, chosen.rounds or scaling.REPEATS, progress("scaling"))


def measure_fast_paths(results: Results, chosen: argparse.Namespace) -> None:
    rounds = chosen.rounds or side_by_side.ROUNDS
    results.fast_paths = side_by_side.measure(fast_paths.PATHS, rounds, progress("fast paths"))


PARTS: Mapping[str, Callable[[Results, argparse.Namespace], None]] = {
    "times": measure_times,
    "alone": measure_alone,
    "memory": measure_memory,
    "scaling": measure_scaling,
    "fast-paths": measure_fast_paths,
}


def progress(what: str) -> Callable[[str], None]:
    return partial(print, f"{what}:", file=sys.stderr, flush=True)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too few: give 1 or more")
    return value


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=DESCRIPTION)
    names = list(WORKLOADS)
    parser.add_argument(
        "part",
        choices=[*PARTS, "all", "render"],
        help="what to measure; 'render' measures nothing and makes the page of stored results again",
    )
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="default: all of them")
    parser.add_argument("--only", nargs="+", default=[], help="optimizers whose name has one of these texts")
    parser.add_argument(
        "--every", nargs="+", type=positive, default=[1, 10], help="steps between factor updates"
    )
    parser.add_argument("--dims", nargs="+", type=positive, default=list(scaling.DIMS), help="of the scaling")
    parser.add_argument("--rounds", type=positive, help="default: more for faster models")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="directory for the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    stored = chosen.out / "results.json"
    if chosen.part != "render":
        torch.set_num_threads(chosen.threads)
        results = Results(conditions(chosen.threads))
        for part in PARTS if chosen.part == "all" else [chosen.part]:
            PARTS[part](results, chosen)
            results.save(stored)  # so that what follows cannot lose it
    results = Results.load(stored)  # so that measuring and rendering later make the same page
    print(report.write(results, chosen.out))


if __name__ == "__main__":
    main()

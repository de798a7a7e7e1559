"""Iteration times of optimizers that have a process each, as they have in a training script.

In one process all share the C library's memory, which soon keeps as much as the greediest of them asks for.
By itself an optimizer may give memory back and ask for it again at every step, and each page of it takes
time. Processes take turns, and times are divided by those of the same round.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from statistics import fmean, median

import torch

from benchmarks.contenders import DEFAULT_EVERY, DEFAULTS, STATE_REFERENCE, Contender, contenders
from benchmarks.timing import prepare
from benchmarks.workloads import WORKLOADS

TITLES = (STATE_REFERENCE, "AdamW fused", DEFAULTS, "ingot SINGD diagonal")
"""Who takes part."""

INTERVALS = {"mlp": 12, "vgg": 6, "vit": 2, "gpt": 1}
"""Of so many intervals between factor updates the median counts, position by position."""

ROUNDS = 3
"""How often each has its turn unless told otherwise."""


def contender(name: str, title: str) -> Contender:
    """One of those who take part, at the default interval between updates if it has one."""
    found = contenders((DEFAULT_EVERY,), WORKLOADS[name].per_token)
    return next(one for one in found if one.title == title)


def iteration(name: str, title: str, intervals: int) -> float:
    """Milliseconds of an iteration in this process, after a warm-up of two intervals."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    batches = [workload.batch() for _ in range(4)]
    contestant = prepare(workload.model(), contender(name, title), batches)
    contestant.train(2 * DEFAULT_EVERY - len(contestant.iteration))
    contestant.iteration.clear()
    contestant.train(intervals * DEFAULT_EVERY)
    seconds = [contestant.iteration[position::DEFAULT_EVERY] for position in range(DEFAULT_EVERY)]
    return 1e3 * fmean(median(of_position) for of_position in seconds)


def measure(
    name: str, rounds: int, threads: int, tell: Callable[[str], None], intervals: int | None = None
) -> dict[str, list[float]]:
    """Milliseconds of an iteration by optimizer, round by round."""
    found: dict[str, list[float]] = {title: [] for title in TITLES}
    for number in range(rounds):
        for title in random.Random(number).sample(TITLES, len(TITLES)):
            tell(f"round {number + 1} of {rounds}: {title}")
            found[title].append(_in_a_process(name, title, threads, intervals or INTERVALS[name]))
    return found


def _in_a_process(name: str, title: str, threads: int, intervals: int) -> float:
    command = [sys.executable, "-m", "benchmarks.alone", name, title, str(threads), str(intervals)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alone", description=__doc__)
    parser.add_argument("model", choices=WORKLOADS)
    parser.add_argument("title", choices=TITLES)
    parser.add_argument("threads", type=int)
    parser.add_argument("intervals", type=int)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    print(iteration(chosen.model, chosen.title, chosen.intervals))


if __name__ == "__main__":
    main()

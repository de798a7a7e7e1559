"""Times of iterations and steps, all optimizers taking turns in one process.

Machines are noisy, so nothing here is an absolute time. Each optimizer trains its own copy of one model, they
take turns in changing order, and every time is later divided by another one of the same round.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from math import isfinite, lcm
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.contenders import Contender, Steps
from benchmarks.measured import Kinds, Times, Timing, mean
from benchmarks.workloads import Batch, Workload, training_loss

MIN_WINDOW = 10

Progress = Callable[[str], None]


@dataclass
class Contestant:
    """An optimizer on its own copy of the model, and the seconds of its iterations so far."""

    contender: Contender
    model: nn.Module
    optimizer: Steps
    batches: Iterator[Batch]
    state_bytes: int = 0
    iteration: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    loss: float = float("nan")
    failed: bool = False

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            batch = next(self.batches)
            start = perf_counter()
            loss = training_loss(self.model, batch)
            loss.backward()
            before_step = perf_counter()
            self.optimizer.step()
            after_step = perf_counter()
            self.optimizer.zero_grad()
            self.iteration.append(perf_counter() - start)
            self.step.append(after_step - before_step)
            self.loss = loss.item()

    def per_round(self, window: int) -> int:
        """How many iterations it takes in a round in which it takes part."""
        return (self.contender.every or 1) if self.contender.slow else window

    def kinds(self, seconds: Sequence[float], window: int) -> Kinds:
        """Milliseconds with and without an update, as means over each round that it took part in."""
        length = self.per_round(window)
        update, plain = [], []
        for start in range(self.contender.warmup, len(seconds), length):
            numbered = [(i, 1e3 * seconds[i]) for i in range(start, start + length)]
            every = self.contender.every if self.contender.splits and self.contender.every else 1
            update += mean([time for i, time in numbered if i % every == 0])
            plain += mean([time for i, time in numbered if i % every != 0])
        return Kinds(update, plain)


def prepare(model: nn.Module, contender: Contender, batches: Sequence[Batch]) -> Contestant:
    """An optimizer after its first steps. Its state is every tensor born meanwhile that is still alive.

    So caches and buffers count, wherever they are kept; each storage counts once, the model's own does not.
    """
    gc.freeze()  # hides what exists from get_objects
    contestant = Contestant(contender, model, contender.make(model), cycle(batches))
    contestant.train(contender.warmup)
    gc.collect()
    # Not by isinstance, which would ask proxies for their class, and make some of them load their module.
    # Other classes of tensors are the compiler's, and have no memory.
    born = (thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))
    storages = {(s := tensor.untyped_storage()).data_ptr(): s.nbytes() for tensor in born}
    gc.unfreeze()
    for tensor in (*model.parameters(), *model.buffers()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    contestant.state_bytes = sum(storages.values())
    return contestant


def measure(
    workload: Workload, contenders: Sequence[Contender], rounds: int, progress: Progress = lambda _: None
) -> Times:
    """Let all optimizers take turns, for so many rounds of whole intervals between factor updates."""
    torch.manual_seed(0)
    batches = [workload.batch() for _ in range(4)]
    contestants: list[Contestant] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(singd|pytorch_optimizer|heavyball)\b")
        for contender in contenders:
            progress(f"preparing {contender.title}")
            torch.manual_seed(0)
            join = partial(_join, contestants, workload.model(), contender, batches)
            if not succeeds(contender, join):
                progress(f"{contender.title} failed, and is left out")
        window = whole_intervals(contenders)
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            taking_part = [c for c in contestants if number < workload.slow_rounds or not c.contender.slow]
            take_turns(taking_part, window, workload.turn, random.Random(number))
            for failed in (c.contender.title for c in contestants if c.failed):
                progress(f"{failed} failed, and is left out")
            contestants = [contestant for contestant in contestants if not contestant.failed]
    timings = [timing for contestant in contestants for timing in summaries(contestant, window)]
    return Times(workload.title, timings)


def _join(
    contestants: list[Contestant], model: nn.Module, contender: Contender, batches: Sequence[Batch]
) -> None:
    contestants.append(prepare(model, contender, batches))


def take_turns(contestants: list[Contestant], window: int, turn: int, shuffler: random.Random) -> None:
    """One round."""
    gc.freeze()  # so that the garbage collector's tours through all of them are in nobody's time
    for done in range(0, window, turn):
        # So that none always finds the caches as the same predecessor left them.
        shuffler.shuffle(contestants)
        for contestant in contestants:
            left = contestant.per_round(window) - done
            train = partial(contestant.train, max(0, min(turn, left)))
            contestant.failed = not succeeds(contestant.contender, train)
        contestants[:] = [contestant for contestant in contestants if not contestant.failed]
    gc.unfreeze()


def succeeds(contender: Contender, action: Callable[[], object]) -> bool:
    """Whether it succeeds; ours must, but a peer's failure must not lose what was measured of the others."""
    try:
        action()
    except Exception:
        if contender.package.startswith("ingot"):
            raise
        return False
    return True


def whole_intervals(contenders: Sequence[Contender]) -> int:
    """Iterations of a round: a multiple of all intervals, so that each round holds its share of updates."""
    common = lcm(*(c.every for c in contenders if c.every and not c.slow))
    return common * -(-MIN_WINDOW // common)


def summaries(contestant: Contestant, window: int) -> Iterator[Timing]:
    """What was measured, once for each interval that is to be reported."""
    contender = contestant.contender
    iteration, step = (contestant.kinds(s, window) for s in (contestant.iteration, contestant.step))
    for every in contender.reported or (contender.every,):
        alone = every == 1  # every step is an update
        yield Timing(
            contender.title,
            contender.package,
            contender.structure,
            every,
            Kinds(iteration.update, []) if alone else iteration,
            Kinds(step.update, []) if alone else step,
            contestant.state_bytes,
            isfinite(contestant.loss),
        )

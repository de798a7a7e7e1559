"""What a step costs: iteration time, step time and state of ingot's optimizers and their peers.

Machines are noisy, so nothing here is an absolute time. All optimizers take turns in one process, each on its
own copy of one model; every time is divided by SGD's in the same round, and the median over the rounds is
reported with its quartiles. Run it from the project's root: ``python benchmarks/step_time.py --help``.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import cycle, pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import ingot

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from singd.optim.optimizer import SINGD as Official  # noqa: N811 (ours has that name, too)
    except ModuleNotFoundError:
        Official = None

TIME_REFERENCE, STATE_REFERENCE = "SGD momentum", "AdamW"

# So small that nothing diverges in a few hundred steps on random labels: times do not depend on the learning
# rate, but they do on infinities and denormal numbers.
LR = 1e-4
WARMUP_ITERATIONS = 2  # one with an update of the factors and one without: allocations are made by then
MIN_WINDOW = 10


# --- Models -----------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    widths = [784, 512, 512, 512]
    hidden = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 10))


def vgg() -> nn.Module:
    """VGG11 with batch normalization, a quarter of the widths, for 32x32 images."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, None, 32, None, 64, 64, None, 128, 128, None, 128, 128, None):
        if width is None:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


class Block(nn.Module):
    """A transformer block, normalized first: causal attention, then a network of four times the width."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A small language model: tokens ``[batch, positions]`` to logits ``[batch, positions, vocabulary]``."""

    def __init__(
        self, d: int = 256, depth: int = 4, heads: int = 4, length: int = 128, words: int = 65
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(words, d), nn.Embedding(length, d)
        self.blocks = nn.Sequential(*(Block(d, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


Batch: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model with random data of its shape, and how to share the time between optimizers.

    Attributes:
        title: What it is, for the report.
        model: Makes the model.
        batch: Makes a random batch of inputs and class labels.
        rounds: Rounds to measure unless told otherwise.
        turn: Iterations that an optimizer takes in a row before the next one's turn. Short turns cancel the
            machine's slow drifts, long ones keep an optimizer's own data in the processor's caches.
        per_token: Whether there is a label for every position, so that the loss is a mean over these, too.
    """

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    rounds: int
    turn: int
    per_token: bool = False


WORKLOADS: Mapping[str, Workload] = {
    "mlp": Workload(
        title="MLP 784-512-512-512-10, batch 128",
        model=mlp,
        batch=lambda: (torch.randn(128, 784), torch.randint(10, (128,))),
        rounds=5,
        turn=5,
    ),
    "vgg": Workload(
        title="VGG11-BN, a quarter of the widths, 32x32, batch 32",
        model=vgg,
        batch=lambda: (torch.randn(32, 3, 32, 32), torch.randint(10, (32,))),
        rounds=3,
        turn=5,
    ),
    "gpt": Workload(
        title="GPT d=256, 4 layers, sequence 128, batch 8",
        model=GPT,
        batch=lambda: (torch.randint(65, (8, 128)), torch.randint(65, (8, 128))),
        rounds=2,
        turn=1,
        per_token=True,
    ),
}


# --- Optimizers -------------------------------------------------------------------------------------------


class Together:
    """Optimizers of one model's different parameters, stepped as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


Steps: TypeAlias = torch.optim.Optimizer | Together
Maker: TypeAlias = Callable[[nn.Module], Steps]


def official(structure: str, every: int, per_token: bool, model: nn.Module) -> Steps:
    """The official SINGD with AdamW on what it leaves untrained, as ours has: both train every parameter."""
    singd = Official(
        model,
        lr=LR,
        weight_decay=1e-2,
        alpha1=0.0,
        lr_cov=1e-3,
        T=every,
        structures=(structure, structure),
        loss_average="batch+sequence" if per_token else "batch",
        warn_unsupported=False,
    )
    trained = {p for group in singd.param_groups for p in group["params"]}
    rest = [p for p in model.parameters() if p not in trained]
    return Together(singd, torch.optim.AdamW(rest, lr=LR)) if rest else singd


def contenders(every: int, per_token: bool) -> dict[str, Maker]:
    """Every optimizer by its name in the report, with factors updated at each ``every``-th step."""
    found: dict[str, Maker] = {
        TIME_REFERENCE: lambda model: torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
        STATE_REFERENCE: lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
        "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), lr=LR, fused=True),
    }
    if Official is not None:
        for structure in ("dense", "diagonal", "block30diagonal", "hierarchical15_15"):
            found[f"official singd {structure}"] = partial(official, structure, every, per_token)
    # The warm-up is off because it updates the factors at every step; the rest is as users have it.
    settings: dict[str, Any] = {"lr": LR, "precond_every": every, "precond_warmup": 0}
    settings["loss_average"] = "token" if per_token else "batch"
    for structure in ("dense", "diagonal", "block_diagonal(30)", "hierarchical(15,15)", "triu_toeplitz"):
        found[f"ingot SINGD {structure}"] = partial(ingot.SINGD, structure=structure, **settings)
    for kind in (ingot.INGD, ingot.IKFAC, ingot.KFAC):
        found[f"ingot {kind.__name__} dense"] = partial(kind, structure="dense", **settings)
    return found


# --- Measuring --------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    """An optimizer on its own copy of the model, and what was measured of it: seconds, for each iteration."""

    model: nn.Module
    optimizer: Steps
    batches: Iterator[Batch]
    state_bytes: int = 0
    iteration: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    loss: float = float("nan")

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            inputs, labels = next(self.batches)
            start = perf_counter()
            loss = cross_entropy(self.model(inputs).flatten(0, -2), labels.flatten())
            loss.backward()
            before_step = perf_counter()
            self.optimizer.step()
            after_step = perf_counter()
            self.optimizer.zero_grad()
            self.iteration.append(perf_counter() - start)
            self.step.append(after_step - before_step)
        self.loss = loss.item()


def prepare(model: nn.Module, make: Maker, batches: Sequence[Batch]) -> Contestant:
    """An optimizer after its first steps. Its state is every tensor born meanwhile that is still alive.

    So caches and buffers count, wherever they are kept; each storage counts once, the model's own does not.
    """
    gc.freeze()  # hides what exists from get_objects
    contestant = Contestant(model, make(model), cycle(batches))
    contestant.train(WARMUP_ITERATIONS)
    gc.collect()
    # isinstance would ask proxies for their class, which makes some of them load their module.
    born = (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))
    storages = {(s := tensor.untyped_storage()).data_ptr(): s.nbytes() for tensor in born}
    gc.unfreeze()
    for tensor in (*model.parameters(), *model.buffers()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    contestant.state_bytes = sum(storages.values())
    return contestant


def measure(
    workload: Workload, makers: Mapping[str, Maker], every: int, rounds: int, progress: Callable[[str], None]
) -> dict[str, Contestant]:
    """Let all optimizers take turns, for ``rounds`` rounds of whole intervals between factor updates."""
    torch.manual_seed(0)
    batches = [workload.batch() for _ in range(4)]
    contestants: dict[str, Contestant] = {}
    for name, make in makers.items():
        progress(f"preparing {name}")
        torch.manual_seed(0)
        contestants[name] = prepare(workload.model(), make, batches)
    gc.freeze()  # so that the garbage collector's tours through all of them are in nobody's time
    window, order, shuffler = whole_intervals(every), list(contestants.values()), random.Random(0)
    for number in range(1, rounds + 1):
        progress(f"round {number} of {rounds}")
        for done in range(0, window, workload.turn):
            shuffler.shuffle(order)  # so that none always finds the caches as the same predecessor left them
            for contestant in order:
                contestant.train(min(workload.turn, window - done))
    gc.unfreeze()
    return contestants


def whole_intervals(every: int) -> int:
    """Iterations of a round: a multiple of the interval, so that each window holds its share of updates."""
    return every * -(-MIN_WINDOW // every)


# --- Report -----------------------------------------------------------------------------------------------


def per_round(seconds: Sequence[float], window: int) -> Tensor:
    """Milliseconds an iteration, on average in each round."""
    return torch.tensor(seconds[WARMUP_ITERATIONS:], dtype=torch.float64).view(-1, window).mean(1) * 1e3


def quartiles(ratios: Tensor) -> dict[str, float]:
    low, middle, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=ratios.dtype)).tolist()
    return {"median": middle, "quartile_1": low, "quartile_3": high}


def summary(contestants: Mapping[str, Contestant], window: int) -> dict[str, Any]:
    """All that was measured, optimizer by optimizer, and its ratios to the references."""
    iteration, step = (
        {name: per_round(getattr(c, kind), window) for name, c in contestants.items()}
        for kind in ("iteration", "step")
    )
    return {
        name: {
            "iteration_ratio": quartiles(iteration[name] / iteration[TIME_REFERENCE]),
            "step_ratio": quartiles(step[name] / step[TIME_REFERENCE]),
            "state_ratio": c.state_bytes / contestants[STATE_REFERENCE].state_bytes,
            "state_bytes": c.state_bytes,
            "iteration_ms": iteration[name].tolist(),
            "step_ms": step[name].tolist(),
            "last_loss": c.loss if isfinite(c.loss) else None,
        }
        for name, c in contestants.items()
    }


def processor() -> str:
    """The processor's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def conditions(every: int, threads: int) -> dict[str, Any]:
    """Where, when and how it was measured."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ingot": ingot.__version__,
        "processor": processor(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "threads": threads,
        "every": every,
        "iterations_per_round": whole_intervals(every),
    }


def preamble(about: Mapping[str, Any]) -> str:
    """What the tables mean, in Markdown."""
    environment = "{date}, torch {torch}, Python {python}, {processor}, threads: {threads}, float32."
    window = (
        "A round: {iterations_per_round} iterations of each optimizer. Steps between factor updates: {every}."
    )
    text = f"""# Step times

{environment.format_map(about)}

Times are relative to SGD with momentum; all optimizers take turns in one process, each on its own copy of the
model. Given is the median over the rounds of the ratio to SGD's time in the same round, and the first and
third quartile in brackets. Machines are noisy: do not trust a difference smaller than that spread, nor the
spread of a few rounds.

- {window.format_map(about)}
  These are the same for ingot and the official package, both without Riemannian momentum; ingot's warm-up,
  which updates the factors more often at first, is off.
- An iteration is forward, backward, step and zero_grad. The step alone leaves out the factors' statistics,
  which natural-gradient optimizers collect in backward.
- State is what is kept from step to step, measured as the tensors that an optimizer keeps alive.
- Weight decay is 0.01, but SGD has none. The official package leaves all but Linear and Conv2d untrained;
  AdamW trains the rest here, as it does in ingot.
"""
    return text if Official is not None else text + "- The official package is not installed: skipped.\n"


def spread(ratio: Mapping[str, float]) -> str:
    """A median with its quartiles, with the digits that may mean something."""
    digits = 2 if ratio["median"] < 10 else 1
    middle, low, high = (f"{ratio[key]:.{digits}f}" for key in ("median", "quartile_1", "quartile_3"))
    return f"{middle} [{low}, {high}]"


def table(title: str, results: Mapping[str, Any]) -> str:
    """One model's results in Markdown."""
    sgd = results[TIME_REFERENCE]
    iteration_ms, step_ms = median(sgd["iteration_ms"]), median(sgd["step_ms"])
    lines = [
        f"## {title}",
        "",
        f"Rounds: {len(sgd['step_ms'])}. SGD: {iteration_ms:.3g} ms an iteration, {step_ms:.3g} ms a step.",
        "",
        "| optimizer | iteration / SGD | step / SGD | state / AdamW |",
        "| --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        iteration, step = spread(result["iteration_ratio"]), spread(result["step_ratio"])
        lines.append(f"| {name} | {iteration} | {step} | {result['state_ratio']:.2f} |")
    diverged = [name for name, result in results.items() if result["last_loss"] is None]
    if diverged:
        lines += ["", f"The loss was not finite, so distrust the times of: {', '.join(diverged)}."]
    return "\n".join(lines) + "\n"


# --- Command line -----------------------------------------------------------------------------------------


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too few: give 1 or more")
    return value


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = list(WORKLOADS)
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="default: all of them")
    parser.add_argument("--every", type=positive, default=10, help="steps between factor updates")
    parser.add_argument("--rounds", type=positive, help="default: more for faster models")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="directory for the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(chosen.threads)
    results: dict[str, Any] = conditions(chosen.every, chosen.threads) | {"models": {}}
    text = preamble(results)
    for name in chosen.models:
        workload = WORKLOADS[name]
        makers = contenders(chosen.every, workload.per_token)
        progress = partial(print, f"{name}:", file=sys.stderr, flush=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"singd\.")
            contestants = measure(workload, makers, chosen.every, chosen.rounds or workload.rounds, progress)
        results["models"][name] = summary(contestants, results["iterations_per_round"])
        text += "\n" + table(workload.title, results["models"][name])
    (chosen.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (chosen.out / "results.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

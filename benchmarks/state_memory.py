"""What an optimizer costs in memory in pure bfloat16: its state and the peak of an iteration.

Run it from the project's root: ``python -m benchmarks.state_memory --help``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ingot
from benchmarks import memory
from benchmarks.measured import Memory
from benchmarks.report import write_between
from ingot.lab.tables import markdown_table
from ingot.lab.torchvision_ops import make_torchvision_importable

PAGE = Path(__file__).parents[1] / "docs" / "precision.md"
BEGIN, END = "<!-- memory -->\n", "<!-- end of memory -->"
REFERENCE = "AdamW"
CLASSES = 100


# --- Models and optimizers --------------------------------------------------------------------------------


def vit(width: int = 192, depth: int = 12) -> nn.Module:
    """The tiny vision transformer, on patches of 4x4 pixels."""
    make_torchvision_importable()  # which timm imports
    from timm.models.vision_transformer import VisionTransformer

    size: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": width,
        "depth": depth,
        "num_heads": 3,
    }
    return VisionTransformer(**size, num_classes=CLASSES)


def vgg16(width: int = 64) -> nn.Module:
    """VGG16 with batch normalization and, as usual for such small images, one linear layer."""
    layers: list[nn.Module] = []
    channels = 3
    for repeats, factor in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
        for _ in range(repeats):
            out = factor * width
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
            channels = out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, CLASSES))


class Workload(NamedTuple):
    """A model, and a batch that a CPU, slow in bfloat16, gets done."""

    title: str
    model: Callable[[], nn.Module]
    batch: int

    def random_batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(self.batch, 3, 32, 32), torch.randint(CLASSES, (self.batch,))


WORKLOADS: Mapping[str, Workload] = {
    "vit": Workload("ViT, 12 blocks of width 192", vit, 2),
    "vgg16": Workload("VGG16", vgg16, 2),
    "small_vit": Workload("ViT, 4 blocks of width 96", partial(vit, width=96, depth=4), 32),
    "small_vgg16": Workload("VGG16, a quarter of the widths", partial(vgg16, width=16), 32),
}
"""Weights and state make up most of the memory in the first two, activations in the others."""

Maker = Callable[[nn.Module], torch.optim.Optimizer]


def measure(workload: Workload, make: Maker) -> Memory:
    return memory.measure(workload.model, workload.random_batch, make, torch.bfloat16)


def contenders() -> dict[str, Maker]:
    """Every optimizer by its name in the table; every second step updates the factors."""
    found: dict[str, Maker] = {
        "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        REFERENCE: lambda model: torch.optim.AdamW(model.parameters()),
    }
    turns: dict[str, Any] = {"precond_every": 2, "precond_warmup": 0}
    for structure in ("diagonal", "triu_toeplitz", "block_diagonal(30)", "hierarchical(15,15)"):
        found[f"SINGD {structure}"] = partial(ingot.SINGD, structure=structure, **turns)
    found["SINGD diagonal, reduce"] = partial(ingot.SINGD, structure="diagonal", approx="reduce", **turns)
    for kind in (ingot.INGD, ingot.KFAC):  # IKFAC's are INGD's
        found[f"{kind.__name__} dense"] = partial(kind, **turns)
    return found


# --- Report -----------------------------------------------------------------------------------------------


def table(workload: Workload, results: Mapping[str, Memory]) -> str:
    """One model's results in Markdown."""
    rows = []
    for name, used in results.items():
        ratios = (f"{mine / its:.2f}" for mine, its in zip(used, results[REFERENCE], strict=True))
        rows.append((name, f"{used.state / 2**20:.1f}", *ratios))
    columns = ("optimizer", "state in MiB", "state", "peak", "peak with a factor update")
    millions = sum(p.numel() for p in workload.model().parameters()) / 1e6
    heading = f"**{workload.title}: {millions:.1f} million parameters, batches of {workload.batch}**"
    return f"{heading}\n\n{markdown_table(columns, rows)}\n"


# --- Command line -----------------------------------------------------------------------------------------


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = list(WORKLOADS)
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="default: all of them")
    parser.add_argument("--out", type=Path, default=Path("runs/memory"), help="directory for the results")
    parser.add_argument("--page", type=Path, default=PAGE, help="page for the tables, if of all models")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"torch": torch.__version__, "models": {}}
    tables = []
    for name in chosen.models:
        measured = {}
        for optimizer, make in contenders().items():
            print(f"{name}: {optimizer}", file=sys.stderr, flush=True)
            torch.manual_seed(0)
            measured[optimizer] = measure(WORKLOADS[name], make)
        results["models"][name] = {key: used._asdict() for key, used in measured.items()}
        tables.append(table(WORKLOADS[name], measured))
    text = "\n".join(tables)
    (chosen.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (chosen.out / "results.md").write_text(text)
    if set(chosen.models) == set(WORKLOADS):
        write_between(chosen.page, BEGIN, END, text)
    print(text)


if __name__ == "__main__":
    main()

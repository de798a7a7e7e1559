"""The tasks that defaults are chosen and judged by: real data, small models, seconds of training each.

Some were looked at while defaults were chosen, the others only afterwards (``chosen_on``).
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ingot.lab.data.augment import MEAN, STD
from ingot.lab.data.diamonds import load_diamonds
from ingot.lab.data.fashion import load_fashion
from ingot.lab.data.images import SOURCES, load_images
from ingot.lab.data.text import Passages, Text, load_text, numbered
from ingot.lab.models.blocks import Block, small_normal
from ingot.lab.models.gpt import GPT, GPTSize
from ingot.lab.recipes import RECIPES, Options
from ingot.lab.task import Classification, Regression, Task, Tensors, Training

EVALUATIONS = 16
"""How often a run is evaluated, at equal distances."""


@dataclass(frozen=True)
class Entry:
    """A task of the suite.

    Attributes:
        kind: What the model mostly is: ``"convolutional"``, ``"transformer"``, ``"dense"`` or ``"graph"``.
        chosen_on: Whether defaults were chosen by it; the others are what they are validated on.
        make: Makes the task from the folder of data sets.
    """

    kind: str
    chosen_on: bool
    make: Callable[[Path | None], Task]


# --- Models -----------------------------------------------------------------------------------------------


def convolutional(channels: int, widths: tuple[int, ...], *, normalized: bool) -> nn.Module:
    """Convolutions, each of half the rows and columns of the one before; a head on the last one's means."""
    layers: list[nn.Module] = []
    for width in widths:
        layers.append(nn.Conv2d(channels, width, 3, padding=1, stride=2))
        if normalized:
            layers.append(nn.BatchNorm2d(width))
        layers.append(nn.ReLU())
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class PatchTransformer(nn.Module):
    """A vision transformer: patches, blocks, the mean of all places."""

    def __init__(self, channels: int, image: int, patch: int, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((image // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, 4, 2.0) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        small_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.patches(images).flatten(2).mT + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def perceptron(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


# --- Tasks ------------------------------------------------------------------------------------------------

PER_TOKEN: Mapping[str, Any] = {"loss_average": "token"}


def _recipe(name: str, data: str = "") -> Callable[[Path | None], Task]:
    return lambda folder: RECIPES[name].task(Options(data, folder, "small"))


def _fashion(title: str, model: Callable[[], nn.Module], epochs: int) -> Callable[[Path | None], Task]:
    def make(folder: Path | None) -> Task:
        train_x, train_y, test_x, test_y = load_fashion(folder, 6000, 2000)
        data = Tensors(train_x, train_y), Tensors(test_x, test_y)
        return Task(f"{title} on Fashion-MNIST", model, *data, training=Training(epochs, 64))

    return make


def _photographs(
    title: str, data: str, model: Callable[[], nn.Module], epochs: int, train: int, test: int
) -> Callable[[Path | None], Task]:
    """Photographs as they are: without changes at random, so that little data is learned soon."""

    def make(folder: Path | None) -> Task:
        source = SOURCES[data]
        images = load_images(source, folder, 32)
        examples = _first(images.train, train), _first(images.test, test)
        return Task(f"{title} on {source.title}", model, *examples, training=Training(epochs, 64))

    return make


def _first(data: Any, count: int) -> Tensors:
    """So many examples at random, always the same, as normal numbers."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
    x, y = data.__getitems__(order.tolist())
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (MEAN, STD))
    return Tensors(x.float().div_(255).sub_(mean).div_(std), y)


SIZE = GPTSize(depth=2, width=64, heads=4, length=64)


def _language(title: str, load: Callable[[Path | None], Text], steps: int) -> Callable[[Path | None], Task]:
    def make(folder: Path | None) -> Task:
        text = load(folder)
        train = Passages(text.train.text[: 32 * steps * SIZE.length + 1], SIZE.length)
        test = Passages(text.test.text[: 256 * SIZE.length + 1], SIZE.length)
        return Task(
            f"GPT on {title}",
            lambda: GPT(text.symbols, SIZE),
            train,
            test,
            Classification(),
            training=Training(1, 32, common=PER_TOKEN),
        )

    return make


def _python_source(folder: Path | None) -> Text:
    """Modules of Python's own library, in an order that is always the same."""
    names = ("argparse", "ast", "datetime", "decimal", "difflib", "doctest", "inspect", "optparse", "pickle")
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / f"{name}.py" for name in names]
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return numbered("".join(symbol if symbol.isascii() else "?" for symbol in text), SIZE.length)


def _diamonds(folder: Path | None) -> Task:
    x, y = load_diamonds(folder)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    cut = 3 * len(x) // 4
    train, test = order[:cut][:12000], order[cut:][:4000]
    return Task(
        "Perceptron on prices of diamonds",
        lambda: perceptron(x.shape[1], 128, 1),
        Tensors(x[train], y[train]),
        Tensors(x[test], y[test]),
        Regression(error="mean squared error"),
        training=Training(3, 64),
    )


SUITE: Mapping[str, Entry] = {
    "digits": Entry("convolutional", True, _recipe("digits")),
    "fashion_cnn": Entry(
        "convolutional", True, _fashion("CNN", lambda: convolutional(1, (16, 32, 64), normalized=True), 2)
    ),
    "fashion_vit": Entry("transformer", True, _fashion("ViT", lambda: PatchTransformer(1, 28, 7), 3)),
    "wide_vit": Entry(
        "transformer", True, _fashion("ViT of width 256", lambda: PatchTransformer(1, 28, 7, width=256), 2)
    ),
    "shakespeare_gpt": Entry(
        "transformer", True, _language("tinyshakespeare", lambda folder: load_text(folder, SIZE.length), 200)
    ),
    "cora": Entry("graph", True, _recipe("gcn")),
    "diamonds": Entry("dense", True, _diamonds),
    "autoencoder": Entry("dense", False, _recipe("autoencoder")),
    "cifar_cnn": Entry(
        "convolutional",
        False,
        _photographs(
            "CNN without normalization",
            "cifar10",
            lambda: convolutional(3, (16, 32, 64), normalized=False),
            4,
            8000,
            2000,
        ),
    ),
    "cifar_vit": Entry(
        "transformer",
        False,
        _photographs("ViT", "cifar10", lambda: PatchTransformer(3, 32, 8), 3, 8000, 2000),
    ),
    "woof_cnn": Entry(
        "convolutional",
        False,
        _photographs(
            "CNN", "imagewoof", lambda: convolutional(3, (16, 32, 64), normalized=True), 3, 8000, 2000
        ),
    ),
    "python_gpt": Entry("transformer", False, _language("Python source", _python_source, 200)),
}


def suite_task(name: str, folder: Path | None) -> Task:
    """A task of the suite."""
    return SUITE[name].make(folder)

"""What a recipe is, and what those for images have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ingot.lab.data.augment import CropAndFlip, Normalized
from ingot.lab.data.images import SOURCES, load_images
from ingot.lab.data.places import data_dir
from ingot.lab.naming import find, suggestion
from ingot.lab.task import Task, Training

SIZES = ("full", "small", "tiny")
"""The paper's size, one that a processor trains in minutes, and one that it trains in seconds."""

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Options:
    """What a user may choose of a recipe.

    Attributes:
        data: The data set's name, if the recipe has several.
        data_dir: The folder of data sets.
        size: One of ``SIZES``.
        image_size: Rows and columns of images, where they are not as they come.
    """

    data: str = ""
    data_dir: Path | None = None
    size: str = "full"
    image_size: int | None = None

    def sized(self, *, full: Choice, small: Choice, tiny: Choice) -> Choice:
        """That of three choices that goes with the size."""
        return {"full": full, "small": small, "tiny": tiny}[self.size]

    @property
    def folder(self) -> Path | None:
        """The folder of data sets, from here or from the environment."""
        return data_dir(self.data_dir)


@dataclass(frozen=True)
class Recipe:
    """A model's task by name.

    Attributes:
        name: What it is asked for by.
        title: One line of what it is.
        data: The data sets that it takes, the default first; none where it has its own.
        make: Makes the task.
    """

    name: str
    title: str
    data: tuple[str, ...]
    make: Callable[[Options], Task]

    def task(self, options: Options) -> Task:
        """The task; a ValueError if the options make no sense for it."""
        if options.size not in SIZES:
            raise ValueError(f"there is no size {options.size!r}{suggestion(options.size, SIZES)}")
        if options.data and options.data not in self.data:
            known = self.data or ("data of its own",)
            raise ValueError(
                f"{self.name} does not take the data {options.data!r}{suggestion(options.data, known)}"
            )
        chosen = options.data or (self.data[0] if self.data else "")
        return self.make(Options(chosen, options.data_dir, options.size, options.image_size))


RECIPES: dict[str, Recipe] = {}
"""All recipes by name."""


def recipe(
    name: str, title: str, data: tuple[str, ...] = ()
) -> Callable[[Callable[[Options], Task]], Callable[[Options], Task]]:
    """Make a function known as a recipe: a decorator."""

    def decorate(make: Callable[[Options], Task]) -> Callable[[Options], Task]:
        RECIPES[name] = Recipe(name, title, data, make)
        return make

    return decorate


# --- Images -----------------------------------------------------------------------------------------------

IMAGES = ("cifar100", "imagewoof", "cifar10", "imagenet100")

REDUCE: Mapping[str, Any] = {"approx": "reduce", "momentum": 0.9}
"""The paper's settings for all its models but the graph network's."""


def image_task(
    title: str,
    options: Options,
    model: Callable[[int, int], nn.Module],
    schedule: str = "cosine",
    enlarged: int | None = None,
) -> Task:
    """The task to classify images by a model that is made from the number of classes and the image size.

    With the schedule ``"step"`` the learning rate falls twice; the paper does so every 40 epochs.
    ``enlarged`` is what images of less pixels are enlarged to, on their device.
    """
    source = find(options.data, SOURCES, "image data set")
    images = load_images(source, options.folder, options.image_size)
    size = max(images.size, enlarged or 0)
    return Task(
        title=f"{title} on {source.title}",
        model=lambda: model(images.classes, size),
        train=images.train,
        test=images.test,
        augment=CropAndFlip(),
        prepare=Normalized(size),
        training=_training(options, schedule),
    )


def _training(options: Options, schedule: str) -> Training:
    long = 120 if schedule == "step" else 200
    epochs, batch_size, decay_every = options.sized(full=(long, 128, 40), small=(12, 64, 4), tiny=(2, 16, 1))
    return Training(epochs, batch_size, schedule, decay_every, common=REDUCE)


def timm_model(module: str, name: str, **settings: Any) -> nn.Module:
    """A class of timm with sizes of its own."""
    from importlib import import_module

    from ingot.lab.torchvision_ops import make_torchvision_importable

    make_torchvision_importable()
    made: nn.Module = getattr(import_module(f"timm.models.{module}"), name)(**settings)
    return made

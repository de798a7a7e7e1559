"""VGG, with batch normalization and one linear layer as its head, as usual for small images."""

from __future__ import annotations

from torch import nn

from ingot.lab.recipes.base import IMAGES, Options, image_task, recipe, timm_model
from ingot.lab.task import Task

WIDTHS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")
SMALL_WIDTHS = (16, "M", 32, "M", 64, "M", 128, "M")
TINY_WIDTHS = (8, "M", 16, "M", 16, "M")


@recipe("vgg", "VGG-16 with batch normalization (a convolutional network)", IMAGES)
def vgg(options: Options) -> Task:
    """The learning rate falls every 40 epochs."""
    widths = options.sized(full=WIDTHS, small=SMALL_WIDTHS, tiny=TINY_WIDTHS)
    return image_task("VGG", options, lambda classes, _: network(widths, classes), schedule="step")


def network(widths: tuple[int | str, ...], classes: int) -> nn.Module:
    """Timm's convolutions, and a head for the classes in the place of its two layers of 4096."""
    model = timm_model("vgg", "VGG", cfg=list(widths), num_classes=0, norm_layer=nn.BatchNorm2d)
    features: nn.Module = model.get_submodule("features")
    last = [width for width in widths if isinstance(width, int)][-1]
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes))

"""ConvMixer, "Patches Are All You Need?"."""

from __future__ import annotations

from torch import nn

from ingot.lab.recipes.base import IMAGES, Options, image_task, recipe, timm_model
from ingot.lab.task import Task


@recipe("convmixer", "ConvMixer-256/8 (a convolutional network)", IMAGES)
def convmixer(options: Options) -> Task:
    """The learning rate falls every 40 epochs."""
    sizes = options.sized(
        full={"dim": 256, "depth": 8, "kernel_size": 5},
        small={"dim": 64, "depth": 4, "kernel_size": 5},
        tiny={"dim": 32, "depth": 2, "kernel_size": 3},
    )

    def network(classes: int, image: int) -> nn.Module:
        patch = max(2, image // 16)
        return timm_model("convmixer", "ConvMixer", patch_size=patch, num_classes=classes, **sizes)

    return image_task("ConvMixer", options, network, schedule="step")

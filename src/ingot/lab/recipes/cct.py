"""Compact-ViT: the compact convolutional transformer."""

from __future__ import annotations

from ingot.lab.models.cct import CCT, CCTSize
from ingot.lab.recipes.base import IMAGES, Options, image_task, recipe
from ingot.lab.task import Task


@recipe("cct", "Compact-ViT, CCT-7/3x1 (a transformer on convolutional tokens)", IMAGES)
def cct(options: Options) -> Task:
    """Images of more than 32 pixels get another halving for each doubling."""

    def network(classes: int, image: int) -> CCT:
        convolutions = max(1, (image // 32).bit_length())
        size = options.sized(
            full=CCTSize(convolutions=convolutions),
            small=CCTSize(2, 64, 4, 2.0, convolutions + 1),
            tiny=CCTSize(2, 32, 2, 2.0, convolutions + 1),
        )
        return CCT(classes, image, size)

    return image_task("Compact-ViT", options, network)

"""HDVT, as the paper calls DHVT: a hybrid of transformer and convolutional network."""

from __future__ import annotations

from ingot.lab.models.dhvt import DHVT, DHVTSize
from ingot.lab.recipes.base import IMAGES, Options, image_task, recipe
from ingot.lab.task import Task


@recipe("dhvt", "HDVT, DHVT-T (a transformer with convolutions in it)", IMAGES)
def dhvt(options: Options) -> Task:
    """Patches are an eighth of the image, of 4 pixels for CIFAR."""

    def network(classes: int, image: int) -> DHVT:
        patch = max(2, 1 << ((image // 8).bit_length() - 1))
        size = options.sized(
            full=DHVTSize(patch=patch),
            small=DHVTSize(4, 64, 4, 4.0, patch),
            tiny=DHVTSize(2, 32, 2, 2.0, patch),
        )
        return DHVT(classes, size)

    return image_task("HDVT", options, network)

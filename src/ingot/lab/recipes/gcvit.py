"""GC-ViT: a transformer with global queries in local windows."""

from __future__ import annotations

from torch import nn

from ingot.lab.recipes.base import IMAGES, Options, image_task, recipe, timm_model
from ingot.lab.task import Task

SMALLEST = 64
"""Images of fewer pixels are enlarged: the model halves them five times."""


@recipe(
    "gcvit", "GC-ViT, xx-tiny (a transformer with global context)", (*IMAGES[1:2], *IMAGES[:1], *IMAGES[2:])
)
def gcvit(options: Options) -> Task:
    """Windows are as at 224 pixels: an eighth, an eighth, a quarter and the whole of what a stage sees."""

    def network(classes: int, image: int) -> nn.Module:
        two_stages = {"num_heads": (1, 2), "window_ratio": (16, 16)}
        sizes = options.sized(
            full={"embed_dim": 64, "depths": (2, 2, 6, 2), "num_heads": (2, 4, 8, 16)},
            small={"embed_dim": 32, "depths": (2, 2), **two_stages},
            tiny={"embed_dim": 16, "depths": (1, 1), **two_stages},
        )
        return timm_model("gcvit", "GlobalContextVit", img_size=image, num_classes=classes, **sizes)

    return image_task("GC-ViT", options, network, enlarged=SMALLEST)

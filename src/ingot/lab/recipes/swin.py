"""Swin: a transformer with shifted windows."""

from __future__ import annotations

from torch import nn

from ingot.lab.recipes.base import IMAGES, Options, image_task, recipe, timm_model
from ingot.lab.task import Task


@recipe("swin", "Swin-ViT, Swin-T (a transformer with shifted windows)", IMAGES)
def swin(options: Options) -> Task:
    """Patches of 2 pixels for small images, so that four stages have something to look at."""

    def network(classes: int, image: int) -> nn.Module:
        patch = 4 if image >= 128 else 2
        window = 7 if image % 56 == 0 else 4
        sizes = options.sized(
            full={"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)},
            small={"embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)},
            tiny={"embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4)},
        )
        return timm_model(
            "swin_transformer",
            "SwinTransformer",
            img_size=image,
            patch_size=patch,
            window_size=window,
            num_classes=classes,
            **sizes,
        )

    return image_task("Swin-ViT", options, network)

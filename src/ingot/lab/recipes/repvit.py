"""Rep-ViT: a convolutional network after the model of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from ingot.lab.recipes.base import IMAGES, Options, image_task, recipe, timm_model
from ingot.lab.task import Task

SMALLEST = 64
"""Images of fewer pixels are enlarged: the model halves them five times."""


@recipe("repvit", "Rep-ViT, M0.9 (a convolutional network like a transformer)", IMAGES)
def repvit(options: Options) -> Task:
    """Without the head for distillation, of which there is none here."""
    sizes: dict[str, Any] = options.sized(
        full={"embed_dim": (48, 96, 192, 384), "depth": (2, 2, 14, 2)},
        small={"embed_dim": (24, 48, 96), "depth": (1, 1, 2)},
        tiny={"embed_dim": (8, 16), "depth": (1, 1)},
    )

    def network(classes: int, image: int) -> nn.Module:
        return timm_model(
            "repvit", "RepVit", img_size=image, num_classes=classes, distillation=False, **sizes
        )

    return image_task("Rep-ViT", options, network, enlarged=SMALLEST)

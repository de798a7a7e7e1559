"""The compact convolutional transformer (Compact-ViT): "Escaping the Big Data Paradigm", Hassani 2021."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ingot.lab.models.blocks import Block, rising, small_normal


@dataclass(frozen=True)
class CCTSize:
    """Numbers of a compact transformer; those of CCT-7/3x1 by default."""

    depth: int = 7
    width: int = 256
    heads: int = 4
    ratio: float = 2.0
    convolutions: int = 1
    drop_path: float = 0.1


class CCT(nn.Module):
    """Convolutions make tokens, a transformer mixes them, and attention weighs them into one."""

    def __init__(self, classes: int, image: int, size: CCTSize | None = None) -> None:
        super().__init__()
        size = size or CCTSize()
        self.tokenizer = tokenizer(size)
        places = (image >> size.convolutions) ** 2
        self.positions = nn.Parameter(torch.empty(1, places, size.width))
        rates = rising(size.drop_path, size.depth)
        self.blocks = nn.Sequential(
            *(Block(size.width, size.heads, size.ratio, drop_path=rate) for rate in rates)
        )
        self.norm = nn.LayerNorm(size.width)
        self.weigh = nn.Linear(size.width, 1)
        self.head = nn.Linear(size.width, classes)
        small_normal(self)
        nn.init.trunc_normal_(self.positions, std=0.2)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.tokenizer(images).flatten(2).mT + self.positions
        x = self.norm(self.blocks(x))
        weights = self.weigh(x).softmax(1)
        return self.head((weights * x).sum(1))


def tokenizer(size: CCTSize) -> nn.Sequential:
    """Each convolution is followed by a pooling that halves the image."""
    layers: list[nn.Module] = []
    for number in range(size.convolutions):
        last = number == size.convolutions - 1
        channels = 3 if number == 0 else 64
        layers += [
            nn.Conv2d(channels, size.width if last else 64, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return nn.Sequential(*layers)

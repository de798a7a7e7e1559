"""The dynamic hybrid vision transformer (HDVT in the SINGD paper), Lu et al. 2022.

"Bridging the Gap Between Vision Transformers and Convolutional Neural Networks on Small Datasets": patches
are embedded by overlapping convolutions, feed-forward networks have a depthwise convolution and weigh the
class token by what the patches hold, and each head sends a token of its own into attention.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ingot.lab.models.blocks import Attention, DropPath, rising, small_normal


@dataclass(frozen=True)
class DHVTSize:
    """Numbers of a hybrid transformer; those of DHVT-T for images of 32 pixels by default."""

    depth: int = 12
    width: int = 192
    heads: int = 4
    ratio: float = 4.0
    patch: int = 4
    drop_path: float = 0.1


class Affine(nn.Module):
    """A factor and a summand for each channel of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Scaled and shifted."""
        return x * self.scale + self.shift


def overlapping_patches(width: int, patch: int) -> nn.Sequential:
    """Convolutions that halve the image until each place stands for a patch."""
    halvings = patch.bit_length() - 1
    if patch != 1 << halvings:
        raise ValueError(f"patches of {patch} pixels: take a power of two")
    channels = [3, *(width >> (halvings - 1 - number) for number in range(halvings))]
    layers: list[nn.Module] = [Affine(3)]
    for number, (before, after) in enumerate(itertools.pairwise(channels)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after)]
        if number < halvings - 1:
            layers.append(nn.GELU())
    return nn.Sequential(*layers, Affine(width))


class DynamicFeedForward(nn.Module):
    """A feed-forward network that sees neighbours, and lets them decide how much the class token counts."""

    def __init__(self, width: int, ratio: float) -> None:
        super().__init__()
        hidden = int(ratio * width)
        self.widen = nn.Sequential(nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.GELU())
        self.neighbours = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.GELU(),
        )
        self.narrow = nn.Sequential(nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width))
        squeezed = max(1, width // 4)
        self.gate = nn.Sequential(
            nn.Linear(width, squeezed), nn.GELU(), nn.Linear(squeezed, width), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, 1 + places, width]``, the class token first."""
        token, patches = x[:, :1], x[:, 1:]
        side = round(patches.shape[1] ** 0.5)
        image = patches.mT.unflatten(2, (side, side))
        image = self.widen(image)
        image = self.narrow(image + self.neighbours(image))
        patches = image.flatten(2).mT
        return torch.cat((token * self.gate(patches.mean(1, keepdim=True)), patches), dim=1)


class HeadTokens(nn.Module):
    """Attention in which every head takes part as a token: the mean of what it sees of all places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention = Attention(width, heads)
        self.token = nn.Sequential(nn.Linear(width // heads, width), nn.LayerNorm(width), nn.GELU())
        self.positions = nn.Parameter(torch.zeros(1, heads, width))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, 1 + places, width]`` to the same; what heads learn goes to the class token."""
        seen = x.unflatten(2, (self.heads, -1)).mean(1)
        tokens = self.token(seen) + self.positions
        found = self.attention(torch.cat((x, tokens), dim=1))
        found, heads = found[:, : x.shape[1]], found[:, x.shape[1] :]
        return torch.cat((found[:, :1] + heads.mean(1, keepdim=True), found[:, 1:]), dim=1)


class DHVTBlock(nn.Module):
    """Attention and feed-forward network beside shortcuts."""

    def __init__(self, width: int, heads: int, ratio: float, drop_path: float) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = HeadTokens(width, heads), DynamicFeedForward(width, ratio)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, 1 + places, width]`` to the same."""
        x = x + self.drop_path(self.attention(self.before_attention(x)))
        return x + self.drop_path(self.mlp(self.before_mlp(x)))


class DHVT(nn.Module):
    """Positions come from the convolutions: there is no embedding of them."""

    def __init__(self, classes: int, size: DHVTSize | None = None) -> None:
        super().__init__()
        size = size or DHVTSize()
        self.patches = overlapping_patches(size.width, size.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.width))
        rates = rising(size.drop_path, size.depth)
        self.blocks = nn.Sequential(*(DHVTBlock(size.width, size.heads, size.ratio, rate) for rate in rates))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, classes)
        small_normal(self)
        nn.init.normal_(self.class_token, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        patches = self.patches(images).flatten(2).mT
        x = torch.cat((self.class_token.expand(len(patches), -1, -1), patches), dim=1)
        return self.head(self.norm(self.blocks(x))[:, 0])

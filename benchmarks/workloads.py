"""The models that are trained, with random data of their shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

Batch: TypeAlias = tuple[Tensor, Tensor]


# --- Models -----------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    widths = [784, 512, 512, 512]
    hidden = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 10))


def vgg() -> nn.Module:
    """VGG11 with batch normalization, a quarter of the widths, for 32x32 images."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, None, 32, None, 64, 64, None, 128, 128, None, 128, 128, None):
        if width is None:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


class Block(nn.Module):
    """A transformer block, normalized first: attention, then a network of four times the width."""

    def __init__(self, d: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A small language model: tokens ``[batch, positions]`` to logits ``[batch, positions, vocabulary]``."""

    def __init__(
        self, d: int = 256, depth: int = 4, heads: int = 4, length: int = 128, words: int = 65
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(words, d), nn.Embedding(length, d)
        self.blocks = nn.Sequential(*(Block(d, heads, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class ViT(nn.Module):
    """A small vision transformer: images ``[batch, 3, size, size]`` to logits, by the mean of all patches."""

    def __init__(
        self, d: int = 192, depth: int = 4, heads: int = 3, size: int = 32, patch: int = 4, classes: int = 10
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, d, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, d))
        self.blocks = nn.Sequential(*(Block(d, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


# --- Workloads --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A model with random data of its shape, and how to share the time between optimizers.

    Attributes:
        title: What it is, for the report.
        model: Makes the model.
        batch: Makes a random batch of inputs and class labels.
        rounds: Rounds to measure unless told otherwise.
        slow_rounds: Rounds in which optimizers take part that are many times slower than the others.
        turn: Iterations that an optimizer takes in a row before the next one's turn. Short turns cancel the
            machine's slow drifts, long ones keep an optimizer's own data in the processor's caches.
        per_token: Whether there is a label for every position, so that the loss is a mean over these, too.
    """

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    rounds: int
    turn: int
    slow_rounds: int = 1
    per_token: bool = False


WORKLOADS: Mapping[str, Workload] = {
    "mlp": Workload(
        title="MLP 784-512-512-512-10, batch 128",
        model=mlp,
        batch=lambda: (torch.randn(128, 784), torch.randint(10, (128,))),
        rounds=5,
        turn=5,
    ),
    "vgg": Workload(
        title="VGG11-BN, a quarter of the widths, 32x32, batch 32",
        model=vgg,
        batch=lambda: (torch.randn(32, 3, 32, 32), torch.randint(10, (32,))),
        rounds=3,
        turn=5,
    ),
    "vit": Workload(
        title="ViT d=192, 4 layers, 32x32 in patches of 4x4, batch 16",
        model=ViT,
        batch=lambda: (torch.randn(16, 3, 32, 32), torch.randint(10, (16,))),
        rounds=2,
        turn=2,
    ),
    "gpt": Workload(
        title="GPT d=256, 4 layers, sequence 128, batch 8",
        model=GPT,
        batch=lambda: (torch.randint(65, (8, 128)), torch.randint(65, (8, 128))),
        rounds=2,
        turn=1,
        per_token=True,
    ),
}


def training_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy over the batch, and over positions where these have labels."""
    inputs, labels = batch
    return cross_entropy(model(inputs).flatten(0, -2), labels.flatten())

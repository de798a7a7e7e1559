"""What is done to images on their device: random crops and mirror images, and normal numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of photographs, as everybody takes them from ImageNet."""


@dataclass(frozen=True)
class CropAndFlip:
    """Shift each image by up to an eighth of its size, and mirror half of them."""

    def __call__(self, x: Tensor) -> Tensor:
        n, _, size, _ = x.shape
        margin = max(1, size // 8)
        padded = pad(x, (margin,) * 4)
        top, left = torch.randint(0, 2 * margin + 1, (2, n, 1), device=x.device)
        along = torch.arange(size, device=x.device)
        rows, columns = top + along, left + along
        mirrored = torch.rand(n, 1, device=x.device) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
        image = torch.arange(n, device=x.device)[:, None, None]
        # Bytes are moved, not calculated with: one gather for the whole batch.
        return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Normalized:
    """Bytes as numbers around zero, enlarged to what a model needs at least."""

    size: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        mean, std = (x.new_tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (MEAN, STD))
        x = x.float().div(255).sub(mean).div(std)
        if self.size is not None and x.shape[-1] != self.size:
            x = interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)
        return x

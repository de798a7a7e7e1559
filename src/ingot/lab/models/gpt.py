"""A small language model of characters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ingot.lab.models.blocks import Block, small_normal


@dataclass(frozen=True)
class GPTSize:
    """Numbers of the model."""

    depth: int = 4
    width: int = 128
    heads: int = 4
    length: int = 128


class GPT(nn.Module):
    """Each character's successor, from all that come before it."""

    def __init__(self, symbols: int, size: GPTSize | None = None) -> None:
        super().__init__()
        size = size or GPTSize()
        self.symbols = nn.Embedding(symbols, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(
            *(Block(size.width, size.heads, 4.0, causal=True) for _ in range(size.depth))
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, symbols)
        small_normal(self)

    def forward(self, text: Tensor) -> Tensor:
        """Scores ``[batch, length, symbols]``."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.symbols(text) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))

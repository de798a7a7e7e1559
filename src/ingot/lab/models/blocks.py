"""Parts that several transformers have in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    """Self-attention with several heads."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads cannot share a width of {width}")
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, places, width]`` to the same."""
        q, k, v = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        found = scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))


def mlp(width: int, ratio: float) -> nn.Sequential:
    """Two linear layers with a wider one's activations between."""
    hidden = int(ratio * width)
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class DropPath(nn.Module):
    """Leave a residual branch out for some of the samples at random, and enlarge it for the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """The branch, or zero."""
        if not self.training or not self.rate:
            return x
        kept = torch.rand(len(x), *[1] * (x.ndim - 1), device=x.device) >= self.rate
        return x * kept / (1 - self.rate)


def rising(rate: float, depth: int) -> list[float]:
    """Rates for the blocks of a model, from none in the first to the whole in the last."""
    return [rate * number / max(1, depth - 1) for number in range(depth)]


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a normalization and beside a shortcut."""

    def __init__(
        self, width: int, heads: int, ratio: float, *, causal: bool = False, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = mlp(width, ratio)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, places, width]`` to the same."""
        x = x + self.drop_path(self.attention(self.before_attention(x)))
        return x + self.drop_path(self.mlp(self.before_mlp(x)))


def small_normal(model: nn.Module, std: float = 0.02) -> None:
    """The initial weights of transformers."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

"""Embeddings: linear maps on one-hot vectors, which are never formed where K is diagonal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ingot.layers.base import LayerAdapter, register


@register("torch.nn.modules.sparse.Embedding")
class EmbeddingAdapter(LayerAdapter):
    """Row ``token`` of the weight is the column of W that the token's one-hot vector selects.

    U is the diagonal matrix of the tokens' frequencies, so K is diagonal, too. A padding token has no
    gradient: it counts as an input of zeros.
    """

    transposed = True
    input_structure = "diagonal"

    def shape(self, module: nn.Embedding) -> tuple[tuple[int, ...], int, int]:
        d_i, d_o = module.weight.shape
        return (), d_o, d_i

    def weight(self, module: Any) -> nn.Parameter | None:
        # Gradients divided by the tokens' counts are not those of a linear map.
        return None if module.scale_grad_by_freq else super().weight(module)

    def inputs(self, module: nn.Embedding, x: Tensor, g: Tensor) -> Tensor:
        tokens = _batch_shared(x)
        return _without_padding(module, tokens, one_hot(tokens, len(module.weight)).to(g.dtype))

    def output_gradients(self, module: nn.Embedding, x: Tensor, g: Tensor) -> Tensor:
        tokens = _batch_shared(x)
        return _without_padding(module, tokens, g.reshape(*tokens.shape, g.shape[-1]))

    def input_squares(self, module: nn.Embedding, x: Tensor, g: Tensor, approx: str) -> Tensor:
        tokens = _batch_shared(x)
        squares = torch.ones_like(tokens, dtype=g.dtype)
        if approx == "reduce":
            # A sample's mean input has (count / places)² for a token: count / places² at each of its places.
            ordered = tokens.sort(dim=1).values
            last, first = (torch.searchsorted(ordered, tokens, right=right) for right in (True, False))
            squares = (last - first).to(g.dtype) / tokens.shape[1] ** 2
        squares = _without_padding(module, tokens, squares.unsqueeze(-1))
        return squares.new_zeros(len(module.weight)).index_add_(0, tokens.flatten(), squares.flatten())


def _batch_shared(tokens: Tensor) -> Tensor:
    return tokens.flatten(1) if tokens.ndim > 1 else tokens.reshape(-1, 1)


def _without_padding(module: nn.Embedding, tokens: Tensor, values: Tensor) -> Tensor:
    """Values ``[batch, shared, n]`` of tokens ``[batch, shared]``, with zeros where these are padding."""
    if module.padding_idx is None:
        return values
    return values * (tokens != module.padding_idx).unsqueeze(-1)

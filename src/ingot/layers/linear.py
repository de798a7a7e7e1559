"""Fully connected layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ingot.layers.base import LayerAdapter, register


@register("torch.nn.modules.linear.Linear", "torch_geometric.nn.dense.linear.Linear")
class LinearAdapter(LayerAdapter):
    """y = W x + b on the last dimension; whatever lies between it and the batch is shared."""

    def shape(self, module: Any) -> tuple[tuple[int, ...], int, int]:
        d_o, d_i = module.weight.shape
        return (), d_o, d_i

    def inputs(self, module: Any, x: Tensor, g: Tensor) -> Tensor:
        return batch_shared_features(x)

    def output_gradients(self, module: Any, x: Tensor, g: Tensor) -> Tensor:
        return batch_shared_features(g)


@register("transformers.pytorch_utils.Conv1D")
class Conv1DAdapter(LinearAdapter):
    """The fully connected layer of GPT-2, which stores its weight as ``[d_i, d_o]``."""

    transposed = True

    def shape(self, module: Any) -> tuple[tuple[int, ...], int, int]:
        d_i, d_o = module.weight.shape
        return (), d_o, d_i


def batch_shared_features(x: Tensor) -> Tensor:
    """``[batch, shared, features]`` from any number of dimensions."""
    if x.ndim < 3:
        return x.reshape(-1, 1, x.shape[-1])  # a single sample, or no sharing
    return x.flatten(1, -2)

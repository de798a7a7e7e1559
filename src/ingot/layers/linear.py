"""Fully connected layers."""

from __future__ import annotations

from torch import Tensor, nn

from ingot.layers.base import LayerAdapter, register


@register("torch.nn.modules.linear.Linear")
class LinearAdapter(LayerAdapter):
    """y = W x + b on the last dimension; whatever lies between it and the batch is shared."""

    def shape(self, module: nn.Linear) -> tuple[tuple[int, ...], int, int]:
        return (), module.out_features, module.in_features

    def inputs(self, module: nn.Linear, x: Tensor) -> Tensor:
        return _batch_shared_features(x)

    def output_gradients(self, module: nn.Linear, g: Tensor) -> Tensor:
        return _batch_shared_features(g)


def _batch_shared_features(x: Tensor) -> Tensor:
    if x.ndim < 3:
        return x.reshape(-1, 1, x.shape[-1])  # a single sample, or no sharing
    return x.flatten(1, -2)

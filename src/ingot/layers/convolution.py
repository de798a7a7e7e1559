"""Convolutions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad, unfold

from ingot.layers.base import LayerAdapter, register


@register("torch.nn.modules.conv.Conv2d")
class Conv2dAdapter(LayerAdapter):
    """A linear map on patches, shared by all output places; each group is a matrix of its own."""

    def shape(self, module: nn.Conv2d) -> tuple[tuple[int, ...], int, int]:
        groups, d_i = module.groups, module.weight[0].numel()
        lead = (groups,) if groups > 1 else ()
        return lead, module.out_channels // groups, d_i

    def inputs(self, module: nn.Conv2d, x: Tensor) -> Tensor:
        x = x if x.ndim == 4 else x.unsqueeze(0)
        # torch keeps the padding of every kind ("same" included) in this form, for its own forward.
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = pad(x, module._reversed_padding_repeated_twice, mode=mode)
        patches = unfold(x, module.kernel_size, dilation=module.dilation, stride=module.stride)
        return self._grouped(module, patches)

    def output_gradients(self, module: nn.Conv2d, g: Tensor) -> Tensor:
        g = g if g.ndim == 4 else g.unsqueeze(0)
        return self._grouped(module, g.flatten(-2))

    def _grouped(self, module: nn.Conv2d, x: Tensor) -> Tensor:
        """``[batch, groups * features, places]`` to ``[(groups,) batch, places, features]``."""
        if module.groups == 1:
            return x.mT
        return x.unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2)

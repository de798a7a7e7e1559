"""Convolutions of one, two and three dimensions, and their transposes."""

from __future__ import annotations

from abc import abstractmethod
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ingot.layers.base import LayerAdapter, register


class PatchAdapter(LayerAdapter):
    """A linear map on patches, shared by all output places; each group is a matrix of its own."""

    def shape(self, module: Any) -> tuple[tuple[int, ...], int, int]:
        groups = module.groups
        lead = (groups,) if groups > 1 else ()
        return lead, module.out_channels // groups, module.in_channels // groups * prod(module.kernel_size)

    def inputs(self, module: Any, x: Tensor, g: Tensor) -> Tensor:
        x, g = _batched(module, x), _batched(module, g)
        return self._grouped(module, self.patches(module, x, g.shape[2:]).flatten(1, -2))

    def output_gradients(self, module: Any, x: Tensor, g: Tensor) -> Tensor:
        return self._grouped(module, _batched(module, g).flatten(2))

    @abstractmethod
    def patches(self, module: Any, x: Tensor, places: torch.Size) -> Tensor:
        """What the kernel meets at each output place: ``[batch, channels, *kernel, places]``."""

    def _grouped(self, module: Any, x: Tensor) -> Tensor:
        """``[batch, groups * features, places]`` to ``[(groups,) batch, places, features]``."""
        if module.groups == 1:
            return x.mT
        return x.unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2)


@register(*(f"torch.nn.modules.conv.Conv{n}d" for n in (1, 2, 3)))
class ConvolutionAdapter(PatchAdapter):
    """Conv1d, Conv2d and Conv3d."""

    def patches(self, module: Any, x: Tensor, places: torch.Size) -> Tensor:
        # torch keeps the padding of every kind ("same" included) in this form, for its own forward.
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = pad(x, module._reversed_padding_repeated_twice, mode=mode)
        return _windows(x, module.kernel_size, module.dilation, module.stride, places)


@register(*(f"torch.nn.modules.conv.ConvTranspose{n}d" for n in (1, 2, 3)))
class TransposedConvolutionAdapter(PatchAdapter):
    """ConvTranspose1d to 3d: a convolution of the inputs, spread out with zeros, by the mirrored kernel."""

    def patches(self, module: Any, x: Tensor, places: torch.Size) -> Tensor:
        spread = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], module.stride, strict=True)]
        zeros = x.new_zeros(*x.shape[:2], *spread)
        every: Any = (..., *(slice(None, None, s) for s in module.stride))
        zeros[every] = x
        padding: list[int] = []
        sizes = zip(spread, module.kernel_size, module.dilation, module.padding, places, strict=True)
        for length, kernel, dilation, cut, place_count in reversed(list(sizes)):
            before = dilation * (kernel - 1) - cut
            padding += [before, place_count + dilation * (kernel - 1) - length - before]
        ones = (1,) * len(places)
        windows = _windows(pad(zeros, padding), module.kernel_size, module.dilation, ones, places)
        return windows.flip(tuple(range(2, 2 + len(places))))

    # Stored as [groups * inputs, outputs, *kernel], where inputs and kernel belong together.

    def weight_matrix(self, module: Any, weight: Tensor) -> Tensor:
        return super().weight_matrix(module, weight.unflatten(0, (module.groups, -1)).transpose(1, 2))

    def matrix_weight(self, module: Any, matrix: Tensor, weight: Tensor) -> Tensor:
        outputs, *kernel = weight.shape[1:]
        stored = matrix.reshape(module.groups, outputs, -1, *kernel)
        return stored.transpose(1, 2).reshape(weight.shape)


def _batched(module: Any, x: Tensor) -> Tensor:
    return x if x.ndim == 2 + len(module.kernel_size) else x.unsqueeze(0)


def _windows(
    x: Tensor, kernel: tuple[int, ...], dilation: tuple[int, ...], stride: tuple[int, ...], places: torch.Size
) -> Tensor:
    """Every window of ``x [batch, channels, *size]``, as ``[batch, channels, *kernel, places]``."""
    steps = x.stride()
    within = [step * d for step, d in zip(steps[2:], dilation, strict=True)]
    between = [step * s for step, s in zip(steps[2:], stride, strict=True)]
    view = x.as_strided((*x.shape[:2], *kernel, *places), (*steps[:2], *within, *between))
    return view.flatten(2 + len(kernel))

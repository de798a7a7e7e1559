"""Convolutions of one, two and three dimensions, and their transposes."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
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

    def growth(self, module: Any) -> int:
        return prod(module.kernel_size)

    def inputs(self, module: Any, x: Tensor, g: Tensor) -> Tensor:
        x, g = _batched(module, x), _batched(module, g)
        patches = self.patches(module, x, g.shape[2:])  # [channels, *kernel, batch, *places]
        features = patches.unflatten(0, (module.groups, -1)).flatten(-len(g.shape[2:]))
        features = features.reshape(module.groups, -1, *features.shape[-2:]).permute(0, 2, 3, 1)
        return features if module.groups > 1 else features[0]

    def output_gradients(self, module: Any, x: Tensor, g: Tensor) -> Tensor:
        return self._grouped(module, _batched(module, g).flatten(2))

    def mean_inputs(self, module: Any, x: Tensor, g: Tensor) -> Tensor:
        places = _batched(module, g).shape[2:]
        means = self._pooled(module, _batched(module, x), places) / prod(places)
        grouped = means.reshape(len(means), module.groups, -1).movedim(1, 0)
        return grouped if module.groups > 1 else grouped[0]

    def input_squares(self, module: Any, x: Tensor, g: Tensor, approx: str) -> Tensor:
        if approx == "reduce":
            return self.mean_inputs(module, x, g).square().sum(-2)
        places = _batched(module, g).shape[2:]
        squares = self._pooled(module, _batched(module, x).square().sum(0), places)
        return squares.reshape(module.groups, -1) if module.groups > 1 else squares.flatten()

    def _pooled(self, module: Any, x: Tensor, places: torch.Size) -> Tensor:
        """The sums of what each entry of the kernel meets, ``[..., channels, *kernel]``.

        Sums over windows are products with patterns of ones: nothing is unfolded.
        """
        dims = len(places)
        x = self.padded(module, x)
        for axis in range(dims):
            pattern = self.pattern(module, axis, x.shape[-dims], places[axis])
            # Each turn takes the first of the places away and puts its axis of the kernel behind the others.
            x = x.movedim(-dims, -1) @ pattern.to(x).mT
        return x

    def padded(self, module: Any, x: Tensor) -> Tensor:
        """The input with what is put around it, unless that is zeros."""
        return x

    @abstractmethod
    def pattern(self, module: Any, axis: int, size: int, places: int) -> Tensor:
        """How often an entry of the kernel meets a place of the input, ``[kernel, size]``, along an axis."""

    @abstractmethod
    def patches(self, module: Any, x: Tensor, places: torch.Size) -> Tensor:
        """What the kernel meets at each output place: ``[channels, *kernel, batch, *places]``."""

    def _grouped(self, module: Any, x: Tensor) -> Tensor:
        """``[batch, groups * features, places]`` to ``[(groups,) batch, places, features]``."""
        if module.groups == 1:
            return x.mT
        return x.unflatten(1, (module.groups, -1)).permute(1, 0, 3, 2)


@register(*(f"torch.nn.modules.conv.Conv{n}d" for n in (1, 2, 3)))
class ConvolutionAdapter(PatchAdapter):
    """Conv1d, Conv2d and Conv3d."""

    def patches(self, module: Any, x: Tensor, places: torch.Size) -> Tensor:
        if module.padding_mode == "zeros":
            x = pad(x, module._reversed_padding_repeated_twice)
        return _windows(self.padded(module, x), module.kernel_size, module.dilation, module.stride, places)

    def padded(self, module: Any, x: Tensor) -> Tensor:
        if module.padding_mode == "zeros":
            return x
        # torch keeps the padding of every kind ("same" included) in this form, for its own forward.
        around, batched = module._reversed_padding_repeated_twice, x.ndim == 2 + len(module.kernel_size)
        padded = pad(x if batched else x.unsqueeze(0), around, mode=module.padding_mode)
        return padded if batched else padded[0]

    def pattern(self, module: Any, axis: int, size: int, places: int) -> Tensor:
        around = module._reversed_padding_repeated_twice if module.padding_mode == "zeros" else [0] * 6
        kernel, dilation, stride = (of[axis] for of in (module.kernel_size, module.dilation, module.stride))
        return _pattern(size, places, kernel, dilation, stride, before=around[-2 - 2 * axis])


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
        return windows.flip(tuple(range(1, 1 + len(places))))

    def pattern(self, module: Any, axis: int, size: int, places: int) -> Tensor:
        # Place i of the input meets entry k of the kernel at place i stride + k dilation - padding.
        within = torch.arange(module.kernel_size[axis]).unsqueeze(1) * module.dilation[axis]
        met = torch.arange(size) * module.stride[axis] + within - module.padding[axis]
        return ((met >= 0) & (met < places)).float()

    # Stored as [groups * inputs, outputs, *kernel], where inputs and kernel belong together.

    def weight_matrix(self, module: Any, weight: Tensor) -> Tensor:
        return super().weight_matrix(module, weight.unflatten(0, (module.groups, -1)).transpose(1, 2))

    def matrix_weight(self, module: Any, matrix: Tensor, weight: Tensor) -> Tensor:
        outputs, *kernel = weight.shape[1:]
        stored = matrix.reshape(module.groups, outputs, -1, *kernel)
        return stored.transpose(1, 2).reshape(weight.shape)


def _batched(module: Any, x: Tensor) -> Tensor:
    return x if x.ndim == 2 + len(module.kernel_size) else x.unsqueeze(0)


@lru_cache(maxsize=256)
def _pattern(size: int, places: int, kernel: int, dilation: int, stride: int, before: int) -> Tensor:
    """1 where a convolution's kernel entry meets a place of its input at some output place."""
    met = torch.arange(places) * stride + torch.arange(kernel).unsqueeze(1) * dilation - before
    rows = torch.arange(kernel).unsqueeze(1).expand_as(met)
    inside = (met >= 0) & (met < size)
    pattern = torch.zeros(kernel, size)
    pattern[rows[inside], met[inside]] = 1
    return pattern


def _windows(
    x: Tensor, kernel: tuple[int, ...], dilation: tuple[int, ...], stride: tuple[int, ...], places: torch.Size
) -> Tensor:
    """Every window of ``x [batch, channels, *size]``, as ``[channels, *kernel, batch, *places]``."""
    batch, channels, *steps = x.stride()
    within = [step * d for step, d in zip(steps, dilation, strict=True)]
    between = [step * s for step, s in zip(steps, stride, strict=True)]
    return x.as_strided(
        (x.shape[1], *kernel, x.shape[0], *places), (channels, *within, batch, *between), x.storage_offset()
    )

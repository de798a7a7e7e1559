"""Triangular Toeplitz matrices: constant along each diagonal, multiplied by FFT."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import ClassVar

import torch
from torch import Tensor

from ingot.structures.base import Structure


@lru_cache(maxsize=256)
def _fft_length(least: int) -> int:
    """The smallest length from ``least`` on with no prime factor above 5, where FFTs are fast."""
    length = least
    while True:
        rest = length
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return length
        length += 1


@dataclass(frozen=True)
class _Toeplitz(Structure):
    """One entry per diagonal, the main one first: a polynomial, cut off after ``dim`` terms."""

    dim: int
    _upper: ClassVar[bool]

    @property
    def numel(self) -> int:
        return self.dim

    def _spectrum(self, x: Tensor, dim: int) -> Tensor:
        # Zero-padded so that nothing wraps around. FFTs know no bfloat16.
        x = x if x.dtype == torch.float64 else x.float()
        return torch.fft.rfft(x, _fft_length(2 * self.dim - 1), dim=dim)

    def _series(self, spectrum: Tensor, dim: int) -> Tensor:
        full = torch.fft.irfft(spectrum, _fft_length(2 * self.dim - 1), dim=dim)
        return full.narrow(dim, 0, self.dim)

    def _places(self, a: Tensor) -> Tensor:
        """How many places each diagonal has."""
        return torch.arange(self.dim, 0, -1, dtype=a.dtype, device=a.device)

    def _project(self, sums: Tensor) -> Tensor:
        """Π̂ from the sums along the diagonals: their means, doubled off the main one."""
        means = 2 * sums / self._places(sums)
        means[..., 0] /= 2
        return means

    def _filter(self, a: Tensor, x: Tensor, correlate: bool) -> Tensor:
        taps = self._spectrum(a, -1).unsqueeze(-1)
        taps = taps.conj() if correlate else taps
        return self._series(taps * self._spectrum(x, -2), -2).to(a.dtype)

    def identity(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        one = torch.zeros(self.dim, dtype=dtype, device=device)
        one[0] = 1
        return one

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self._series(self._spectrum(a, -1) * self._spectrum(b, -1), -1).to(a.dtype)

    def apply(self, a: Tensor, x: Tensor) -> Tensor:
        return self._filter(a, x, correlate=self._upper)

    def apply_t(self, a: Tensor, x: Tensor) -> Tensor:
        return self._filter(a, x, correlate=not self._upper)

    def gram(self, x: Tensor) -> Tensor:
        spectrum = self._spectrum(x, -2)
        power = (spectrum.real.square() + spectrum.imag.square()).sum(-1)
        return self._project(self._series(power, -1)).to(x.dtype)

    def self_gram(self, a: Tensor) -> Tensor:
        # The j-th diagonal of AᵀA sums up to Σₘ aₘ (dim − m − j) aₘ₊ⱼ, upper or lower alike.
        sums = self._spectrum(a, -1).conj() * self._spectrum(self._places(a) * a, -1)
        return self._project(self._series(sums, -1)).to(a.dtype)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        return (self._places(a) * a * b).sum(-1, keepdim=True)

    def flops(self, columns: int) -> int:
        # There and back for each column, and there for the entries; a product of spectra in between.
        length = _fft_length(2 * self.dim - 1)
        transform = 2.5 * length * log2(max(2, length))
        return round((2 * columns + 1) * transform + 3 * length * columns)


class LowerToeplitz(_Toeplitz):
    """Zeros above the diagonal."""

    _upper = False


class UpperToeplitz(_Toeplitz):
    """Zeros below the diagonal."""

    _upper = True

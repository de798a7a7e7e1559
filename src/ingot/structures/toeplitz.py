"""Triangular Toeplitz matrices: constant along each diagonal, multiplied by FFT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import ClassVar

import torch
from torch import Tensor

from ingot.structures.base import Structure

CHUNK = 1 << 17
"""So many numbers are transformed at a time: few enough for a cache, enough to be worth a call."""


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

    @property
    def _length(self) -> int:
        """That of the FFTs: padded with zeros so that nothing wraps around."""
        return _fft_length(2 * self.dim - 1)

    def _spectrum(self, x: Tensor) -> Tensor:
        """Of the last dimension. FFTs know no bfloat16."""
        return torch.fft.rfft(x if x.dtype == torch.float64 else x.float(), self._length)

    def _series(self, spectrum: Tensor) -> Tensor:
        return torch.fft.irfft(spectrum, self._length)[..., : self.dim]

    def _chunks(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The columns of x as rows, so many at a time that their spectra stay in the processor's cache."""
        rows, size = x.mT.contiguous(), max(1, CHUNK // self._length)
        for start in range(0, rows.shape[-2], size):
            span = slice(start, start + size)
            yield span, rows[..., span, :]

    def _places(self, a: Tensor) -> Tensor:
        """How many places each diagonal has."""
        return torch.arange(self.dim, 0, -1, dtype=a.dtype, device=a.device)

    def _project(self, sums: Tensor) -> Tensor:
        """Π̂ from the sums along the diagonals: their means, doubled off the main one."""
        means = 2 * sums / self._places(sums)
        means[..., 0] /= 2
        return means

    def _filter(self, a: Tensor, x: Tensor, correlate: bool) -> Tensor:
        taps = self._spectrum(a).unsqueeze(-2)
        taps = taps.conj() if correlate else taps
        lead = torch.broadcast_shapes(a.shape[:-1], x.shape[:-2])
        out = a.new_empty(*lead, x.shape[-1], self.dim)
        for span, rows in self._chunks(x):
            out[..., span, :] = self._series(taps * self._spectrum(rows))
        return out.mT

    def identity(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        one = torch.zeros(self.dim, dtype=dtype, device=device)
        one[0] = 1
        return one

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self._series(self._spectrum(a) * self._spectrum(b)).to(a.dtype)

    def apply(self, a: Tensor, x: Tensor) -> Tensor:
        return self._filter(a, x, correlate=self._upper)

    def apply_t(self, a: Tensor, x: Tensor) -> Tensor:
        return self._filter(a, x, correlate=not self._upper)

    def gram(self, x: Tensor) -> Tensor:
        powers = [
            torch.view_as_real(self._spectrum(rows)).square_().sum((-3, -1)) for _, rows in self._chunks(x)
        ]
        return self._project(self._series(torch.stack(powers).sum(0))).to(x.dtype)

    def self_gram(self, a: Tensor) -> Tensor:
        # The j-th diagonal of AᵀA sums up to Σₘ aₘ (dim − m − j) aₘ₊ⱼ, upper or lower alike.
        sums = self._spectrum(a).conj() * self._spectrum(self._places(a) * a)
        return self._project(self._series(sums)).to(a.dtype)

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

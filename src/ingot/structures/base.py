"""The contract that every structure keeps: six primitives on flat, batched tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class Structure(ABC):
    """A set of ``dim x dim`` matrices closed under addition, scaling and multiplication.

    A structure is a frozen value. It owns no tensor: an *element* is one flat tensor ``[..., numel]``
    that holds just the entries that may differ from zero, with any number of leading batch dimensions.
    Sums, multiples, momenta, norms and checkpoints of elements are therefore plain tensor operations,
    and a subclass only says what is special about it: ``numel`` and the six primitives below.
    Dense arguments ``x`` are ``[..., dim, n]``; batch dimensions broadcast.

    The projection Π̂ of the paper sends a symmetric S to the smallest M in the structure whose symmetric
    part (M + Mᵀ)/2 comes closest to S: diagonal entries stay, entries that stand for their mirror
    image too count double.
    """

    dim: int

    name: ClassVar[str] = ""
    """The word for this structure in text such as ``"block_diagonal(30)"``; set by ``register``."""

    invertible: ClassVar[bool] = False
    """Whether ``inverse`` exists, which the KFAC rule needs and the inverse-free rules do not."""

    @property
    @abstractmethod
    def numel(self) -> int:
        """How many entries an element has."""

    @abstractmethod
    def identity(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """The entries of the identity matrix, ``[numel]``."""

    @abstractmethod
    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """A B, again an element."""

    @abstractmethod
    def apply(self, a: Tensor, x: Tensor) -> Tensor:
        """A X for a dense X."""

    @abstractmethod
    def apply_t(self, a: Tensor, x: Tensor) -> Tensor:
        """Aᵀ X for a dense X."""

    @abstractmethod
    def gram(self, x: Tensor) -> Tensor:
        """Π̂(X Xᵀ), without forming the ``dim x dim`` matrix where the structure has fewer entries."""

    @abstractmethod
    def self_gram(self, a: Tensor) -> Tensor:
        """Π̂(Aᵀ A), likewise."""

    # What follows is generic. A structure that stores an entry once for several places of the matrix
    # overrides ``inner``; one whose elements can be inverted overrides ``inverse``.

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Σᵢⱼ AᵢⱼBᵢⱼ over the matrices (not the stored entries), ``[..., 1]``."""
        return (a * b).sum(-1, keepdim=True)

    def mean_trace(self, a: Tensor) -> Tensor:
        """tr(A) / dim, ``[..., 1]``."""
        return self.inner(a, self.identity_like(a)) / self.dim

    def inverse(self, a: Tensor) -> Tensor:
        """The inverse of a symmetric element."""
        raise NotImplementedError(
            f"{self} has no inverse. KFAC inverts its factors and takes 'dense', 'block_diagonal(k)' or "
            "'diagonal'; IKFAC makes the same step without inverting, for any structure."
        )

    def identity_like(self, a: Tensor) -> Tensor:
        """The identity in the dtype and on the device of an element."""
        return self.identity(dtype=a.dtype, device=a.device)

    def dense(self, a: Tensor) -> Tensor:
        """The matrix itself, ``[..., dim, dim]``: for tests, pictures and small sizes."""
        return self.apply(a, torch.eye(self.dim, dtype=a.dtype, device=a.device))

    def flops(self, columns: int) -> int:
        """About how many operations ``apply``, ``apply_t`` or ``gram`` take for so many columns."""
        return 2 * self.numel * columns  # each entry meets each column: a product and a sum

    @property
    def product_flops(self) -> int:
        """About how many operations ``matmul``, ``self_gram`` or ``inverse`` take."""
        return self.flops(-(-self.numel // self.dim))  # a column of B has so many entries

    def __str__(self) -> str:
        return f"{self.name or type(self).__name__}({self.dim})"

"""The contract that every structure keeps: six primitives on flat, batched tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class Square(ABC):
    """The products A Aᵀ of a structure's elements, to be kept between updates of A.

    They are applied in half the time of Aᵀ and then A. Like elements, they are flat tensors.
    """

    works_in_place: ClassVar[bool] = False
    """Whether the result of ``apply`` may take the place of its argument."""

    numel: int
    """How many entries are kept."""

    def sections(self, entries: Tensor) -> list[SquareSection]:
        """Those of the rows that do not mix with the last one, and of the others; nothing where all mix."""
        return []

    def parts(self, entries: Tensor, count: int) -> list[SquareSection]:
        """Those of about so many equal parts of the rows, which do not mix; nothing where all mix."""
        return []

    @abstractmethod
    def of(self, a: Tensor) -> Tensor:
        """The entries of A Aᵀ, ``[..., numel]``, for an element."""

    @abstractmethod
    def apply(self, entries: Tensor, x: Tensor, out: Tensor) -> Tensor:
        """A Aᵀ X for a dense X, written to ``out`` if that saves memory."""

    def ready(self, entries: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """``apply`` with these entries, for those that meet many X: what depends on them alone is done."""
        return partial(self.apply, entries)

    def into(self, entries: Tensor, out: Tensor) -> Callable[[Tensor], object]:
        """What writes A Aᵀ X to ``out``, which stays where it is, for any X of its shape."""
        return written_to(out, self.ready(entries))

    def in_place_of(self, entries: Tensor, x: Tensor, room: Tensor) -> tuple[Callable[[], object], Tensor]:
        """X A Aᵀ for an X ``[..., n, dim]`` that stays where it is, each time that its numbers are others.

        Returns what to call each time, and where the result will be: in ``room``, which has as many numbers
        and one dimension. The result's columns may be folded into two dimensions, ``[n, a, b]``.
        """
        return multiplied_in(room, x, self.ready(entries))


def written_to(out: Tensor, apply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], object]:
    """``into`` by a function to which a place may be given."""

    def write(x: Tensor) -> None:
        product = apply(x, out)
        if product is not out:
            out.copy_(product)

    return write


def multiplied_in(
    room: Tensor, x: Tensor, apply: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Callable[[], object], Tensor]:
    """``in_place_of`` by a function that multiplies with columns and may write to a place for the result."""
    result = place_in(room, x.shape, by_columns=is_by_columns(x))
    return partial(written_to(result.mT, apply), x.mT), result


def is_by_columns(x: Tensor) -> bool:
    """Whether matrices are stored column after column."""
    return x.stride(-1) != 1 and x.stride(-2) == 1


def place_in(room: Tensor, shape: Sequence[int], *, by_columns: bool) -> Tensor:
    """All of some memory with one dimension as matrices of this shape."""
    if not by_columns:
        return room.view(*shape)
    *lead, rows, columns = shape
    return room.view(*lead, columns, rows).mT


class SquareSection(NamedTuple):
    """The square of some of the rows, where these are, and its entries."""

    start: int
    stop: int
    square: Square
    entries: Tensor


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
    # overrides ``inner``; one whose elements can be inverted overrides ``inverse``; the others are ways to
    # the same results that some structures have a shorter one for.

    @property
    def repeats(self) -> bool:
        """Whether an entry may stand for several places of the matrix."""
        return type(self).inner is not Structure.inner

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Σᵢⱼ AᵢⱼBᵢⱼ over the matrices (not the stored entries), ``[..., 1]``."""
        if a.ndim == b.ndim == 1:
            return torch.dot(a, b).view(1)
        return (a * b).sum(-1, keepdim=True)

    def trace(self, a: Tensor) -> Tensor:
        """The sum of the diagonal, ``[..., 1]``."""
        return self.inner(a, self.identity_like(a))

    def norm(self, a: Tensor) -> Tensor:
        """An estimate of the spectral norm, ``[..., 1]``: three steps of power iteration on AᵀA."""
        return power_iteration(self, a, 3)

    def norm_bound(self, a: Tensor) -> Tensor:
        """A bound on the spectral norm from above that takes little time, ``[..., 1]``: Frobenius' norm."""
        return self.inner(a, a).sqrt()

    def add_identity_(self, a: Tensor, value: float) -> Tensor:
        """A plus a multiple of the identity, in the place of A."""
        return a.add_(self.identity_like(a), alpha=value)

    def add_matmul(self, c: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
        """C + α A B."""
        return torch.add(c, self.matmul(a, b), alpha=alpha)

    def add_self_gram(self, c: Tensor, a: Tensor, beta: float, alpha: float) -> Tensor:
        """β C + α Π̂(Aᵀ A)."""
        return self.self_gram(a).mul_(alpha).add_(c, alpha=beta)

    def gram_beside(self, x: Tensor, constant: float | None) -> Tensor:
        """``gram`` of X with a row of one number below it, if that is given: the inputs of a bias."""
        return self.gram(x if constant is None else beside(x, constant))

    def cross_gram(self, x: Tensor, y: Tensor) -> Tensor:
        """Π̂ of ½ (X Yᵀ + Y Xᵀ), of structures that have a ``sandwich``."""
        return self.sandwich(x, y)  # which says that there is none

    def gram_first(self, n: int) -> bool:
        """Whether ``sandwich`` of a Gram matrix takes less time than the Gram matrix of n columns of AᵀX."""
        return False

    def sandwich(self, a: Tensor, gram: Tensor) -> Tensor:
        """Π̂(Aᵀ S A) from Π̂(S), of structures where that is enough to know of a symmetric S."""
        raise NotImplementedError(f"for {self}, Π̂(S) does not tell what Π̂(Aᵀ S A) is")

    @property
    def square(self) -> Square | None:
        """How A Aᵀ is kept where it has a compact form."""
        return None

    def mixed_at(self, row: int) -> tuple[int, int]:
        """From where to where rows mix with others across the beginning of this one; nothing if none do."""
        return (row, row) if row in (0, self.dim) else (0, self.dim)

    def section(self, start: int, stop: int) -> tuple[Structure, slice]:
        """The structure of rows that mix with no others, and where its entries are."""
        assert (start, stop) == (0, self.dim), f"rows {start} to {stop} of {self} mix with others"
        return self, slice(None)

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


@dataclass(frozen=True)
class _NotKept(Square):
    """What is made of A each time, so that nothing but A is kept."""

    structure: Structure
    numel = 0

    def of(self, a: Tensor) -> Tensor:
        return a


class InTurn(_NotKept):
    """A Aᵀ as Aᵀ, and then A."""

    def apply(self, entries: Tensor, x: Tensor, out: Tensor) -> Tensor:
        return self.structure.apply(entries, self.structure.apply_t(entries, x))


@dataclass(frozen=True)
class Anew(Square):
    """A Aᵀ, made each time: with many columns that takes less time than Aᵀ and then A."""

    square: Square
    numel = 0

    def sections(self, entries: Tensor) -> list[SquareSection]:
        found = self.square.sections(entries)
        return [section._replace(square=Anew(section.square)) for section in found]

    def of(self, a: Tensor) -> Tensor:
        return a

    def apply(self, entries: Tensor, x: Tensor, out: Tensor) -> Tensor:
        return self.square.apply(self.square.of(entries), x, out)


class Symmetric(_NotKept):
    """A symmetric A in the place of A Aᵀ: the inverses of KFAC."""

    def apply(self, entries: Tensor, x: Tensor, out: Tensor) -> Tensor:
        return self.structure.apply(entries, x)


def beside(x: Tensor, constant: float) -> Tensor:
    """X with a row of one number below it, in the layout of X."""
    number = x.new_full((), constant)
    if x.stride(-1) == 1:
        return torch.cat((x, number.expand(*x.shape[:-2], 1, x.shape[-1])), dim=-2)
    return torch.cat((x.mT, number.expand(*x.shape[:-2], x.shape[-1], 1)), dim=-1).mT


def power_start(a: Tensor, dim: int | None = None) -> Tensor:
    """Where power iteration starts: a vector with no preferred direction, the same every time."""
    dim = a.shape[-1] if dim is None else dim
    # The fractional parts of multiples of the golden ratio.
    return (torch.arange(1, dim + 1, device=a.device, dtype=a.dtype) * 0.6180339887).frac() - 0.4


def power_iteration(structure: Structure, a: Tensor, iterations: int) -> Tensor:
    """|A|₂ from below, by power iteration on AᵀA (on A itself it misses that of a non-symmetric A)."""
    tiny = torch.finfo(a.dtype).tiny
    x = power_start(a, structure.dim).unsqueeze(-1).expand(*a.shape[:-1], structure.dim, 1)
    norm = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    for _ in range(iterations):
        x = structure.apply_t(a, structure.apply(a, x / norm.clamp_min(tiny)))
        norm = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    return norm.squeeze(-1).sqrt()

"""Each fast path of the library beside the plain way that it replaces: the same result, in less time.

A new one is a function that builds both ways for a shape, and an entry at the end of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.side_by_side import TOLERANCE, FastPath, Ways, relative_error
from ingot.rules import Curvature, Factor, curvature, ingd, move
from ingot.structures import Dense, Diagonal, bind, parse

# --- Statistics -------------------------------------------------------------------------------------------


def column_sums(rows: int, d: int) -> Ways:
    x, ones = torch.randn(rows, d), torch.ones(1, rows)
    return lambda: x.mT.square().sum(-1), lambda: (ones @ x.square()).squeeze(0)


def gram_first(rows: int, d: int) -> Ways:
    x, k = torch.randn(rows, d), torch.eye(d) + 0.01 * torch.randn(d, d)
    factor = Factor(Dense(d), k.flatten())

    def fast() -> Tensor:
        return (k.mT @ (x.mT @ x) @ k).flatten()

    def plain() -> Tensor:  # the definition, whatever the library makes of it
        half = x @ k
        return (half.mT @ half).flatten()

    assert relative_error(curvature(factor, x.mT), plain()) < TOLERANCE
    return plain, fast


# --- The gradient and the weights -------------------------------------------------------------------------


def natural_gradient(k: Factor, c: Factor, gradient: Tensor) -> Tensor:
    """C Cᵀ ∇W K Kᵀ by the primitives of any structure, one product after the other."""
    left = c.structure.apply(c.entries, c.structure.apply_t(c.entries, gradient))
    return k.structure.apply(k.entries, k.structure.apply_t(k.entries, left.mT)).mT


def row_chunks(d: int, chunk: int) -> Ways:
    """Rows of the gradient on their way to the natural gradient: large temporaries are page faults."""
    gradient, k, c = torch.randn(d, d), 1 + 0.1 * torch.randn(d), 1 + 0.1 * torch.randn(d)
    of_k, of_c = Factor(Diagonal(d), k), Factor(Diagonal(d), c)
    out, squares = torch.empty(d, d), (k.square(), c.square().unsqueeze(-1))

    def fast() -> Tensor:
        for start in range(0, d, chunk):
            rows = slice(start, start + chunk)
            torch.mul(gradient[rows], squares[0], out=out[rows]).mul_(squares[1][rows])
        return out

    return lambda: natural_gradient(of_k, of_c, gradient), fast


def fused_step(d: int) -> Ways:
    """Weight decay, momentum and step in one pass over the weights."""
    gradient = torch.randn(d, d)
    weights, momenta = ([torch.ones(d, d) for _ in range(2)] for _ in range(2))
    lr, decay, momentum = 1e-3, 1e-2, 0.9

    def plain() -> Tensor:
        update = gradient + decay * weights[0]
        momenta[0].mul_(momentum).add_(update)
        return weights[0].sub_(momenta[0], alpha=lr)

    def fast() -> Tensor:
        torch._fused_sgd_(
            [weights[1]],
            [gradient],
            [momenta[1]],
            weight_decay=decay,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
        return weights[1]

    return plain, fast


def cached_square(d: int) -> Ways:
    """C Cᵀ and K Kᵀ are the same until the next update of the factors."""
    gradient = torch.randn(d, d)
    k, c = (torch.eye(d) + 0.01 * torch.randn(d, d) for _ in range(2))
    of_k, of_c = Factor(Dense(d), k.flatten()), Factor(Dense(d), c.flatten())
    square_k, square_c = k @ k.mT, c @ c.mT
    return lambda: natural_gradient(of_k, of_c, gradient), lambda: square_c @ gradient @ square_k


# --- Factors ----------------------------------------------------------------------------------------------


def smooth_length(d: int, columns: int) -> Ways:
    """A Toeplitz product by FFT, whose length may be anything from 2 d - 1 on."""
    taps, x = torch.randn(d), torch.randn(d, columns)

    def product(length: int) -> Tensor:
        spectrum = torch.fft.rfft(taps, length).unsqueeze(-1) * torch.fft.rfft(x, length, dim=0)
        return torch.fft.irfft(spectrum, length, dim=0)[:d]

    return partial(product, 2 * d - 1), partial(product, next_smooth(2 * d - 1))


def next_smooth(least: int) -> int:
    """The smallest number from here on without a prime factor above 5."""
    length = least
    while _without_small_primes(length) > 1:
        length += 1
    return length


def _without_small_primes(number: int) -> int:
    for prime in (2, 3, 5):
        while number % prime == 0:
            number //= prime
    return number


def batched_layers(structure: str, layers: int, d: int) -> Ways:
    """The factor updates of layers that have the same shape."""
    s = bind(parse(structure), d)
    entries = s.identity() + 0.01 * torch.randn(layers, s.numel)
    h = s.identity() + 0.01 * torch.randn(layers, s.numel)

    def update(entries: Tensor, found: Tensor) -> Tensor:
        factor, h = Factor(s, entries), Curvature(found)
        m_k, m_c = ingd(factor, factor, h, h, 1e-3)
        return torch.stack((move(factor, m_k, 0.1), move(factor, m_c, 0.1)))

    def one_by_one() -> Tensor:
        return torch.stack([update(*pair) for pair in zip(entries, h, strict=True)], dim=1)

    return one_by_one, partial(update, entries, h)


def _paths() -> Iterator[FastPath]:
    yield FastPath(
        "column sums of squares by a product with ones",
        "squares summed along the columns",
        column_sums,
        [{"rows": 128, "d": 785}, {"rows": 1024, "d": 257}, {"rows": 8192, "d": 145}],
    )
    yield FastPath(
        "dense statistics, Gram matrix first",
        "rows times K first",
        gram_first,
        [{"rows": 1024, "d": 257}, {"rows": 8192, "d": 145}, {"rows": 2048, "d": 1025}],
    )
    yield FastPath(
        "diagonal factors on chunks of rows of the gradient",
        "on all rows at once",
        row_chunks,
        [{"d": 512, "chunk": 128}, {"d": 4080, "chunk": 128}],
    )
    yield FastPath(
        "weight decay, momentum and step fused", "one after the other", fused_step, [{"d": 256}, {"d": 1024}]
    )
    yield FastPath(
        "dense K Kᵀ and C Cᵀ kept between updates",
        "four products a step",
        cached_square,
        [{"d": 256}, {"d": 512}],
    )
    yield FastPath(
        "FFTs of smooth length",
        "of length 2 d - 1",
        smooth_length,
        [{"d": 257, "columns": 1024}, {"d": 785, "columns": 128}],
    )
    for structure in ("diagonal", "block_diagonal(30)", "triu_toeplitz"):
        yield FastPath(
            f"update of equal layers in one go, {structure}",
            "layer by layer",
            partial(batched_layers, structure),
            [{"layers": 16, "d": 256}],
        )


PATHS = tuple(_paths())

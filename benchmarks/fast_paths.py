"""Each fast path of the library beside the plain way that it replaces: the same result, in less time.

A new one is a function that builds both ways for a shape, and an entry at the end of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.side_by_side import FastPath, Ways
from ingot.layers.convolution import ConvolutionAdapter
from ingot.natural import Scales, fused_descent
from ingot.rows import RowSteps
from ingot.rules import Curvature, Factor, Product, curvature, ingd, move, natural_gradient
from ingot.statistics import Grams
from ingot.structures import Structure, bind, parse
from ingot.structures.base import InTurn, beside
from ingot.structures.dense import symmetric_product

# --- Statistics -------------------------------------------------------------------------------------------


def gram_first(structure: str, rows: int, d: int) -> Ways:
    """Π̂(Kᵀ XᵀX K) from Π̂(XᵀX), without K times every row."""
    s = bind(parse(structure), d)
    factor, x = Factor(s, _near_identity(s)), torch.randn(rows, d)
    assert s.gram_first(rows)
    return lambda: curvature(factor, x.mT), lambda: s.sandwich(factor.entries, s.gram(x.mT))


def bias_beside(structure: str, rows: int, d: int) -> Ways:
    """The constant input of a bias, without a copy of all inputs."""
    s, x = bind(parse(structure), d + 1), torch.randn(rows, d)
    return lambda: s.gram(beside(x.mT, 1.0)), lambda: s.gram_beside(x.mT, 1.0)


def shared_gram(structure: str, rows: int, d: int) -> Ways:
    """The Gram matrix of the inputs that q, k and v have in common."""
    s, x = bind(parse(structure), d), torch.randn(rows, d)

    def fast() -> Tensor:
        grams = Grams()
        return torch.stack([grams.of(s, x.mT, None) for _ in range(3)])

    return lambda: torch.stack([s.gram(x.mT) for _ in range(3)]), fast


def symmetric_halves(rows: int, d: int) -> Ways:
    """X Xᵀ without half of what is below its diagonal."""
    x = torch.randn(d, rows)
    return lambda: x @ x.mT, lambda: symmetric_product(x, x)


def convolution(approx: str, channels: int, size: int) -> Ways:
    """The squares of a convolution's inputs, or their means over places, without unfolding them."""
    module, adapter = torch.nn.Conv2d(channels, channels, 3, padding=1), ConvolutionAdapter()
    x = torch.randn(32, channels, size, size)
    g = torch.empty(32, channels, size, size)
    if approx == "reduce":
        return lambda: adapter.inputs(module, x, g).mean(-2), lambda: adapter.mean_inputs(module, x, g)

    def fast() -> Tensor:
        squares = adapter.input_squares(module, x, g, "expand")
        assert squares is not None
        return squares

    return lambda: adapter.inputs(module, x, g).square().sum((-3, -2)), fast


# --- The gradient and the weights -------------------------------------------------------------------------


def _near_identity(s: Structure) -> Tensor:
    return s.identity() + 0.01 * torch.randn(s.numel)


def kept_square(structure: str, d: int) -> Ways:
    """C Cᵀ and K Kᵀ are the same until the next update of the factors: half the products."""
    s, gradient = bind(parse(structure), d), torch.randn(d, d)
    entries = _near_identity(s)
    square = s.square
    assert square is not None
    in_turn, kept = Product(InTurn(s), entries), Product(square, square.of(entries))
    return lambda: natural_gradient(in_turn, in_turn, gradient), lambda: natural_gradient(
        kept, kept, gradient
    )


def row_chunks(d: int) -> Ways:
    """Rows of a large weight on their way through all operations: large temporaries are page faults."""
    gradient, ones = torch.randn(d, d), Scales(1 + torch.rand(d, 1), 1 + torch.rand(d), None)
    weights, momenta = ([torch.ones(d, d) for _ in range(2)] for _ in range(2))
    length, decay, rate = 1e-3, 1e-2, 0.9

    def plain() -> Tensor:
        new = torch.mul(gradient, ones.rows).mul_(ones.columns).add_(momenta[0], alpha=rate)
        torch.dot(new.view(-1), new.view(-1))
        momenta[0] = new
        fused_descent([weights[0]], [new], length, decay)
        return weights[0]

    def fast() -> Tensor:
        whole = RowSteps([weights[1], gradient, momenta[1]], ones, rate)
        whole.sums_of_squares()
        whole.descend(length, decay)
        return weights[1]

    return plain, fast


def fused_step(d: int) -> Ways:
    """Weight decay and step in one pass over the weights."""
    momentum = torch.randn(d, d)
    weights = [torch.ones(d, d) for _ in range(2)]
    length, decay = 1e-3, 1e-2

    def fast() -> Tensor:
        fused_descent([weights[1]], [momentum], length, decay)
        return weights[1]

    return lambda: weights[0].mul_(1 - decay).sub_(momentum, alpha=length), fast


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
    for structure in ("dense", "block_diagonal(30)", "hierarchical(15,15)"):
        yield FastPath(
            f"statistics by the Gram matrix first, {structure}",
            "rows times K first",
            partial(gram_first, structure),
            [{"rows": 1024, "d": 257}, {"rows": 8192, "d": 145}],
        )
    for structure in ("dense", "block_diagonal(30)", "hierarchical(15,15)", "diagonal"):
        yield FastPath(
            f"a bias beside the inputs, {structure}",
            "a copy of all inputs",
            partial(bias_beside, structure),
            [{"rows": 1024, "d": 256}, {"rows": 128, "d": 784}],
        )
    yield FastPath(
        "symmetric products by halves",
        "as any product",
        symmetric_halves,
        [{"rows": 512, "d": 512}, {"rows": 785, "d": 785}, {"rows": 1024, "d": 1025}],
    )
    for structure in ("dense", "diagonal"):
        yield FastPath(
            f"inputs of q, k and v, {structure}",
            "three times",
            partial(shared_gram, structure),
            [{"rows": 1024, "d": 257}],
        )
    for approx, name in (("expand", "squares"), ("reduce", "means")):
        yield FastPath(
            f"{name} of a convolution's inputs",
            "of its unfolded inputs",
            partial(convolution, approx),
            [{"channels": 16, "size": 16}, {"channels": 128, "size": 4}],
        )
    for structure in ("dense", "block_diagonal(30)", "hierarchical(15,15)"):
        yield FastPath(
            f"K Kᵀ and C Cᵀ kept between updates, {structure}",
            "four products a step",
            partial(kept_square, structure),
            [{"d": 256}, {"d": 512}],
        )
    yield FastPath(
        "weight decay and step fused", "one after the other", fused_step, [{"d": 256}, {"d": 1024}]
    )
    yield FastPath("large weights in parts of rows", "all rows at once", row_chunks, [{"d": 4096}])
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

"""The curvature of common losses at a model's output, as vectors to send back through the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softmax

# For each loss, of outputs [..., size]: a random vector v with E[v vᵀ] = H, the Hessian of one output's loss,
# and the columns of a matrix S with S Sᵀ = H.


def _sample_cross_entropy(output: Tensor) -> Tensor:
    p = softmax(output, dim=-1)
    drawn = torch.multinomial(p.reshape(-1, p.shape[-1]), 1).reshape(p.shape[:-1])
    return p - one_hot(drawn, p.shape[-1])


def _column_cross_entropy(output: Tensor, i: int) -> Tensor:
    p = softmax(output, dim=-1)
    column = -p * p[..., i : i + 1].sqrt()
    column[..., i] += p[..., i].sqrt()
    return column


def _sample_binary_cross_entropy(output: Tensor) -> Tensor:
    p = output.sigmoid()
    return p - torch.bernoulli(p)


def _column_binary_cross_entropy(output: Tensor, i: int) -> Tensor:
    p = output.sigmoid()
    return _only(i, (p * (1 - p)).sqrt())


def _sample_mse(output: Tensor) -> Tensor:
    return 2**0.5 * torch.randn_like(output)


def _column_mse(output: Tensor, i: int) -> Tensor:
    return _only(i, torch.full_like(output, 2**0.5))


def _only(i: int, x: Tensor) -> Tensor:
    alone = torch.zeros_like(x)
    alone[..., i] = x[..., i]
    return alone


_LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "cross_entropy": (_sample_cross_entropy, _column_cross_entropy),
    "binary_cross_entropy": (_sample_binary_cross_entropy, _column_binary_cross_entropy),
    "mse": (_sample_mse, _column_mse),
}


def directions(
    output: Tensor, loss: str, samples: int | None = 1, reduction: str = "mean", dim: int = -1
) -> Iterator[Tensor]:
    """Vectors in the shape of the output whose outer products sum up to the Hessian of the loss there.

    A loss is a mean or sum over outputs, the positions along all dimensions but ``dim``, and has no curvature
    between these. So each vector holds a part for each of the outputs, for its own term of the loss.
    ``samples`` random vectors have that sum as their expectation; with None the vectors are one for each
    entry of an output, and the sum is exact.
    """
    if loss not in _LOSSES:
        raise ValueError(f"loss must be one of {', '.join(map(repr, _LOSSES))}; got {loss!r}")
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise ValueError(f"samples must be at least 1, or None for the exact curvature; got {samples!r}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum'; got {reduction!r}")
    sample, column = _LOSSES[loss]
    output = output.movedim(dim, -1)
    size = output.shape[-1]
    # The mean of cross entropy is over outputs, that of the other losses over their entries as well.
    scale = size**-0.5 if reduction == "mean" and loss != "cross_entropy" else 1.0
    scale /= (samples or 1) ** 0.5
    vectors = (
        (sample(output) for _ in range(samples)) if samples else (column(output, i) for i in range(size))
    )
    return ((scale * vector).movedim(-1, dim) for vector in vectors)

"""The paper's picture of structures: K, what K Kᵀ is then, and its inverse, entry by entry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from ingot.structures import Structure, bind, parse

SHOWN = (
    "dense",
    "diagonal",
    "block_diagonal(4)",
    "tril",
    "triu",
    "rank_tril(1)",
    "rank_triu(1)",
    "hierarchical(3,3)",
    "tril_toeplitz",
    "triu_toeplitz",
)
"""All structures of the paper, of sizes that can be seen."""

COLUMNS = ("K", "K Kᵀ", "(K Kᵀ)⁻¹")
COLOURS = LinearSegmentedColormap.from_list("signs", ["#D55E00", "#f2f2f2", "#0072B2"])


def matrices(structure: Structure) -> tuple[Tensor, Tensor, Tensor]:
    """K with random entries near the identity, K Kᵀ and its inverse."""
    torch.manual_seed(0)
    entries = structure.identity(dtype=torch.float64)
    entries = entries + 0.25 * torch.randn_like(entries)
    k = structure.dense(entries)
    square = k @ k.mT
    return k, square, torch.linalg.inv(square)


def plot_structures(texts: Sequence[str] = SHOWN, dim: int = 16) -> Figure:
    """Three pictures for each structure: what is zero is grey, blue is positive and orange negative."""
    abreast = 2 if len(texts) > 3 else 1  # structures in a row
    rows = -(-len(texts) // abreast)
    figure = Figure(figsize=(4.6 * abreast, 1.35 * rows + 0.5), layout="constrained")
    for part, side in enumerate(figure.subfigures(1, abreast, squeeze=False, wspace=0.06)[0]):
        grid = side.subplots(rows, 3, squeeze=False)
        for row, text in zip(grid, texts[part * rows : (part + 1) * rows], strict=False):
            structure = bind(parse(text), dim)
            for axes, matrix in zip(row, matrices(structure), strict=True):
                axes.imshow(shade(matrix), cmap=COLOURS, vmin=-1, vmax=1, interpolation="nearest")
            row[0].set_ylabel(f"{in_lines(text)}\n{structure.numel} of {dim**2}", fontsize=8)
        for axes in grid.flat:
            axes.set(xticks=[], yticks=[])
            axes.set_visible(bool(axes.images))
        for axes, title in zip(grid[0], COLUMNS, strict=True):
            axes.set_title(title, fontsize=10)
    return figure


def in_lines(text: str, width: int = 20) -> str:
    """Long text broken after commas, so that it fits beside a picture."""
    lines = [""]
    for part in re.split("(?<=,)", text):
        if len(lines[-1] + part) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def shade(matrix: Tensor) -> NDArray[Any]:
    """From -1 to 1; what is not zero is far enough from it to be seen."""
    size = matrix.abs() / matrix.abs().max()
    shades = matrix.sign() * (0.3 + 0.7 * size.sqrt())
    found: NDArray[Any] = shades.where(size > 1e-9, 0).numpy()
    return found

"""How much of each model of the zoo is preconditioned: ``python -m tests.shares`` writes the docs' table."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ingot import SINGD, NaturalGradient
from tests.zoo import BUILDERS, build

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- shares -->\n", "<!-- end of shares -->"


class Share(NamedTuple):
    """Of the trained entries: those that are preconditioned."""

    of_linear_weights: float
    of_all: float

    def __str__(self) -> str:
        return " | ".join(f"{100 * share:.1f} %" for share in self)


def share_of(model: nn.Module, optimizer: NaturalGradient) -> Share:
    """What an optimizer did with a model, once it has made a step."""
    description = optimizer.describe()
    done = {row.name for row in description.rows if row.k}
    sizes = {True: 0, False: 0}
    names = {p: name for name, p in model.named_parameters()}
    for p in {p for module in model.modules() for p in _linear_weights(module) if p.requires_grad}:
        sizes[names[p] in done] += p.numel()
    return Share(sizes[True] / sum(sizes.values()), description.preconditioned)


def _linear_weights(module: nn.Module) -> list[nn.Parameter]:
    """The matrices of a module that is a linear layer, a convolution or attention by its name."""
    kind = type(module).__name__
    if not any(word in kind for word in ("Linear", "Conv", "MultiheadAttention")):
        return []
    named = module._parameters.items()
    return [p for name, p in named if p is not None and name.endswith("weight") and p.ndim > 1]


def table() -> str:
    lines = ["| model | of linear weights | of all parameters |", "| --- | --- | --- |"]
    for name in BUILDERS:
        case = build(name)
        optimizer = SINGD(case.model)
        case.loss(case.model).backward()
        optimizer.step()
        lines.append(f"| `{name}` | {share_of(case.model, optimizer)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    after = rest[rest.index(END) :]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{after}", "utf-8")

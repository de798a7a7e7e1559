"""Beyond the paper: a deep autoencoder, on which second-order methods were first shown to shine."""

from __future__ import annotations

import itertools

from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ingot.lab.recipes.base import Options, recipe
from ingot.lab.recipes.digits import split_digits
from ingot.lab.task import Regression, Task, Tensors, Training


def network(widths: tuple[int, ...]) -> nn.Module:
    """Linear layers down to a few numbers, and up again."""
    layers: list[nn.Module] = []
    both_ways = (*widths, *widths[-2::-1])
    for before, after in itertools.pairwise(both_ways):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@recipe("autoencoder", "deep autoencoder of scikit-learn's digits; nothing is downloaded")
def autoencoder(options: Options) -> Task:
    """Pixels are learned as probabilities."""
    train_x, _, test_x, _ = split_digits()
    train, test = (x.flatten(1) for x in (train_x, test_x))
    large = (64, 128, 64, 32, 8)
    widths = options.sized(full=large, small=large, tiny=(64, 16, 4))
    return Task(
        title="Deep autoencoder of scikit-learn's digits",
        model=lambda: network(widths),
        train=Tensors(train, train),
        test=Tensors(test, test),
        objective=Regression(binary_cross_entropy_with_logits, "cross entropy of a pixel"),
        training=Training(epochs=options.sized(full=40, small=40, tiny=2), batch_size=64),
    )

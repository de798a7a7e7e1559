"""The default: handwritten digits, as scikit-learn embeds them, and a small convolutional network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ingot.lab.recipes.base import Options, recipe
from ingot.lab.task import Task, Tensors, Training

TEST_EXAMPLES = 450


def network(width: int = 16) -> nn.Module:
    """Three convolutions and a linear layer for 8x8 images.

    Normalizations are those of each sample alone, so that a batch may be divided among processes.
    """
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.GroupNorm(4, width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
        nn.GroupNorm(4, 2 * width),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1, stride=2),
        nn.GroupNorm(4, 2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 2 * 2, 10),
    )


def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels: a stratified split that is always the same."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=TEST_EXAMPLES, stratify=labels, random_state=0
    )
    return _pixels(train_x), torch.as_tensor(train_y), _pixels(test_x), torch.as_tensor(test_y)


def _pixels(rows: object) -> Tensor:
    """Rows of 64 grey values from 0 to 16 as images of one channel, from 0 to 1."""
    return torch.as_tensor(rows, dtype=torch.float32).div(16).unflatten(1, (1, 8, 8))


@recipe("digits", "small convolutional network on scikit-learn's digits; nothing is downloaded")
def digits(options: Options) -> Task:
    """1347 images to learn from, 450 to judge by."""
    train_x, train_y, test_x, test_y = split_digits()
    return Task(
        title="Small convolutional network on scikit-learn's digits",
        model=lambda: network(options.sized(full=16, small=16, tiny=4)),
        train=Tensors(train_x, train_y),
        test=Tensors(test_x, test_y),
        training=Training(epochs=options.sized(full=15, small=15, tiny=2), batch_size=64),
    )

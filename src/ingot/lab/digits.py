"""Handwritten digits, as scikit-learn embeds them, and a small convolutional network that reads them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from ingot.lab.train import Task

TEST_EXAMPLES = 450


def network() -> nn.Module:
    """Three convolutions and a linear layer for 8x8 images; the normalizations are AdamW's to train."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def digits() -> Task:
    """The task, in a stratified split that is always the same; nothing is downloaded."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=TEST_EXAMPLES, stratify=labels, random_state=0
    )
    return Task(
        title="Small convolutional network on scikit-learn's digits",
        train_x=_pixels(train_x),
        train_y=torch.as_tensor(train_y),
        test_x=_pixels(test_x),
        test_y=torch.as_tensor(test_y),
        model=network,
    )


def _pixels(rows: object) -> torch.Tensor:
    """Rows of 64 grey values from 0 to 16 as images of one channel, from 0 to 1."""
    return torch.as_tensor(rows, dtype=torch.float32).div(16).unflatten(1, (1, 8, 8))

"""A text file as numbered characters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ingot.lab.data.places import VARIABLE, MissingDataError, look_for

TEST_SHARE = 10
"""The last of so many parts of the text is for tests."""


class Passages(Dataset[tuple[Tensor, Tensor]]):
    """Passages of one length, each with the characters that follow."""

    gives_batches = True

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        starts = torch.as_tensor(indices).unsqueeze(1) * self.length
        places = starts + torch.arange(self.length + 1)
        chosen = self.text[places]
        return chosen[:, :-1], chosen[:, 1:]


class Text(NamedTuple):
    """Training and test passages, and how many characters there are."""

    train: Passages
    test: Passages
    symbols: int


def load_text(folder: Path | None, length: int, name: str = "tinyshakespeare.txt") -> Text:
    """Passages of a text file: that of this name, or else the only one there is."""
    if folder is None:
        raise MissingDataError(
            f"a text is needed: put any text file into a folder and name it by --data-dir or {VARIABLE}.\n"
            "The usual one, where there is a network:\n"
            "  curl -o DATA/tinyshakespeare.txt "
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
        )
    file = look_for(folder, name, "*.txt")
    if file is None:
        raise MissingDataError(f"there is no text file in {folder}: put one there, such as {name}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MissingDataError(f"{file} is no text in UTF-8 ({error}): give another file") from error
    found = numbered(text, length)
    if not len(found.test):
        raise MissingDataError(f"{file} is too short for passages of {length} characters: give a longer text")
    return found


def numbered(text: str, length: int) -> Text:
    """Passages of a text, in which each character is its place among all that there are."""
    symbols = sorted(set(text))
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    encoded = torch.tensor([numbers[symbol] for symbol in text])
    cut = len(encoded) - len(encoded) // TEST_SHARE
    return Text(Passages(encoded[:cut], length), Passages(encoded[cut:], length), len(symbols))

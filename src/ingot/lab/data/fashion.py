"""Fashion-MNIST, from its four files: Debian's package has them, a folder of the user's may, the hub does."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ingot.lab.data.places import VARIABLE, MissingDataError, look_for

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FOLDER, HUB = "fashion-mnist", "zalando-datasets/fashion_mnist"


def load_fashion(folder: Path | None, train: int, test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """So many first images to train with and to test with, ``[n, 1, 28, 28]`` from 0 to 1, with labels."""
    place = look_for(folder, FOLDER) or (DEBIAN if DEBIAN.is_dir() else None)
    arrays = _from_hub(train, test) if place is None else _from_files(place)
    (train_x, train_y), (test_x, test_y) = arrays
    return _pixels(train_x[:train]), _labels(train_y[:train]), _pixels(test_x[:test]), _labels(test_y[:test])


def _pixels(images: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(images)).unsqueeze(1).float().div_(255)


def _labels(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(labels)).long()


_Pair = tuple[np.ndarray, np.ndarray]


def _from_files(place: Path) -> tuple[_Pair, _Pair]:
    train, test = (
        (_idx(place, f"{of}-images-idx3"), _idx(place, f"{of}-labels-idx1")) for of in ("train", "t10k")
    )
    return train, test


def _idx(place: Path, stem: str) -> np.ndarray:
    """An array in MNIST's format: two zero bytes, the type, the number of dimensions, these, the numbers."""
    file = look_for(place, f"{stem}-ubyte", f"{stem}-ubyte.gz")
    if file is None:
        raise MissingDataError(f"{place} has no {stem}-ubyte.gz: it needs the four files of Fashion-MNIST")
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise MissingDataError(f"{file} is no file of bytes in MNIST's format")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], ">i4")
    numbers = np.frombuffer(content[start:], np.uint8)
    if numbers.size != shape.prod():
        raise MissingDataError(
            f"{file} has {numbers.size} numbers, not {'x'.join(map(str, shape))}: it is cut off"
        )
    return numbers.reshape(shape)


def _from_hub(train: int, test: int) -> tuple[_Pair, _Pair]:
    from datasets import load_dataset

    try:
        found = load_dataset(HUB)
    except Exception as error:  # of the network, the hub, the files: there is no common class
        raise MissingDataError(
            f"Fashion-MNIST is not here and cannot be downloaded ({str(error).splitlines()[0]}).\n"
            "On Debian and its like, get it by\n  apt install dataset-fashion-mnist\n"
            f"or put its four files (train-images-idx3-ubyte.gz and so on) into DATA/{FOLDER} and name the "
            f"folder: --data-dir DATA, or {VARIABLE}=DATA"
        ) from error

    def pair(split: str, count: int) -> _Pair:
        rows = found[split][:count]
        return np.stack([np.array(image) for image in rows["image"]]), np.array(rows["label"])

    return pair("train", train), pair("test", test)

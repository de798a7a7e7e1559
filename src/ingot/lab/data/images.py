"""Images with labels: from ``.npz`` files, parquet files, folders of images, or the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ingot.lab.data.places import VARIABLE, MissingDataError, look_for
from ingot.lab.task import Tensors

IN_MEMORY = 1 << 30
"""Images of no more bytes than this are decoded once and kept."""


@dataclass(frozen=True)
class ImageSource:
    """An image data set.

    Attributes:
        name: Its name here, and that of its folder.
        title: Its name in reports.
        hub: Its place on the Hugging Face hub.
        classes: How many.
        size: Rows and columns of an image, unless told otherwise.
        image, label: Its columns on the hub.
        test: Its split for tests there.
        config: Which of several variants.
    """

    name: str
    title: str
    hub: str
    classes: int
    size: int
    image: str = "image"
    label: str = "label"
    test: str = "validation"
    config: str | None = None


SOURCES = {
    source.name: source
    for source in (
        ImageSource("cifar100", "CIFAR-100", "uoft-cs/cifar100", 100, 32, "img", "fine_label", "test"),
        ImageSource("imagewoof", "ImageWoof-10", "frgfm/imagewoof", 10, 64, config="160px"),
        ImageSource("imagenet100", "ImageNet-100", "clane9/imagenet-100", 100, 224),
        ImageSource("cifar10", "CIFAR-10", "uoft-cs/cifar10", 10, 32, "img", "label", "test"),
    )
}


class Images(NamedTuple):
    """Training and test images as bytes ``[3, size, size]`` with labels, and what they have in common."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    size: int


def load_images(source: ImageSource, folder: Path | None, size: int | None = None) -> Images:
    """The data set, from the user's folder if it is there, or else from the hub.

    In the folder it may be ``NAME*.npz`` with the arrays x_train, y_train, x_test and y_test, or a folder
    ``NAME`` with parquet files, or with images in folders train/CLASS and test/CLASS (or val/CLASS).
    """
    file = look_for(folder, f"{source.name}.npz", f"{source.name}_*.npz")
    if file is not None:
        return _from_arrays(file, size)
    return _from_datasets(source, look_for(folder, source.name), size or source.size)


# --- Arrays -----------------------------------------------------------------------------------------------


def _from_arrays(file: Path, size: int | None) -> Images:
    keys = ("x_train", "y_train", "x_test", "y_test")
    with np.load(file, allow_pickle=False) as arrays:
        missing = [key for key in keys if key not in arrays]
        if missing:
            raise MissingDataError(
                f"{file} has no {', '.join(missing)}: it needs the arrays {', '.join(keys)}"
            )
        x_train, y_train, x_test, y_test = (arrays[key] for key in keys)
    if x_train.dtype != np.uint8 or x_train.ndim != 4 or x_train.shape[-1] != 3:
        raise MissingDataError(
            f"{file}: images are bytes of shape [n, size, size, 3], but x_train is {x_train.dtype} "
            f"{x_train.shape}"
        )
    train, test = (_tensors(x, y, size) for x, y in ((x_train, y_train), (x_test, y_test)))
    classes = 1 + int(max(y_train.max(), y_test.max()))
    return Images(train, test, classes, train.tensors[0].shape[-1])


def _tensors(images: Any, labels: Any, size: int | None) -> Tensors:
    x = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).contiguous()
    return Tensors(_resized(x, size or x.shape[-1]), torch.from_numpy(np.asarray(labels)).long())


def _resized(x: Tensor, size: int) -> Tensor:
    """Images as bytes of another size, the middle of what is not square."""
    side = min(x.shape[-2:])
    top, left = (x.shape[-2] - side) // 2, (x.shape[-1] - side) // 2
    x = x[..., top : top + side, left : left + side]
    if side == size:
        return x.contiguous()
    found = torch.nn.functional.interpolate(
        x.float(), (size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return found.round_().clamp_(0, 255).byte()


# --- Hugging Face datasets --------------------------------------------------------------------------------


class Decoded(Dataset[tuple[Tensor, int]]):
    """Images that are decoded when they are asked for."""

    gives_batches = True

    def __init__(self, rows: Any, image: str, label: str, size: int) -> None:
        self.rows, self.image, self.label, self.size = rows, image, label, size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.rows[index]
        return self._pixels(row[self.image]), int(row[self.label])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = self.rows[list(indices)]
        return torch.stack([self._pixels(image) for image in rows[self.image]]), torch.tensor(
            rows[self.label]
        )

    def _pixels(self, image: Any) -> Tensor:
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        return _resized(pixels.unsqueeze(0), self.size).squeeze(0)


def _from_datasets(source: ImageSource, folder: Path | None, size: int) -> Images:
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        if folder is None:
            found = load_dataset(source.hub, source.config)
        elif any(folder.rglob("*.parquet")):
            found = load_dataset("parquet", data_files=_parquet_files(folder))
        else:
            found = load_dataset("imagefolder", data_dir=str(folder))
    except Exception as error:  # of the network, the hub, the files: there is no common class
        raise MissingDataError(_how_to_get(source, folder, error)) from error
    splits = [name for name in ("test", "validation", "val", "valid") if name in found]
    if "train" not in found or not splits:
        raise MissingDataError(f"{source.title} needs the splits train and test, but there are {list(found)}")
    test = source.test if source.test in found else splits[0]
    columns = found["train"].column_names
    image = source.image if source.image in columns else "image"
    label = source.label if source.label in columns else "label"
    lost = [column for column in (image, label) if column not in columns]
    if lost:
        raise MissingDataError(
            f"{source.title} has no column {', '.join(lost)}; there are {', '.join(columns)}"
        )
    labels = found["train"].features[label]
    classes = getattr(labels, "num_classes", None) or 1 + max(found["train"][label])
    train, tested = (Decoded(found[split], image, label, size) for split in ("train", test))
    if (len(train) + len(tested)) * 3 * size**2 <= IN_MEMORY:
        return Images(_in_memory(train), _in_memory(tested), classes, size)
    return Images(train, tested, classes, size)


def _parquet_files(folder: Path) -> dict[str, list[str]]:
    """Files by split, as the hub names them: train-00000-of-00002.parquet."""
    files: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("*.parquet")):
        words = (file.name.split("-")[0].split(".")[0], file.parent.name)
        split = next((w for w in words if w in ("train", "test", "validation", "val", "valid")), None)
        if split is not None:
            files.setdefault(split, []).append(str(file))
    return files


def _in_memory(data: Decoded) -> Tensors:
    return Tensors(*data.__getitems__(range(len(data))))


def _how_to_get(source: ImageSource, folder: Path | None, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if folder is not None:
        return f"{source.title} cannot be read from {folder}: {reason}"
    return (
        f"{source.title} is not here and cannot be downloaded ({reason}).\n"
        "Where there is a network, get it by\n"
        f"  hf download {source.hub} --repo-type dataset --local-dir DATA/{source.name}\n"
        f"and name the folder: --data-dir DATA, or {VARIABLE}=DATA. Instead of that folder, DATA may have\n"
        f"  {source.name}.npz with the arrays x_train, y_train, x_test, y_test (bytes [n, size, size, 3])\n"
        f"  {source.name}/train/CLASS/*.jpg and {source.name}/test/CLASS/*.jpg"
    )

"""A table of real numbers and categories: prices of 53,940 diamonds, as ggplot2 made them known."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ingot.lab.data.places import VARIABLE, MissingDataError, look_for

FILE = "diamonds.csv"
NUMBERS = ("carat", "depth", "table", "x", "y", "z")
CATEGORIES = ("cut", "color", "clarity")


def load_diamonds(folder: Path | None) -> tuple[Tensor, Tensor]:
    """What is known of each diamond, ``[n, 26]``, and the logarithm of its price, ``[n, 1]``.

    Numbers have mean 0 and deviation 1; a category is a column for each value it has. Records that contradict
    themselves are left out.
    """
    file = look_for(folder, FILE) or _in_package()
    if file is None:
        raise MissingDataError(
            f"the prices of diamonds are not here: pip install plotnine, whose data has them, or put {FILE} "
            f"into a folder and name it by --data-dir or {VARIABLE}"
        )
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    missing = [name for name in (*NUMBERS, *CATEGORIES, "price") if not rows or name not in rows[0]]
    if missing:
        raise MissingDataError(f"{file} has no column {', '.join(missing)}")
    rows = [row for row in rows if _is_sound(row)]
    if not rows:
        raise MissingDataError(f"{file} has no record whose depth is about that of its dimensions")
    numbers = torch.tensor([[float(row[name]) for name in NUMBERS] for row in rows])
    columns = [_normal(numbers)]
    for name in CATEGORIES:
        values = {value: place for place, value in enumerate(sorted({row[name] for row in rows}))}
        places = torch.tensor([values[row[name]] for row in rows])
        columns.append(torch.nn.functional.one_hot(places, len(values)).float())
    price = torch.tensor([[float(row["price"])] for row in rows])
    return torch.cat(columns, dim=1), _normal(price.log())


def _is_sound(row: dict[str, str]) -> bool:
    """Whether length, width and height have about the proportion that the record says, in per cent.

    39 of the real ones have not: dimensions of 0, or of 58.9 mm where 8.09 was meant. One of these, 23
    deviations from the mean, would decide the mean squared error of all that it is held out with.
    """
    x, y, z, depth = (float(row[name]) for name in ("x", "y", "z", "depth"))
    return x + y > 0 and abs(200 * z / (x + y) - depth) <= 10


def _normal(x: Tensor) -> Tensor:
    exact = x.double()  # a column of equal numbers is zero then
    return ((exact - exact.mean(0)) / exact.std(0).clamp_min(1e-9)).float()


def _in_package() -> Path | None:
    found = find_spec("plotnine")
    places = found.submodule_search_locations if found is not None else None
    return look_for(Path(places[0]) / "data", FILE) if places else None

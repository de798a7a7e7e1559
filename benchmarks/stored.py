"""Results that pages are made from, small enough for the repository: runs as columns, boards as they are.

``python -m benchmarks.stored digits runs/demo`` keeps what ``ingot compare`` or ``ingot precision`` left in a
folder; ``make figures`` draws from what is kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any

from ingot.lab.precision import PRECISIONS, Result, Setting
from ingot.lab.records import Record, Run, in_json, runs_below
from ingot.lab.scoreboard import Standing
from ingot.lab.summary import Group

FOLDER = Path(__file__).parent / "results"

COLUMNS = {"step": 0, "epoch": 3, "seconds": 2, "test_loss": 5, "error": 3}
"""What is kept of a record, and how many decimals: more than any figure or table shows."""

OF_RUN = ("task", "label", "seed", "error_name", "state", "state_bytes", "peak_bytes")

Boards = Mapping[str, Mapping[str, Mapping[str, Standing]]]
"""Of each phase, such as ``"defaults"``, and task: how each optimizer stands, the reference first."""


# --- Comparisons ------------------------------------------------------------------------------------------


def packed(run: Run) -> dict[str, Any]:
    """A run for JSON."""
    columns = {name: [_rounded(v, digits) for v in run.column(name)] for name, digits in COLUMNS.items()}
    return {key: getattr(run, key) for key in OF_RUN} | {"lr": run.settings["learning rate"]} | columns


def unpacked(content: Mapping[str, Any]) -> Run:
    """The run again, without what was not kept."""
    columns = [[nan if v is None else v for v in content[name]] for name in COLUMNS]
    records = [
        Record(step, epoch, seconds, nan, nan, loss, error, 0)
        for step, epoch, seconds, loss, error in zip(*columns, strict=True)
    ]
    head = {key: content[key] for key in OF_RUN}
    return Run(**head, settings={"learning rate": content["lr"]}, records=records)


def load_groups(path: Path) -> list[Group]:
    """The optimizers of a comparison that was kept."""
    by_label: dict[str, list[Run]] = {}
    for run in map(unpacked, json.loads(path.read_text("utf-8"))):
        by_label.setdefault(run.label, []).append(run)
    return [Group(label, runs) for label, runs in by_label.items()]


# --- The study of precision -------------------------------------------------------------------------------


def packed_study(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What ``ingot precision`` wrote, with nothing but steps and losses of its runs."""
    found = []
    for result in results:
        runs = [
            {
                "state": run["state"],
                "step": [record["step"] for record in run["records"]],
                "test_loss": [_rounded(record["test_loss"], 5) for record in run["records"]],
            }
            for run in result["runs"]
        ]
        found.append({**result, "runs": runs})
    return found


def load_study(path: Path) -> list[Result]:
    """The study again, setting by setting."""
    found: dict[Setting, Result] = {}
    for content in json.loads(path.read_text("utf-8")):
        setting = Setting(*(content[key] for key in ("optimizer", "damping", "lr", "precond_lr")))
        result, precision = found.setdefault(setting, Result(setting)), content["precision"]
        assert precision in PRECISIONS
        bad = content["inverses_not_positive"]
        result.positive[precision] = [False] * bad + [True] * (content["inverses_seen"] - bad)
        result.runs[precision] = [_run_of_study(run) for run in content["runs"]]
    return list(found.values())


def _run_of_study(content: Mapping[str, Any]) -> Run:
    losses = [nan if loss is None else loss for loss in content["test_loss"]]
    pairs = zip(content["step"], losses, strict=True)
    records = [Record(step, nan, nan, nan, nan, loss, nan, 0) for step, loss in pairs]
    return Run("", "", 0, {}, state=content["state"], records=records)


# --- Boards -----------------------------------------------------------------------------------------------


def load_boards(path: Path) -> Boards:
    """What ``ingot evaluate`` wrote; searches stay behind."""
    content = json.loads(path.read_text("utf-8"))
    return {
        phase: {task: {label: Standing(**one) for label, one in of.items()} for task, of in tasks.items()}
        for phase, tasks in content.items()
        if phase != "searches"
    }


# --- Files ------------------------------------------------------------------------------------------------


def _rounded(value: float | None, digits: int) -> float | None:
    return round(value, digits) if value is not None and isfinite(value) else None


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line for each row, so that changes can be read."""
    lines = ",\n".join(json.dumps(in_json(row), allow_nan=False) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", "utf-8")


def keep(name: str, folder: Path, out: Path = FOLDER) -> Path:
    """Keep what is in a folder of runs under a name; returns the file."""
    study = folder / "records.json"
    if study.is_file():
        rows = packed_study(json.loads(study.read_text("utf-8"))["results"])
        path = out / f"{name}.json"
    else:
        rows = [packed(run) for run in runs_below([folder])]
        path = out / f"compare_{name}.json"
    if not rows:
        raise ValueError(f"there is no run in {folder}")
    write(path, rows)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stored", description=__doc__.split("\n")[0])
    parser.add_argument("name", help="of what is kept, such as digits")
    parser.add_argument("folder", type=Path, help="where `ingot compare` or `ingot precision` wrote to")
    print(keep(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()

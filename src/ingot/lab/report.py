"""What the laboratory's reports are made of: numbers as text, tables, settings, records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.table import Table

from ingot import __version__
from ingot.lab.train import Run, Schedule, Task


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """``mean ± standard deviation``; a single value has no deviation."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def describe(task: Task, schedule: Schedule, seeds: int) -> dict[str, str | int]:
    """Everything that a reader needs to know to run this again."""
    return {
        "task": task.title,
        "training examples": len(task.train_y),
        "test examples": len(task.test_y),
        "parameters": sum(p.numel() for p in task.model().parameters()),
        "steps": schedule.steps,
        "batch size": schedule.batch_size,
        "evaluated every": f"{schedule.eval_every} steps",
        "seeds": seeds,
        "learning rate": "cosine, from the value in the table to 0",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ingot": __version__,
    }


def rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> Table:
    """The table for the terminal."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (columns, rule, *rows))


def record(run: Run) -> dict[str, Any]:
    """A run for JSON, which has no word for what is not finite but null."""
    return {key: _in_json(value) for key, value in asdict(run).items()}


def _in_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_json(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_records(path: Path, records: Mapping[str, Any]) -> None:
    """Write records as JSON that any program can read."""
    path.write_text(json.dumps(records, indent=1, allow_nan=False) + "\n", encoding="utf-8")

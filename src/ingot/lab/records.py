"""What a run leaves behind: a folder with its settings, its measurements and a checkpoint.

``run.json`` has settings and state, ``records.jsonl`` a line for each evaluation, ``diagnostics.jsonl`` the
health of the layers. All of it is plain text that is complete after each line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

RUN, RECORDS, DIAGNOSTICS, CHECKPOINT = "run.json", "records.jsonl", "diagnostics.jsonl", "checkpoint"


@dataclass
class Record:
    """One evaluation. Seconds are those of the training steps alone."""

    step: int
    epoch: float
    seconds: float
    lr: float
    train_loss: float
    test_loss: float
    error: float
    memory: int


@dataclass
class Run:
    """A training as it was asked for, and how far it came.

    Attributes:
        task: What was trained on what.
        label: The optimizer in the report; runs of one label are seeds of the same.
        seed: What determines weights and batches.
        settings: Everything that a reader needs to run it again.
        error_name: What the error is.
        started: When, in seconds since 1970.
        state: ``"running"``, ``"interrupted"``, ``"done"`` or ``"diverged"``.
        state_bytes: What the optimizer keeps from step to step.
        peak_bytes: The most that was allocated in a training step, if that was measured.
        records: One for each evaluation.
        diagnostics: The health of the layers at each evaluation, for ingot's own optimizers.
    """

    task: str
    label: str
    seed: int
    settings: dict[str, Any]
    error_name: str = "test error (%)"
    started: float = 0.0
    state: str = "running"
    state_bytes: int = 0
    peak_bytes: int = 0
    records: list[Record] = field(default_factory=list)
    diagnostics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to train."""
        return self.state in ("done", "diverged")

    @property
    def has_diverged(self) -> bool:
        """Whether it ended with numbers that are not finite, or worse than it began."""
        first, last = self.records[0].test_loss, self.records[-1].test_loss
        return self.state == "diverged" or not last <= first

    def column(self, name: str) -> list[float]:
        """One number of all records."""
        return [getattr(record, name) for record in self.records]


class Folder:
    """A run's folder, which is written while the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoint(self) -> Path:
        """Where the last checkpoint is."""
        return self.path / CHECKPOINT

    def start(self, run: Run) -> None:
        """A new run; what an older one left is removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (RECORDS, DIAGNOSTICS):
            (self.path / name).unlink(missing_ok=True)
        self.save(run)

    def save(self, run: Run) -> None:
        """The settings and the state, as a whole or not at all."""
        head = {k: v for k, v in asdict(run).items() if k not in ("records", "diagnostics")}
        _replace(self.path / RUN, json.dumps(in_json(head), indent=1) + "\n")

    def add(self, record: Record, diagnostics: Mapping[str, Any] | None = None) -> None:
        """One more evaluation."""
        _append(self.path / RECORDS, asdict(record))
        if diagnostics is not None:
            _append(self.path / DIAGNOSTICS, {"step": record.step, **diagnostics})

    def cut(self, run: Run, step: int) -> None:
        """Forget what came after a step: training goes on from there."""
        run.records = [record for record in run.records if record.step <= step]
        run.diagnostics = [line for line in run.diagnostics if line["step"] <= step]
        _replace(self.path / RECORDS, "".join(_line(asdict(record)) for record in run.records))
        _replace(self.path / DIAGNOSTICS, "".join(map(_line, run.diagnostics)))

    def load(self) -> Run:
        """The run as far as it came; a ValueError if there is none."""
        try:
            run = Run(**json.loads((self.path / RUN).read_text(encoding="utf-8")))
        except (OSError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{self.path} holds no run that can be read: {error}") from error
        run.records = [Record(**_numbers(line)) for line in _lines(self.path / RECORDS)]
        run.diagnostics = list(_lines(self.path / DIAGNOSTICS))
        return run

    def __bool__(self) -> bool:
        return (self.path / RUN).is_file()


def runs_below(paths: list[Path]) -> list[Run]:
    """All runs in these folders and below, in the order in which they were started; there may be none."""
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no {path}: give a folder that `ingot train` or `ingot compare` wrote")
    found = sorted({file.resolve() for path in paths for file in path.rglob(RUN)})
    return sorted((Folder(file.parent).load() for file in found), key=lambda run: run.started)


# --- Files ----------------------------------------------------------------------------------------------


def in_json(value: Any) -> Any:
    """A value for JSON, which has no word for what is not finite but null."""
    if isinstance(value, Mapping):
        return {key: in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {key: float("nan") if value is None else value for key, value in line.items()}


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(in_json(content), allow_nan=False) + "\n"


def _append(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(content))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """All complete lines; the last one may have been cut off in the middle."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)

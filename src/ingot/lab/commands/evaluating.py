"""``evaluate``, the scoreboard of defaults, and ``sweep``, how much a setting matters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ingot.lab.commands.app import (
    OPTIMIZER_FORMS,
    DataDir,
    Precision,
    app,
    make_directory,
    plainly,
    positive,
    resumable,
)
from ingot.lab.scoreboard import REFERENCE
from ingot.lab.tables import markdown_table, rich_table

if TYPE_CHECKING:
    from ingot.lab.evaluating import Evaluation

BESIDE, SWEPT = ("SINGD", "control", "SGD"), ("SINGD",)

Tasks = Annotated[
    list[str] | None,
    typer.Argument(
        help="Tasks of the suite, or 'chosen' or 'validated' for those that defaults were or were not chosen "
        "by; else all whose data is here.",
        show_default=False,
    ),
]
Others = Annotated[
    list[str] | None,
    typer.Option(
        "--optimizer", "-o", help=f"Beside AdamW, once for each. {OPTIMIZER_FORMS}", show_default=False
    ),
]
ManySeeds = Annotated[
    int, typer.Option(callback=positive, help="Runs of everything, from seeds 0, 1, 2, ...")
]
Jobs = Annotated[int, typer.Option(callback=positive, help="Processes, each with one thread.")]
Out = Annotated[Path, typer.Option(help="Folder of everything; what it has is not done again.")]


@app.command()
def evaluate(
    tasks: Tasks = None,
    optimizers: Others = None,
    seeds: ManySeeds = 5,
    trials: Annotated[
        int, typer.Option(min=0, help="Also compare the best settings of so many random trials of each.")
    ] = 0,
    searches: Annotated[
        int, typer.Option(callback=positive, help="How often to search: so many trials are a matter of luck.")
    ] = 1,
    in_time: Annotated[
        bool, typer.Option("--in-time", help="Also compare at AdamW's time instead of its steps.")
    ] = False,
    focus: Annotated[
        list[str] | None,
        typer.Option(
            help="Which of the optimizers --trials and --in-time are for, once for each.",
            show_default="all of them",
        ),
    ] = None,
    jobs: Jobs = 1,
    precision: Precision = None,
    data_dir: DataDir = None,
    out: Out = Path("runs/evaluate"),
) -> None:
    """Train small models on real data with default settings, and show who is ahead of AdamW.

    Examples: ingot evaluate --seeds 3 --jobs 2

    ingot evaluate digits fashion_cnn -o SINGD -o 'SINGD lr=3e-3' -o control --trials 16 --focus SINGD
    """
    from ingot.lab import scoreboard
    from ingot.lab.evaluating import Evaluation, evaluate_defaults, evaluate_in_time, evaluate_tuned

    with plainly(), resumable():
        console = Console()
        folder, names = _suite(tasks, data_dir)
        make_directory(out)
        evaluation = Evaluation(names, _beside(optimizers, BESIDE), seeds, out, folder, precision, jobs)
        focused = replace(evaluation, optimizers=_beside(_among(focus, evaluation), evaluation.optimizers))
        defaults = evaluate_defaults(evaluation, console)
        boards = {"defaults": defaults}
        if in_time:
            matched = evaluate_in_time(focused, defaults, console)
            boards[f"in {REFERENCE}'s time"] = {
                task: [defaults[task][0], *groups] for task, groups in matched.items()
            }
        tuned: dict[str, Any] = {}
        if trials:
            boards["tuned"], tuned = evaluate_tuned(focused, trials, searches, console)
        found = {name: scoreboard.standings(board) for name, board in boards.items()}
        lines = []
        for name, standings in found.items():
            for title, columns, rows in scoreboard.tables(standings, name):
                console.print(rich_table(columns, rows, title))
                lines.append(f"### {title}\n\n{markdown_table(columns, rows)}\n")
        content: dict[str, Any] = {
            name: {task: {k: asdict(v) for k, v in of.items()} for task, of in standings.items()}
            for name, standings in found.items()
        }
        content["searches"] = {
            task: {label: [one._asdict() for one in found] for label, found in of.items()}
            for task, of in tuned.items()
        }
        (out / "scoreboard.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (out / "scoreboard.md").write_text("\n".join(lines), encoding="utf-8")
        typer.echo(out / "scoreboard.md")


@app.command()
def sweep(
    tasks: Tasks = None,
    optimizers: Others = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting, once for each, with values or without: lr, or lr=1e-3,3e-3,1e-2.",
            show_default="lr damping precond_lr precond_every",
        ),
    ] = None,
    seeds: ManySeeds = 2,
    jobs: Jobs = 1,
    precision: Precision = None,
    data_dir: DataDir = None,
    out: Out = Path("runs/sweep"),
) -> None:
    """Train small models on real data with one value after another of a setting, and draw what it matters.

    Examples: ingot sweep fashion_vit shakespeare_gpt --over lr --jobs 2

    ingot sweep chosen -o SINGD:diagonal --over damping=0.1,0.3,1 --over precond_every
    """
    from ingot.lab import plot, sweeping
    from ingot.lab.evaluating import Evaluation

    with plainly(), resumable():
        settings = dict(sweeping.values_of(text) for text in over or sweeping.VALUES)
        folder, names = _suite(tasks, data_dir)
        make_directory(out)
        evaluation = Evaluation(names, _beside(optimizers, SWEPT), seeds, out, folder, precision, jobs)
        points = sweeping.sweep(evaluation, settings, Console())
        rows = [
            (p.setting, p.optimizer, f"{p.value:g}", p.task, f"{p.loss:.3f}", f"{p.error:.2f}")
            for p in points
        ]
        columns = ("setting", "optimizer", "value", "task", f"loss / {REFERENCE}'s", "error")
        (out / "sweep.md").write_text(markdown_table(columns, rows) + "\n", encoding="utf-8")
        (out / "sweep.json").write_text(
            json.dumps([p._asdict() for p in points], indent=1) + "\n", encoding="utf-8"
        )
        plot.save(sweeping.plot_sweep(points, REFERENCE), out / "sweep")
        typer.echo(out / "sweep.png")


def _beside(optimizers: Sequence[str] | None, by_default: Sequence[str]) -> list[str]:
    """The optimizers that are asked for, behind the one that they are measured by."""
    return [REFERENCE, *(text for text in optimizers or by_default if text != REFERENCE)]


def _among(focus: Sequence[str] | None, evaluation: Evaluation) -> Sequence[str] | None:
    """What is in focus, if it is among the optimizers."""
    for text in focus or ():
        if text not in evaluation.optimizers:
            known = ", ".join(map(repr, evaluation.optimizers))
            raise ValueError(
                f"--focus {text!r} is none of the optimizers, which are {known}: name it by -o, too"
            )
    return focus


def _suite(tasks: list[str] | None, data_dir: Path | None) -> tuple[Path | None, list[str]]:
    """The folder of data, and the tasks whose data is here; one that was asked for by its name must be."""
    from ingot.lab.data.places import MissingDataError
    from ingot.lab.data.places import data_dir as folder_of
    from ingot.lab.naming import find
    from ingot.lab.suite import SUITE, suite_task

    folder = folder_of(data_dir)
    sets = {
        "chosen": [name for name, entry in SUITE.items() if entry.chosen_on],
        "validated": [name for name, entry in SUITE.items() if not entry.chosen_on],
        "all": list(SUITE),
    }
    by_name = {name: [name] for name in SUITE}
    names = [name for task in tasks or ["all"] for name in find(task, sets | by_name, "task of the suite")]
    found = []
    for name in dict.fromkeys(names):
        try:
            suite_task(name, folder)
            found.append(name)
        except MissingDataError as error:
            if name in (tasks or []):
                raise
            typer.echo(f"{name} is left out: {error}", err=True)
    return folder, found

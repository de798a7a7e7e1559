"""``evaluate``: the scoreboard of defaults."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

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
from ingot.lab.tables import markdown_table, rich_table

BY_DEFAULT = ("AdamW", "SINGD", "control", "SGD")


@app.command()
def evaluate(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            help="Tasks of the suite, or 'chosen' or 'validated' for those that defaults were or were "
            "not chosen on; else all whose data is here.",
            show_default=False,
        ),
    ] = None,
    optimizers: Annotated[
        list[str] | None,
        typer.Option(
            "--optimizer",
            "-o",
            help=f"Beside AdamW, once for each. {OPTIMIZER_FORMS}",
            show_default=" ".join(BY_DEFAULT),
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(callback=positive, help="Runs of everything.")] = 5,
    trials: Annotated[
        int, typer.Option(min=0, help="Also compare the best settings of so many random trials of each.")
    ] = 0,
    in_time: Annotated[
        bool, typer.Option("--in-time", help="Also compare at AdamW's time instead of its steps.")
    ] = False,
    jobs: Annotated[int, typer.Option(callback=positive, help="Processes, each with one thread.")] = 1,
    precision: Precision = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path, typer.Option(help="Folder of runs and scoreboard; what it has is not done again.")
    ] = Path("runs/evaluate"),
) -> None:
    """Train small models on real data with default settings, and show who is ahead of AdamW.

    Examples: ingot evaluate --seeds 3 --jobs 2

    ingot evaluate digits fashion_cnn -o SINGD -o 'SINGD lr=3e-3' -o control --trials 16
    """
    from ingot.lab import scoreboard
    from ingot.lab.data.places import data_dir as folder_of
    from ingot.lab.evaluating import Evaluation, evaluate_defaults, evaluate_in_time, evaluate_tuned

    with plainly(), resumable():
        console = Console()
        folder = folder_of(data_dir)
        names = _named(tasks, folder)
        make_directory(out)
        asked = [text for text in optimizers or BY_DEFAULT if text != "AdamW"]
        evaluation = Evaluation(names, ["AdamW", *asked], seeds, out, folder, precision, jobs)
        defaults = evaluate_defaults(evaluation, console)
        boards = {"defaults": defaults}
        if in_time:
            matched = evaluate_in_time(evaluation, defaults, console)
            boards["in AdamW's time"] = {
                task: [defaults[task][0], *groups] for task, groups in matched.items()
            }
        tuned: dict[str, Any] = {}
        if trials:
            boards["tuned"], tuned = evaluate_tuned(evaluation, trials, console)
        found = {name: scoreboard.standings(board) for name, board in boards.items()}
        lines = []
        for name, standings in found.items():
            for title, columns, rows in scoreboard.tables(standings, name):
                console.print(rich_table(columns, rows, title))
                lines.append(f"### {title}\n\n{markdown_table(columns, rows)}\n")
        content = {
            name: {task: {k: asdict(v) for k, v in of.items()} for task, of in standings.items()}
            for name, standings in found.items()
        }
        content["searches"] = {task: {k: v._asdict() for k, v in of.items()} for task, of in tuned.items()}
        (out / "scoreboard.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (out / "scoreboard.md").write_text("\n".join(lines), encoding="utf-8")
        typer.echo(out / "scoreboard.md")


def _named(tasks: list[str] | None, folder: Path | None) -> list[str]:
    """The names of tasks whose data is here; one that was asked for by its name must be."""
    from ingot.lab.data.places import MissingDataError
    from ingot.lab.naming import find
    from ingot.lab.suite import SUITE, suite_task

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
    return found

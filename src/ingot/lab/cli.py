"""The commands of ``python -m ingot.lab``, and the tables that they print and write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import ingot
from ingot.lab import precision as study
from ingot.lab import precision_report
from ingot.lab.digits import digits
from ingot.lab.named_models import FORMS, named_model
from ingot.lab.plot import plot_error, save
from ingot.lab.progress import Job, train_all
from ingot.lab.report import describe, markdown_table, mean_and_spread, record, rich_table, write_records
from ingot.lab.train import OPTIMIZERS, Run, Schedule, train
from ingot.planning import OPTIMIZERS as OPTIMIZER_CLASSES

app = typer.Typer(
    help="The laboratory of ingot: train, compare and plot optimizers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

BASELINES = ("AdamW", "SGD")
"""What the natural-gradient optimizers are compared with; state is counted relative to the first."""

COLUMNS = ("optimizer", "lr", "test error (%)", "test loss", "seconds / run", f"state / {BASELINES[0]}'s")


def _positive(value: int) -> int:
    if value < 1:
        raise typer.BadParameter(f"{value} is too few: give 1 or more, or leave the option out.")
    return value


def _positive_or_none(value: int | None) -> int | None:
    return None if value is None else _positive(value)


def _threads(value: int) -> int:
    cores = os.cpu_count() or 1
    if value > cores:
        raise typer.BadParameter(f"{value} is more than this machine's cores: give {cores} or fewer.")
    return _positive(value)


def _make_directory(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot make the directory {out} ({error.strerror}): name another one.", param_hint="--out"
        ) from error


Out = Annotated[
    Path, typer.Option(help="Directory for the report, the figure and the records; made if missing.")
]
Steps = Annotated[
    int, typer.Option(callback=_positive, help=f"Steps of every run, {Schedule.batch_size} examples each.")
]
Seeds = Annotated[int, typer.Option(callback=_positive, help="Runs of everything, from seeds 0, 1, 2, ...")]
Threads = Annotated[
    int, typer.Option(callback=_threads, help="Threads of torch; on small tensors, more can be slower.")
]


@app.command()
def demo(out: Out = Path("runs/demo"), steps: Steps = 300, seeds: Seeds = 3, threads: Threads = 1) -> None:
    """Train a small network on handwritten digits with several optimizers and compare them, in a minute."""
    _make_directory(out)  # before anything is trained, so that a bad path costs nothing
    torch.set_num_threads(threads)
    console = Console()
    task, schedule = digits(), Schedule(steps)
    jobs = [Job(name, steps, partial(train, task, name, schedule=schedule)) for name in OPTIMIZERS]
    runs = train_all(jobs, range(seeds), console)
    rows, settings = table_rows(runs), describe(task, schedule, seeds)
    save(plot_error(runs, task.title, dashed=BASELINES), out / "demo")
    write_records(out / "records.json", {"settings": settings, "runs": [record(run) for run in runs]})
    report = out / "report.md"
    report.write_text(markdown_report(rows, settings), encoding="utf-8")
    console.print(rich_table(COLUMNS, rows, title=f"{task.title}: after {steps} steps"))
    typer.echo(report)  # not through rich, which would break a long path


@app.command()
def precision(
    out: Out = Path("runs/precision"),
    steps: Steps = 200,
    seeds: Seeds = 5,
    threads: Threads = 1,
    tune: Annotated[
        bool, typer.Option("--tune", help="Search for the settings again first, for ten minutes more.")
    ] = False,
) -> None:
    """Train in bfloat16 and in float32 with SINGD, IKFAC and KFAC and compare them, in four minutes."""
    _make_directory(out)
    torch.set_num_threads(threads)
    console = Console()
    task, schedule = study.task(), Schedule(steps)
    tuned = study.tune(task, schedule, console) if tune else study.TUNED
    results = study.compare(task, tuned, schedule, range(seeds), console)
    rows, settings = precision_report.table_rows(results), describe(task, schedule, seeds)
    save(precision_report.plot(results, task.title), out / "precision")
    write_records(out / "records.json", {"settings": settings, "results": precision_report.records(results)})
    report = out / "report.md"
    report.write_text(
        precision_report.markdown_report(results, settings, searched_now=tune), encoding="utf-8"
    )
    console.print(rich_table(precision_report.COLUMNS, rows, title=f"{task.title}: after {steps} steps"))
    typer.echo(report)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help=f"The model: {FORMS}.", show_default=False)],
    structure: Annotated[
        str | None, typer.Option(help="Structure of the factors, or auto; else the optimizer's own default.")
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            help="What the state may take: '1.0x adamw', '0.6x sgd', '500MB', bytes, or a share of AdamW's."
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZER_CLASSES)}.")] = "SINGD",
    every: Annotated[
        int | None, typer.Option(callback=_positive_or_none, help="Steps between updates of the factors.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            callback=_positive_or_none, help="Samples of a step: counts the forward and backward pass."
        ),
    ] = None,
    input_shape: Annotated[
        str | None,
        typer.Option("--input", help="Shape of one sample, such as 3x224x224; else the model's own."),
    ] = None,
) -> None:
    """Tell structures, memory and operations of each layer, without making the model or training anything."""
    shape = None if input_shape is None else _shape(input_shape)
    if shape is not None and batch is None:
        raise typer.BadParameter("give --batch as well, the samples of a step.", param_hint="--input")
    given: dict[str, Any] = {"structure": structure, "precond_every": every}
    given["memory_budget"] = None if memory_budget is None else _number_or_text(memory_budget)
    settings = {name: value for name, value in given.items() if value is not None}
    try:
        named = named_model(model)
        example = None if batch is None else named.example(batch, shape)
        made = ingot.plan(named.model, optimizer=optimizer, example=example, **settings)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(made)  # not through rich, which would break its lines


def _shape(text: str) -> tuple[int, ...]:
    words = text.lower().split("x")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise typer.BadParameter(f"{text!r} is no shape: write 3x224x224.", param_hint="--input")
    return tuple(map(int, words))


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


# --- Report ---------------------------------------------------------------------------------------------


def table_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """One row of text for each optimizer, under ``COLUMNS``."""
    baseline = fmean(run.state_bytes for run in runs if run.optimizer == BASELINES[0])
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(run.optimizer for run in runs):
        mine = [run for run in runs if run.optimizer == name]
        rows.append(
            (
                name,
                f"{mine[0].lr:g}",
                mean_and_spread([run.test_error_percent[-1] for run in mine]),
                f"{fmean(run.test_loss[-1] for run in mine):.3f}",
                f"{fmean(run.seconds[-1] for run in mine):.2f}",
                f"{fmean(run.state_bytes for run in mine) / baseline:.2f}",
            )
        )
    return rows


def markdown_report(rows: Sequence[tuple[str, ...]], settings: dict[str, str | int]) -> str:
    """The report: results, figure, settings."""
    return f"""\
# {settings["task"]}: optimizers compared

{markdown_table(COLUMNS, rows)}

Test error and test loss are those after the last step, means over the seeds (± standard deviation). For every
seed, all optimizers start from the same weights and see the same batches. The learning rates (lr) are not
tuned. Seconds are those of the training steps, without evaluation. State is the measured size of all tensors
that the optimizer keeps from step to step, relative to {BASELINES[0]}'s.

![Test error against steps and against seconds](demo.png)

Lines are means over seeds, bands go from the lowest to the highest seed.

## Settings

{markdown_table(("setting", "value"), list(settings.items()))}
"""

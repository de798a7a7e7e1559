"""``bench``, ``plan`` and ``precision``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import ingot
from ingot.lab.commands.app import (
    COMPARED,
    BatchSize,
    Data,
    DataDir,
    ImageSize,
    Optimizers,
    Seeds,
    Size,
    TaskName,
    Threads,
    app,
    make_directory,
    plainly,
    positive,
    resumable,
    set_threads,
)
from ingot.lab.named_models import FORMS, named_model
from ingot.lab.optimizers import choose
from ingot.lab.recipes import Options
from ingot.lab.tables import rich_table
from ingot.lab.tasks import named_task


@app.command("bench")
def bench_command(
    task: TaskName,
    optimizers: Optimizers = None,
    every: Annotated[
        int, typer.Option(callback=positive, help="Steps between updates of the factors (T).")
    ] = 5,
    rounds: Annotated[int, typer.Option(callback=positive, help="Turns of each optimizer.")] = 5,
    data: Data = "",
    data_dir: DataDir = None,
    size: Size = "full",
    image_size: ImageSize = None,
    batch_size: BatchSize = None,
    threads: Threads = None,
) -> None:
    """Measure peak memory and time of training steps relative to SGD's, as in the paper's Table 1.

    Example: ingot bench gcvit --data imagewoof --every 5
    """
    from ingot.lab.bench import COLUMNS, measure, table_rows

    console = Console()
    with plainly():
        set_threads(threads)
        chosen = [choose(text) for text in optimizers or COMPARED]
        made = named_task(task, Options(data, data_dir, size, image_size))
        batch = batch_size or made.training.batch_size
        rows = measure(made, chosen, batch, every, rounds, lambda what: typer.echo(what, err=True))
        console.print(rich_table(COLUMNS, table_rows(rows), f"{made.title}, batches of {batch}, T = {every}"))


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
    optimizer: Annotated[str, typer.Option(help="SINGD, INGD, IKFAC or KFAC.")] = "SINGD",
    every: Annotated[
        int | None, typer.Option(callback=positive, help="Steps between updates of the factors.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(callback=positive, help="Samples of a step: counts the forward and backward pass."),
    ] = None,
    input_shape: Annotated[
        str | None,
        typer.Option("--input", help="Shape of one sample, such as 3x224x224; else the model's own."),
    ] = None,
) -> None:
    """Tell structures, memory and operations of each layer, without making the model or training anything.

    Example: ingot plan timm:resnet50 --structure auto --memory-budget '0.8x adamw' --batch 32
    """
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


@app.command("precision")
def precision_command(
    out: Annotated[Path, typer.Option(help="Folder for the report, the figure and the records.")] = Path(
        "runs/precision"
    ),
    epochs: Annotated[int, typer.Option(callback=positive, help="Passes over the data, 21 steps each.")] = 8,
    seeds: Seeds = 5,
    threads: Threads = 1,
    tune: Annotated[
        bool, typer.Option("--tune", help="Search for the settings again first, for ten minutes more.")
    ] = False,
) -> None:
    """Train in bfloat16 and in float32 with SINGD, IKFAC and KFAC and compare them, in three minutes."""
    from ingot.lab import precision, precision_report
    from ingot.lab.plot import save
    from ingot.lab.training import Loop

    console = Console()
    with plainly(), resumable():
        make_directory(out)
        set_threads(threads)
        task, loop = precision.task(), Loop(epochs)
        tuned = precision.tune(task, loop, console) if tune else precision.TUNED
        results = precision.compare(task, tuned, loop, range(seeds), console)
        save(precision_report.plot(results, task.title), out / "precision")
        rows, settings = precision_report.table_rows(results), precision_report.settings(results)
        precision_report.write(out, results, settings, searched_now=tune)
        console.print(rich_table(precision_report.COLUMNS, rows, f"{task.title}, {epochs} epochs"))
        typer.echo(out / "report.md")

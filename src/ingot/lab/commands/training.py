"""``train``, ``compare`` and ``tune``."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ingot.lab.commands.app import (
    COMPARED,
    BatchSize,
    Clip,
    Data,
    DataDir,
    Epochs,
    Fresh,
    ImageSize,
    OneOptimizer,
    Optimizers,
    Precision,
    Schedule,
    Seeds,
    Size,
    TaskName,
    Threads,
    Workers,
    app,
    make_directory,
    plainly,
    positive,
    resumable,
    set_threads,
)
from ingot.lab.optimizers import choose
from ingot.lab.recipes import Options
from ingot.lab.tables import rich_table
from ingot.lab.tasks import named_task


@app.command()
def train(
    task: TaskName,
    optimizer: OneOptimizer = "SINGD",
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; else runs/train/TASK.")] = None,
    seed: Annotated[int, typer.Option(help="Determines the weights and the order of the data.")] = 0,
    data: Data = "",
    data_dir: DataDir = None,
    size: Size = "full",
    image_size: ImageSize = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    schedule: Schedule = None,
    precision: Precision = None,
    clip: Clip = None,
    workers: Workers = 0,
    threads: Threads = None,
    fresh: Fresh = False,
) -> None:
    """Train one model with one optimizer; said again, the command goes on where it was interrupted.

    Example: ingot train cct --data cifar100 -o SINGD:diagonal --epochs 100

    On several processes: torchrun --nproc-per-node 2 -m ingot.lab train digits, or accelerate launch.
    """
    from ingot.lab.comparing import Comparison, compare, folder_name
    from ingot.lab.training import Loop

    with plainly(), resumable():
        set_threads(threads)
        chosen, options = choose(optimizer), Options(data, data_dir, size, image_size)
        made = named_task(task, options)
        out = out or Path("runs/train") / folder_name(task)
        make_directory(out)
        loop = Loop(epochs, batch_size, schedule, precision, clip, workers=workers)
        comparison = Comparison(made, [chosen], [seed], loop, out, _notes(task, options))
        compare(comparison, Console(), resume=not fresh)
        if _is_main():
            typer.echo(out / folder_name(chosen.label) / f"seed{seed}")


@app.command("compare")
def compare_command(
    task: TaskName,
    optimizers: Optimizers = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs and report; else runs/compare/TASK.")
    ] = None,
    seeds: Seeds = 1,
    data: Data = "",
    data_dir: DataDir = None,
    size: Size = "full",
    image_size: ImageSize = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    schedule: Schedule = None,
    precision: Precision = None,
    clip: Clip = None,
    workers: Workers = 0,
    threads: Threads = None,
    fresh: Fresh = False,
) -> None:
    """Train with several optimizers from several seeds, side by side, and write a report.

    Examples: ingot compare digits

    ingot compare vgg SGD AdamW SINGD:diagonal --data imagewoof --seeds 3

    ingot compare mymodule:make_task AdamW SINGD
    """
    from ingot.lab.comparing import Comparison, compare, folder_name
    from ingot.lab.page import write_report
    from ingot.lab.summary import SHORT, by_task, columns, rows
    from ingot.lab.training import Loop

    console = Console()
    with plainly(), resumable():
        set_threads(threads)
        chosen = [choose(text) for text in optimizers or COMPARED]
        options = Options(data, data_dir, size, image_size)
        made = named_task(task, options)
        out = out or Path("runs/compare") / folder_name(task)
        make_directory(out)
        loop = Loop(epochs, batch_size, schedule, precision, clip, workers=workers)
        comparison = Comparison(made, chosen, range(seeds), loop, out, _notes(task, options))
        runs = compare(comparison, console, resume=not fresh)
        if not _is_main():
            return
        for title, groups in by_task(runs).items():
            head, *body = ([row[place] for place in SHORT] for row in (columns(groups), *rows(groups)))
            console.print(rich_table(head, body, title))
        typer.echo(write_report(runs, out))  # not through rich, which would break a long path


def _notes(task: str, options: Options) -> dict[str, Any]:
    """What a run's settings say of the task, beside what can be seen of it."""
    return {"task": task, "data": options.data, "size": options.size, "image size": options.image_size}


def _is_main() -> bool:
    from accelerate import PartialState

    return PartialState().is_main_process


# --- Search -----------------------------------------------------------------------------------------------


@app.command()
def tune(
    task: TaskName,
    optimizer: OneOptimizer = "SINGD",
    trials: Annotated[
        int, typer.Option(callback=positive, help="Finished trials that the study is to have.")
    ] = 20,
    sampler: Annotated[str, typer.Option(help="random, as in the paper, or tpe.")] = "random",
    prune: Annotated[bool, typer.Option(help="Give trials up that fall behind the others.")] = True,
    jobs: Annotated[int, typer.Option(callback=positive, help="Processes that work on it at once.")] = 1,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Where the study is kept: sqlite:///FILE.db, postgresql://USER@HOST/DATABASE, any of "
            "Optuna's; else a file in the folder."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; else runs/tune/TASK.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the search and of the trainings.")] = 0,
    data: Data = "",
    data_dir: DataDir = None,
    size: Size = "full",
    image_size: ImageSize = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    precision: Precision = None,
    threads: Threads = None,
) -> None:
    """Search for the best settings, judged by held-out training data; goes on where it was left.

    Examples: ingot tune digits -o SINGD:diagonal --trials 30

    ingot tune cct -o AdamW --storage postgresql://me@server/studies (on as many machines as there are)
    """
    from ingot.lab.comparing import folder_name
    from ingot.lab.page import write_report
    from ingot.lab.training import Loop
    from ingot.lab.tuning import STUDY, Search, held_out, is_finished, opened, run_search, url_of

    with plainly(), resumable():
        set_threads(threads)
        chosen = choose(optimizer)
        out = out or Path("runs/tune") / folder_name(task)
        make_directory(out)
        url = storage or url_of(out / STUDY)
        options = Options(data, data_dir, size, image_size)
        made = held_out(named_task(task, options))
        name = " ".join(filter(None, (task, data, chosen.label)))
        loop = Loop(epochs, batch_size, None, precision)
        with opened(url):
            helpers = _start_workers(jobs - 1)  # the storage's tables are made by now
        search = Search(made, chosen, loop, name, url, sampler, prune, seed, _notes(task, options))
        study = run_search(search, trials, _tell)
        if WORKER in os.environ:
            return
        for helper in helpers:
            helper.wait()  # for the trial that it is at
        done = [trial for trial in study.get_trials() if is_finished(trial)]
        typer.echo(f"{len(done)} finished trials in {url} as {name!r}")
        with suppress(ValueError):  # nothing but given up trials
            best = study.best_trial
            words = " ".join(f"{key}={value:.4g}" for key, value in best.params.items())
            typer.echo(f"best loss {best.value:.4f}: '{optimizer} {words}'")
        typer.echo(write_report([], out, {name: study}))


def _tell(trial: Any) -> None:
    words = "  ".join(f"{key} {value:.3g}" for key, value in trial.params.items())
    value = "–" if trial.value is None else f"{trial.value:.4f}"
    typer.echo(f"trial {trial.number:3d}  {trial.state.name.lower():<8}  loss {value:<8}  {words}")


WORKER = "INGOT_TUNE_WORKER"
"""Set in the environment of processes that only help."""


def _start_workers(count: int) -> list[subprocess.Popen[bytes]]:
    """The same command in other processes, each with one job."""
    words = sys.argv[1:]
    place = next((i for i, word in enumerate(words) if word == "--jobs"), None)
    if place is not None:
        words = words[:place] + words[place + 2 :]
    words = [word for word in words if not word.startswith("--jobs=")]
    command = [sys.executable, "-m", "ingot.lab", *words]
    return [subprocess.Popen(command, env=os.environ | {WORKER: "1"}) for _ in range(count)]

"""What all commands share: the program, options of one name, and errors without a traceback."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from ingot.lab.optimizers import OPTIMIZERS
from ingot.lab.recipes.base import SIZES
from ingot.lab.schedules import SCHEDULES
from ingot.lab.tasks import FORMS

app = typer.Typer(
    help="The laboratory of ingot: train, compare and tune optimizers, and plan their memory.\n\n"
    "Begin with: ingot compare digits",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
)

COMPARED = ("SGD", "AdamW", "KFAC", "IKFAC", "INGD", "SINGD", "SINGD:diagonal", "SINGD:hierarchical(15,15)")
"""The paper's optimizers and SINGD as it comes, as ``compare`` and ``bench`` take them by default."""

OPTIMIZER_FORMS = (
    f"An optimizer: {', '.join(OPTIMIZERS)}. With a structure: SINGD:diagonal, or "
    "'SINGD:dense/hierarchical(15,15)' for the two sides; with settings, in quotes: "
    "'SINGD:diagonal lr=2e-3 damping=0.01'; with the paper's step: 'SINGD:dense paper'."
)


def positive(value: int | None) -> int | None:
    """A callback of options."""
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} is too few: give 1 or more, or leave the option out.")
    return value


def _threads(value: int | None) -> int | None:
    cores = os.cpu_count() or 1
    if value is not None and value > cores:
        raise typer.BadParameter(f"{value} is more than this machine's cores: give {cores} or fewer.")
    return positive(value)


TaskName = Annotated[str, typer.Argument(help=f"What to train: {FORMS}.", show_default=False)]
Optimizers = Annotated[
    list[str] | None, typer.Argument(help=OPTIMIZER_FORMS, show_default=" ".join(COMPARED))
]
OneOptimizer = Annotated[str, typer.Option("--optimizer", "-o", help=OPTIMIZER_FORMS)]
Data = Annotated[str, typer.Option(help="The data set, where a recipe takes several (see `ingot list`).")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of data sets; the environment variable INGOT_DATA serves as well.")
]
Size = Annotated[
    str, typer.Option(help=f"{', '.join(SIZES)}: a CPU trains small models in minutes, tiny ones in seconds.")
]
ImageSize = Annotated[int | None, typer.Option(callback=positive, help="Rows and columns of images.")]
Epochs = Annotated[
    int | None, typer.Option(callback=positive, help="Passes over the data; else the recipe's.")
]
BatchSize = Annotated[
    int | None,
    typer.Option(callback=positive, help="Examples of a step, over all processes; else the recipe's."),
]
Schedule = Annotated[
    str | None, typer.Option(help=f"Of the learning rate: {', '.join(SCHEDULES)}; else the recipe's.")
]
Precision = Annotated[
    str | None,
    typer.Option(help="fp32, bf16 or fp16; else bf16 on hardware that has it, except for the GNN."),
]
Clip = Annotated[float | None, typer.Option(help="Bound on the norm of all gradients together.")]
Workers = Annotated[int, typer.Option(min=0, help="Processes that load data.")]
Threads = Annotated[
    int | None, typer.Option(callback=_threads, help="Threads of torch; on small tensors, one is fastest.")
]
Seeds = Annotated[int, typer.Option(callback=positive, help="Runs of everything, from seeds 0, 1, 2, ...")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever the folder has.")]


@contextmanager
def plainly() -> Iterator[None]:
    """Say what is wrong without a traceback, in lines that can be copied."""
    try:
        yield
    except (ValueError, ModuleNotFoundError) as error:
        text = str(error)
        if isinstance(error, ModuleNotFoundError):
            text = f"{error.name} is not installed: pip install 'ingot[lab]' has all that recipes need"
        typer.echo(f"Error: {text}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def resumable() -> Iterator[None]:
    """After an interruption, say how to go on."""
    from ingot.lab.interrupting import Interrupted

    try:
        yield
    except Interrupted as error:
        typer.echo(f"\nInterrupted; all is saved. To go on:\n  {this_command()}", err=True)
        raise typer.Exit(130) from error


def this_command() -> str:
    """The command to say again."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if words[0] == "__main__.py":
        words[:1] = ["python", "-m", "ingot.lab"]
    return shlex.join(word for word in words if word != "--fresh")


def set_threads(threads: int | None) -> None:
    """How many threads torch takes, if that was said."""
    if threads is not None:
        torch.set_num_threads(threads)


def make_directory(out: Path) -> None:
    """Before anything is trained, so that a bad path costs nothing."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make the directory {out} ({error.strerror}): name another by --out"
        ) from error

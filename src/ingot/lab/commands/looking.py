"""``list``, ``structures`` and ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ingot.lab.commands.app import app, make_directory, plainly
from ingot.lab.optimizers import OPTIMIZERS
from ingot.lab.recipes import RECIPES
from ingot.lab.tables import rich_table


@app.command("list")
def list_all() -> None:
    """List recipes, data sets and optimizers."""
    console = Console()
    rows = [(recipe.name, recipe.title, ", ".join(recipe.data) or "embedded") for recipe in RECIPES.values()]
    console.print(
        rich_table(("recipe", "what it is", "data, the default first"), rows, "Recipes", right=False)
    )
    there = [
        (name, "yes" if kind.is_there else f"pip install {kind.package}", ", ".join(kind.space))
        for name, kind in OPTIMIZERS.items()
    ]
    console.print(
        rich_table(("optimizer", "installed", "what `ingot tune` searches"), there, "Optimizers", right=False)
    )


@app.command()
def structures(
    texts: Annotated[list[str] | None, typer.Argument(help="Structures; else all of the paper's.")] = None,
    dim: Annotated[int, typer.Option(min=2, max=512, help="Rows of the matrices.")] = 16,
    out: Annotated[Path, typer.Option(help="Folder for structures.png and .svg.")] = Path("runs"),
) -> None:
    """Draw K, K Kᵀ and its inverse for structures, as in the paper's picture.

    Example: ingot structures diagonal 'hierarchical(3,3)' 'upper(dense(2),tril_toeplitz)'
    """
    from ingot.lab.plot import save
    from ingot.lab.structure_pictures import SHOWN, plot_structures

    with plainly():
        make_directory(out)
        save(plot_structures(texts or SHOWN, dim), out / "structures")
        typer.echo(out / "structures.png")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders with runs, at any depth.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Folder of the report; else the first of those.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Storage of searches that are not kept in those folders.")
    ] = None,
) -> None:
    """Write a page of HTML that needs no network, with figures as PNG and SVG, from runs and searches.

    Examples: ingot report runs/compare/digits

    ingot report runs (everything that is there)
    """
    from ingot.lab.page import write_report
    from ingot.lab.records import runs_below
    from ingot.lab.tuning import STUDY, url_of

    with plainly():
        found = runs_below(runs)
        urls = [url_of(file) for path in runs for file in sorted(path.rglob(STUDY))]
        studies = _studies([*urls, *filter(None, [storage])])
        if not found and not studies:
            named = ", ".join(map(str, runs))
            raise ValueError(
                f"there are no runs below {named}: make some by `ingot train` or `ingot compare`"
            )
        typer.echo(write_report(found, out or runs[0], studies))


def _studies(urls: Sequence[str]) -> dict[str, Any]:
    """All studies of these storages by their names."""
    import optuna

    from ingot.lab.tuning import storage_of

    storages = [storage_of(url) for url in urls]
    return {
        name: optuna.load_study(study_name=name, storage=storage)
        for storage in storages
        for name in optuna.get_all_study_names(storage)
    }

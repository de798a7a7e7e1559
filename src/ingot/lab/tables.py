"""Numbers as text, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from rich.table import Table


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """``mean ± standard deviation``; a single value has no deviation."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def rich_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, *, right: bool = True
) -> Table:
    """The table for the terminal; numbers are to the right, text is not."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index and right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """A markdown table; all columns but the first ones are aligned to the right."""
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (columns, rule, *rows))

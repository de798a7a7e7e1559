"""Figures and tables of README and docs, made from stored results; nothing is trained or measured.

``make figures`` makes all of them. A figure remembers the results that it was drawn from, so that a test can
tell when it is to be drawn again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from matplotlib.figure import Figure
from torch import nn

import ingot
from benchmarks import boards, figures, headline, report, stored, tables
from benchmarks.measured import Results
from benchmarks.stored import load_boards, load_groups, load_study
from ingot.lab import plot, precision_report, summary
from ingot.lab.scoreboard import REFERENCE
from ingot.lab.structure_pictures import plot_structures
from ingot.lab.sweeping import Point, plot_sweep
from ingot.lab.tables import markdown_table

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
BOARD, BF16, SWEEP, STUDY, BENCH = "evaluate", "evaluate_bf16", "sweep", "precision", "results"
ABLATION = "ablation"

COMPOSED = (
    "upper(dense(2),tril_toeplitz)",
    "lower(block_diagonal(4,8),diagonal)",
    "upper(tril(6),lower(diagonal,dense(2)))",
)


# --- Figures ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """A figure: the stored results that it shows, if any, and how it is drawn from the file of these."""

    draw: Callable[[Path], Figure]
    source: str = ""
    dpi: int = 110

    @property
    def path(self) -> Path:
        """Where its results are."""
        return stored.FOLDER / f"{self.source}.json"

    @property
    def digest(self) -> str:
        """What tells these results from others."""
        return sha256(self.path.read_bytes()).hexdigest()[:16] if self.source else "no results"

    def write(self, target: Path) -> None:
        """Draw it into a file that says what it was drawn from."""
        self.draw(self.path).savefig(target, dpi=self.dpi, metadata={"Source": self.digest})


def _error_curves(path: Path) -> Figure:
    groups = load_groups(path)
    run = groups[0].runs[0]
    # Not against time: runs that are stored may have shared their machine with others.
    return plot.plot_curves(groups, "error", run.error_name, run.task, against=["epochs"])


def _memory(path: Path) -> Figure:
    groups = load_groups(path)
    return plot.plot_memory(groups, groups[0].runs[0].task)


def _sweep(path: Path) -> Figure:
    return plot_sweep([Point(**point) for point in json.loads(path.read_text("utf-8"))], REFERENCE)


def _study(path: Path) -> Figure:
    return precision_report.plot(load_study(path), "Perceptron on scikit-learn's digits")


def _scaling(path: Path, draw: Callable[..., Figure]) -> Figure:
    return draw(Results.load(path).scaling)


FIGURES: Mapping[str, Picture] = {
    "headline.png": Picture(lambda path: headline.plot(load_boards(path)), BOARD, 150),
    "sensitivity.png": Picture(_sweep, SWEEP),
    "precision.png": Picture(_study, STUDY),
    "structures.png": Picture(lambda _: plot_structures()),
    "composed.png": Picture(lambda _: plot_structures(COMPOSED)),
    report.TIME_FIGURE: Picture(partial(_scaling, draw=figures.plot_times), BENCH),
    report.MEMORY_FIGURE: Picture(partial(_scaling, draw=figures.plot_memory), BENCH),
    "lab_digits.png": Picture(_error_curves, "compare_digits"),
    "lab_vgg.png": Picture(_error_curves, "compare_vgg"),
    "lab_vgg_memory.png": Picture(_memory, "compare_vgg"),
    "lab_cct.png": Picture(_error_curves, "compare_cct"),
    "lab_gpt.png": Picture(_error_curves, "compare_gpt"),
    "lab_gcn.png": Picture(_error_curves, "compare_gcn"),
}
"""All images of README and docs by their names in ``docs/images``."""


# --- Tables -----------------------------------------------------------------------------------------------


PEERS, OWN = ("SGD", "Muon", "SOAP", "official"), ("SINGD diagonal", "control")
"""Optimizers that two tables of one board share out, beside those that both have."""


Told = Callable[[boards.Board], str]
"""What a board comes to, in sentences."""


def _board(phase: str, source: str = BOARD, without: Sequence[str] = (), told: Told | None = None) -> str:
    board = load_boards(stored.FOLDER / f"{source}.json")[phase]
    table = boards.losses_and_errors(board, without)
    return table if told is None else f"{table}\n\n{told(board)}"


def _ablation(chosen_on: bool) -> str:
    board = load_boards(stored.FOLDER / f"{ABLATION}.json")["defaults"]
    table = boards.ablation(board, chosen_on)
    return table if chosen_on else f"{table}\n\n{boards.validated(board)}"


def _results() -> str:
    found = load_boards(stored.FOLDER / f"{BOARD}.json")
    return f"{boards.results(found)}\n\n{boards.summary(found)}"


def _structures() -> str:
    """What structures there are, what a layer's state takes with each, and how many entries a factor has."""
    rows = []
    for texts, matrices, entries in STRUCTURES:
        example = re.sub(r"k1,k2", "15,15", texts[0]).replace("(k)", "(32)")
        plan = ingot.plan(nn.Linear(1024, 1024, device="meta"), structure=example, cache_products=False)
        memory = f"{plan.state_bytes / plan.adamw_bytes:.2f}"
        rows.append((", ".join(f"`{text}`" for text in texts), matrices, memory, entries))
    columns = ("text", "matrices", "memory / AdamW's", "entries for dimension d")
    return markdown_table(columns, rows, left=2)


STRUCTURES = (
    (("dense",), "all", "d²"),
    (("diagonal",), "diagonal", "d"),
    (("block_diagonal(k)",), "dense blocks of k rows along the diagonal", "k d"),
    (("tril", "triu"), "lower, upper triangular", "d (d + 1) / 2"),
    (("tril_toeplitz", "triu_toeplitz"), "triangular, constant along diagonals", "d"),
    (
        ("rank_triu(k)", "rank_tril(k)"),
        "[[dense, B], [0, diagonal]], [[dense, 0], [B, diagonal]]",
        "(k + 1) d − k",
    ),
    (
        ("rank_triu_mirrored(k)", "rank_tril_mirrored(k)"),
        "the same with the diagonal block first",
        "(k + 1) d − k",
    ),
    (
        ("hierarchical(k1,k2)",),
        "[[dense, B, B'], [0, diagonal, 0], [0, B'', dense]]",
        "(k1 + k2 + 1) d − k1 − k2 − k1 k2",
    ),
)


def _measured(table: Callable[[Results], str]) -> str:
    """What `make bench` found, in one of its tables."""
    return table(Results.load(stored.FOLDER / f"{BENCH}.json"))


def _comparison(name: str, *kinds: str, without: str = "") -> str:
    """A comparison without its times, which `make bench` measures as they should be; or some columns."""
    groups = load_groups(stored.FOLDER / f"compare_{name}.json")
    head, rows = summary.columns(groups), summary.rows(groups)
    places = [
        i
        for i, column in enumerate(head)
        if (i == 0 or column.startswith(kinds) if kinds else not column.startswith(("seconds", "step")))
    ]
    shown = [[row[i] for i in places] for row in rows if row[0] != without]
    return markdown_table([head[i] for i in places], shown)


def _precision(only: str = "") -> str:
    """The study's table; ``only`` of one setting."""
    rows = precision_report.table_rows(load_study(stored.FOLDER / f"{STUDY}.json"))
    if only:
        rows = [(optimizer, *losses) for optimizer, setting, *losses in rows if setting == only]
        return markdown_table((f"test loss, {only}", *precision_report.COLUMNS[2:]), rows)
    return markdown_table(precision_report.COLUMNS, rows, left=2)


TABLES: Mapping[tuple[str, str], Callable[[], str]] = {
    ("README.md", "results"): _results,
    ("README.md", "structures"): _structures,
    ("docs/from_adamw.md", "defaults"): partial(
        _board, "defaults", without=PEERS, told=boards.beside_reference
    ),
    ("docs/from_adamw.md", "peers"): partial(
        _board, "defaults", without=OWN, told=partial(boards.beside_others, others=PEERS)
    ),
    ("docs/from_adamw.md", "in_time"): partial(_board, f"in {REFERENCE}'s time", told=boards.in_time),
    ("docs/from_adamw.md", "tuned"): partial(_board, "tuned"),
    ("docs/from_adamw.md", "bfloat16"): partial(_board, "defaults", BF16),
    ("docs/from_adamw.md", "step_costs"): partial(_measured, tables.cost_of_defaults),
    ("docs/from_adamw.md", "chosen"): partial(_ablation, True),
    ("docs/from_adamw.md", "validated"): partial(_ablation, False),
    ("docs/laboratory.md", "digits"): partial(_comparison, "digits"),
    ("docs/laboratory.md", "vgg"): partial(_comparison, "vgg"),
    ("docs/laboratory.md", "cct"): partial(_comparison, "cct"),
    ("docs/laboratory.md", "gpt"): partial(_comparison, "gpt"),
    ("docs/laboratory.md", "gcn"): partial(_comparison, "gcn"),
    ("docs/precision.md", "precision"): _precision,
    ("docs/reproduce.md", "vgg"): partial(_comparison, "vgg", "test error", "peak"),
    ("docs/reproduce.md", "precision"): partial(_precision, "paper, λ = 0.0001"),
    ("docs/reproduce.md", "cct"): partial(_comparison, "cct", "test error", "state"),
    ("docs/reproduce.md", "growth"): partial(_measured, tables.gaps_table),
    ("docs/reproduce.md", "gcn"): partial(_comparison, "gcn", "test error", "best", without="SGD"),
}
"""What stands between the marks of pages, by page and name."""

END = "<!-- end of table -->"


def begin(name: str) -> str:
    """The mark before a table."""
    return f"<!-- table: {name} -->\n"


def written(text: str, name: str, table: str) -> str:
    """A page with a table between its marks."""
    before, rest = text.split(begin(name))
    return f"{before}{begin(name)}\n{table}\n\n{rest[rest.index(END) :]}"


def main() -> None:
    for name, picture in FIGURES.items():
        picture.write(IMAGES / name)
        print((IMAGES / name).relative_to(ROOT))
    for (page, name), table in TABLES.items():
        path = ROOT / page
        path.write_text(written(path.read_text("utf-8"), name, table()), "utf-8")
        print(f"{page}: {name}")
    text = report.page(Results.load(stored.FOLDER / f"{BENCH}.json"), "images/")
    report.write_between(ROOT / "docs" / "benchmarks.md", report.BEGIN, report.END, text)


if __name__ == "__main__":
    main()

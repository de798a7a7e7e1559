"""Figures and tables of README and docs are those of the stored results, and there are no others."""

import json
import re
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from benchmarks import boards, headline, pages, report, stored
from benchmarks.measured import Results
from ingot.lab import summary
from ingot.lab.records import Folder, Record, Run
from ingot.lab.scoreboard import Standing

ROOT = pages.ROOT
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def _images(page: Path) -> list[Path]:
    """What a page shows of files."""
    found = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*src=\"([^\"]+)\"", page.read_text("utf-8"))
    return [(page.parent / (one or other)).resolve() for one, other in found]


# --- Figures ----------------------------------------------------------------------------------------------


def test_every_image_is_drawn_by_the_registry():
    shown = {image for page in MARKDOWN for image in _images(page)}
    registered = {(pages.IMAGES / name).resolve() for name in pages.FIGURES}
    assert shown == registered
    assert set(pages.IMAGES.resolve().iterdir()) == registered


@pytest.mark.parametrize("name", pages.FIGURES)
def test_figures_are_drawn_from_the_results_that_are_stored(name):
    """If this fails, `make figures` draws anew."""
    assert Image.open(pages.IMAGES / name).text["Source"] == pages.FIGURES[name].digest


@pytest.mark.parametrize("page", [page for page in MARKDOWN if _images(page)], ids=lambda page: page.name)
def test_pages_name_the_command_that_makes_their_figures(page):
    assert re.search(r"\bmake figures\b", page.read_text("utf-8"))


def test_the_composed_structures_are_those_of_the_command_on_the_page():
    page = (ROOT / "docs" / "structures.md").read_text("utf-8")
    assert f"ingot structures {' '.join(map(repr, pages.COMPOSED))}\n" in page


def test_a_figure_remembers_its_results(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    (tmp_path / "made.json").write_text("[1]")
    seen = []
    picture = pages.Picture(lambda path: seen.append(path) or Figure(figsize=(1, 1)), "made")
    before = picture.digest
    picture.write(tmp_path / "made.png")
    assert seen == [tmp_path / "made.json"]
    assert Image.open(tmp_path / "made.png").text["Source"] == before
    (tmp_path / "made.json").write_text("[2]")
    assert picture.digest != before


# --- Tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "name"), pages.TABLES)
def test_tables_are_those_of_the_stored_results(page, name):
    """If this fails, `make figures` writes anew."""
    text = (ROOT / page).read_text("utf-8")
    assert pages.written(text, name, pages.TABLES[page, name]()) == text


def test_no_table_is_without_an_entry():
    marked = {
        (page.relative_to(ROOT).as_posix(), name)
        for page in MARKDOWN
        for name in re.findall(r"^<!-- table: (\w+) -->$", page.read_text("utf-8"), re.MULTILINE)
    }
    assert marked == set(pages.TABLES)


def test_the_page_of_benchmarks_is_that_of_the_stored_results():
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    shown = text.split(report.BEGIN)[1].split(report.END)[0]
    assert shown.strip() == report.page(Results.load(stored.FOLDER / "results.json"), "images/").strip()


def test_a_table_is_put_between_its_marks_and_nowhere_else():
    page = f"a\n{pages.begin('one')}\nold\n\n{pages.END}\nb\n{pages.begin('two')}\nstays\n\n{pages.END}\nc\n"
    new = pages.written(page, "one", "new")
    assert new == page.replace("old", "new")
    assert pages.written(new, "one", "new") == new


# --- Boards -----------------------------------------------------------------------------------------------


def _standing(loss: float, error: float | None = None, spread: float = 0.003) -> Standing:
    return Standing(loss, spread, loss if error is None else error, 0.1, 0.5, 0.7, 1.2, 0.9, 0)


BOARD = {
    "digits": {"AdamW": _standing(0.4, 3.0), "SINGD": _standing(0.3, 2.0, 0.006), "SGD": _standing(inf, inf)},
    "diamonds": {"AdamW": _standing(0.02), "SINGD": _standing(0.025)},
    "unheard_of": {"AdamW": _standing(1.0, 9.0, nan), "SINGD": _standing(0.5, 8.0, nan)},
}


def test_losses_and_errors_of_a_board():
    assert boards.losses_and_errors(BOARD).splitlines()[2:] == [
        "| `digits` | 0.400 ± 0.003 (3.0 %) | 0.300 ± 0.006 (2.0 %) | diverged |",
        "| `diamonds` | 0.0200 ± 0.0030 | 0.0250 ± 0.0030 | – |",
        "| `unheard_of` | 1.000 (9.0 %) | 0.500 (8.0 %) | – |",
    ]
    assert boards.losses_and_errors(BOARD, without=["SGD"]).splitlines()[0] == "| task | AdamW | SINGD |"


def test_the_results_of_the_readme():
    found = {"defaults": BOARD, "tuned": {"digits": BOARD["digits"]}}
    assert boards.results(found).splitlines() == [
        "| test loss | AdamW | SINGD | AdamW, tuned | SINGD, tuned |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| CNN, digits | 0.400 ± 0.003 | **0.300 ± 0.006** | 0.400 ± 0.003 | **0.300 ± 0.006** |",
        "| MLP, diamond prices | **0.0200 ± 0.0030** | 0.0250 ± 0.0030 | – | – |",
        "| unheard_of | 1.000 | **0.500** | – | – |",
        "| geometric mean | 1 | 0.78 | 1 | 0.75 |",
        "| ahead of AdamW |  | 2 of 3 |  | 1 of 1 |",
    ]
    told = boards.summary(found)
    assert "on 2 of 3 tasks" in told
    assert "0.50 of the steps and 0.70 of the time" in told
    assert told.endswith("With both tuned it is ahead on 1 of 1.")
    close = BOARD | {"diamonds": {"AdamW": _standing(0.02), "SINGD": _standing(0.024)}}  # 0.0042 is level
    assert boards.summary({"defaults": BOARD, "tuned": BOARD}).endswith(
        "ahead on 2 of 3, behind on 1 (MLP, diamond prices)."
    )
    assert boards.summary({"defaults": BOARD, "tuned": close}).endswith(
        "ahead on 2 of 3, within a standard error of AdamW on 1 (MLP, diamond prices)."
    )


WITH_CONTROL = {
    "digits": BOARD["digits"] | {"control": _standing(0.2)},
    "cora": {
        "AdamW": replace(_standing(0.5), step_seconds=1.0),
        "SINGD": _standing(0.49, spread=0.004),
        "control": _standing(0.7),
    },
}


def test_what_a_board_comes_to_in_sentences():
    told = boards.beside_reference(WITH_CONTROL)
    assert told.startswith(
        "SINGD is ahead of AdamW in loss on 2 of 2 tasks and in error on 2, and ahead of the control on all "
        "but `digits`. To AdamW's best loss it takes 0.50 of the steps and 0.70 of the time (geometric "
        "means; a step takes 1.10 of AdamW's time). None of its runs diverged. "
    )
    assert told.endswith("smallest on `cora`: 2.0%, 2.0 standard errors of the difference.")
    assert "control" not in boards.beside_reference({"digits": BOARD["digits"]})
    lost = {"digits": BOARD["digits"] | {"SINGD": replace(_standing(inf, inf), diverged=2, steps=inf)}}
    assert "does not come to AdamW's best loss" in boards.beside_reference(lost)
    assert "2 of its runs diverged" in boards.beside_reference(lost)


def test_what_a_board_in_the_same_time_comes_to():
    assert boards.in_time(BOARD) == (
        "SINGD is ahead in loss on 2 of 3 and in error on 2, behind on 1 (`diamonds`)."
    )


def test_on_how_many_tasks_it_is_ahead_of_others():
    assert boards.beside_others(WITH_CONTROL, ["control", "SGD"]) == (
        "SINGD is ahead of control on 1 of 2, which is ahead on `digits`; of SGD on 1 of 1."
    )


def _losses(**by_label: float) -> dict[str, Standing]:
    labels = {"default": "SINGD", "warm": "SINGD precond_warmup=0", "rule": "IKFAC"}
    return {labels.get(name, name): _standing(loss, 1.0) for name, loss in by_label.items()}


ABLATION = {
    "digits": _losses(AdamW=1.0, default=0.5, warm=0.25, rule=inf),
    "fashion_cnn": _losses(AdamW=2.0, default=1.0, warm=0.5, rule=1.0),
    "cifar_cnn": _losses(AdamW=1.0, default=0.8, warm=0.9, rule=0.7),
    "python_gpt": _losses(AdamW=1.0, default=0.8, warm=0.8, rule=0.8),
}


def test_an_ablation_by_what_tasks_are_for():
    assert boards.ablation(ABLATION, chosen_on=True).splitlines() == [
        "|  | `digits` | `fashion_cnn` | geometric mean |",
        "| --- | ---: | ---: | ---: |",
        "| **SINGD** | 0.50 | 0.50 | 0.500 |",
        "| `precond_warmup=0` | 0.25 | 0.25 | 0.250 |",
        "| IKFAC | diverged | 0.50 | diverged |",
    ]
    assert "| IKFAC | 0.70 | 0.80 | 0.748 |" in boards.ablation(ABLATION, chosen_on=False)
    told = boards.validated(ABLATION)
    assert "1 of 2 choices hold" in told
    assert told.endswith("Better are IKFAC.")


def test_the_headline_shows_what_there_is_of_its_phases():
    diverged = {"digits": BOARD["digits"] | {"SINGD": _standing(inf, inf)}}
    found = headline.plot({"defaults": BOARD, "in AdamW's time": BOARD, "tuned": diverged})
    assert len(headline.plot({"defaults": BOARD, "tuned": {"cora": {}}}).axes) == 1
    defaults, tuned = found.axes
    names = [label.get_text() for label in defaults.get_yticklabels()]
    assert names == ["CNN, digits", "MLP, diamond prices", "unheard_of", "geometric mean"]
    assert [text.get_text() for text in defaults.texts] == ["−25%", "+25%", "−50%", "−22%"]
    assert [text.get_text() for text in tuned.texts] == ["diverged", "diverged"]
    assert [text.get_position()[1] for text in tuned.texts] == [0, 3]  # in line with the others
    share, spread = headline.relative(BOARD["digits"], "SINGD")
    assert share == pytest.approx(0.75)
    assert spread == pytest.approx(0.75 * (0.02**2 + 0.0075**2) ** 0.5)


# --- What is stored ---------------------------------------------------------------------------------------


def _run(label: str, seed: int, last: float) -> Run:
    records = [
        Record(10 * i, float(i), 1.5 * i, 0.1, nan, loss, 50 * loss, 7) for i, loss in enumerate((1.0, last))
    ]
    settings = {"learning rate": 0.01, "torch": "2.0"}
    return Run("A task", label, seed, settings, "error (%)", 0.0, "done", 100 + seed, 1000, records)


def test_runs_are_kept_without_loss_of_what_is_shown(tmp_path):
    runs = [_run(label, seed, 0.25 + 0.125 * seed) for label in ("AdamW", "SINGD") for seed in (0, 1)]
    runs.append(replace(_run("SINGD", 2, nan), state="diverged"))
    for index, run in enumerate(runs):
        run.started = float(index)
        folder = Folder(tmp_path / "runs" / str(index))
        folder.start(run)
        for record in run.records:
            folder.add(record)
    path = stored.keep("own", tmp_path / "runs", tmp_path)
    assert path.name == "compare_own.json"
    kept, groups = (
        stored.load_groups(path),
        [summary.Group("AdamW", runs[:2]), summary.Group("SINGD", runs[2:])],
    )
    assert summary.columns(kept) == summary.columns(groups)
    assert summary.rows(kept) == summary.rows(groups)
    assert [group.runs[0].column("epoch") for group in kept] == [[0, 1]] * 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no run in"):
        stored.keep("own", tmp_path / "empty", tmp_path)


def test_a_study_of_precision_is_kept(tmp_path):
    from ingot.lab.precision import Result, Setting
    from ingot.lab.precision_report import records, table_rows

    result = Result(Setting("KFAC", 1e-4, 1e-3, 0.05))
    for precision, last in (("float32", 0.1), ("bfloat16", 0.3)):
        result.runs[precision] = [_run("KFAC", seed, last + 0.01 * seed) for seed in (0, 1)]
        result.positive[precision] = [True, True, False, True]
    (tmp_path / "records.json").write_text(json.dumps({"results": records([result])}))
    (found,) = stored.load_study(stored.keep("study", tmp_path, tmp_path))
    assert found.setting == result.setting
    assert table_rows([found]) == table_rows([result])
    assert found.runs["float32"][1].column("step") == [0, 10]

from __future__ import annotations

import json
from math import inf, isfinite, nan

import pytest
import torch
from rich.console import Console

from ingot import KFAC
from ingot.lab import precision
from ingot.lab.precision import (
    PRECISIONS,
    TUNED,
    Result,
    Setting,
    compare,
    in_precision,
    inverses,
    is_positive,
)
from ingot.lab.precision_report import diverged, markdown_report, plot, table_rows, write
from ingot.lab.records import Record, Run
from ingot.lab.training import Loop, Trainer
from tests.lab.command import finish

STEPS = 21  # of one epoch


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return finish(tmp_path_factory, "precision", "--epochs", "1")


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_writes_all_files_and_prints_the_reports_path_last(finished):
    out, printed = finished
    names = {"report.md", "records.json", "precision.png", "precision.svg"}
    assert {path.name for path in out.iterdir()} == names
    assert printed.splitlines()[-1] == str(out / "report.md")


def test_every_setting_is_trained_in_both_precisions(finished):
    out, _ = finished
    found = read(out / "records.json")["results"]
    assert len(found) == 2 * len(TUNED)
    keys = ("optimizer", "damping", "lr", "precond_lr")
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert [one["precision"], other["precision"]] == list(PRECISIONS)
        assert [one[key] for key in keys] == [other[key] for key in keys]
        assert [[line["step"] for line in run["records"]] for run in one["runs"]] == [[0, STEPS]]
        # The same start, but for rounding.
        first, its = (found["runs"][0]["records"][0]["test_loss"] for found in (one, other))
        assert first == pytest.approx(its, rel=0.02)
        # KFAC's inverses of two factors of three layers, seen at the tenth and the twentieth step.
        assert one["inverses_seen"] == (12 if one["optimizer"] == "KFAC" else 0)


def test_report_has_the_records_numbers(finished):
    out, printed = finished
    report = (out / "report.md").read_text(encoding="utf-8")
    result = read(out / "records.json")["results"][0]
    loss = result["runs"][0]["records"][-1]["test_loss"]
    assert f"| SINGD | paper, λ = 0.0001 | {loss:.3f} | " in report
    assert f"{loss:.3f}" in printed
    assert f"| steps | {STEPS} |" in report


def test_bfloat16_is_pure():
    trainer = Trainer(in_precision(precision.task(), "bfloat16"), TUNED[0], 0, Loop(epochs=1))
    trainer.train()
    optimizer = trainer.plain_optimizer
    assert {p.dtype for p in optimizer.state} == {torch.bfloat16}
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.numel() > 1]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore::ingot.HealthWarning")
def test_a_run_that_blows_up_is_known_to_have():
    wild = Setting("KFAC", 1e-3, 1e30, 0.1)
    (result,) = compare(precision.task(), [wild], Loop(epochs=1), [0], Console(quiet=True))
    for runs in result.runs.values():
        assert all(map(diverged, runs))


def fabricated(bfloat16_ends: list[float]) -> list[Result]:
    """Results that ended at 0.1 and 0.3, but KFAC's in bfloat16."""
    results = [Result(setting) for setting in TUNED]
    for result in results:
        for name, runs in result.runs.items():
            is_kfac = result.setting.optimizer == "KFAC" and name == "bfloat16"
            for seed, end in enumerate(bfloat16_ends if is_kfac else [0.1, 0.3]):
                run = Run("t", result.setting.optimizer, seed, {})
                for step, loss in ((0, 2.3), (10, end)):
                    run.records.append(Record(step, step, step, 0.1, loss, loss, loss, 0))
                runs.append(run)
    return results


@pytest.mark.parametrize(
    ("ends", "shown"),
    [
        ([0.2, 0.4], ("0.300 ± 0.141", "+50.0%", "+0.7")),
        ([0.2, nan], ("0.200, diverged 1 of 2", "diverged", "–")),
        ([0.2, 2.4], ("0.200, diverged 1 of 2", "diverged", "–")),  # above its start
        ([inf, 1e9], ("diverged, 2 of 2", "diverged", "–")),
    ],
    ids=str,
)
def test_diverged_runs_are_shown_as_such(ends, shown, tmp_path):
    results = fabricated(ends)
    rows = {row[0]: row[2:6] for row in table_rows(results)}
    assert rows["KFAC"] == ("0.200 ± 0.141", *shown)
    assert rows["SINGD"] == ("0.200 ± 0.141", "0.200 ± 0.141", "+0.0%", "+0.0")
    assert f"| {shown[0]} |" in markdown_report(results, {"task": "t"}, searched_now=False)
    lost = sum(map(diverged, results[2].runs["bfloat16"]))
    write(tmp_path, results, {"task": "t"}, searched_now=False)
    of_kfac = read(tmp_path / "records.json")["results"][5]
    assert [run["diverged"] for run in of_kfac["runs"]].count(True) == lost
    assert of_kfac["runs"][1]["records"][1]["test_loss"] == (ends[1] if isfinite(ends[1]) else None)


def test_the_figure_bears_runs_that_diverged(tmp_path):
    figure = plot(fabricated([nan, 0.2]), "t")
    figure.savefig(tmp_path / "figure.png")
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts == ["1 of 2"] * 6  # four dampings, one of them a second time, and the defaults


def test_tuning_finds_the_better_rates_and_keeps_the_rest(monkeypatch):
    monkeypatch.setattr(precision, "LRS", (1e-6, 1e-2))
    monkeypatch.setattr(precision, "PRECOND_LRS", (0.02,))
    monkeypatch.setattr(precision, "TUNED", (Setting("AdamW", None, 1.0), Setting("IKFAC", 0.1, 1.0, 1.0)))
    tuned = precision.tune(precision.task(), Loop(epochs=1), Console(quiet=True))
    assert tuned == [Setting("AdamW", None, 1e-2), Setting("IKFAC", 0.1, 1e-2, 0.02)]


def test_the_settings_are_among_those_searched():
    for setting in TUNED:
        assert setting in precision.candidates(setting)


def test_inverses_are_found_and_judged():
    model = torch.nn.Linear(3, 2)
    optimizer = KFAC(model)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    found = list(inverses(optimizer))
    assert [tuple(matrix.shape) for matrix in found] == [(4, 4), (2, 2)]
    assert all(map(is_positive, found))
    assert not is_positive(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    assert not is_positive(torch.tensor([[float("nan")]]))

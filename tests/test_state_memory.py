"""The benchmark of memory on small models: what it measures, and what is promised of it."""

import json
from functools import partial

import pytest

from benchmarks import state_memory
from ingot.lab.memory import state_bytes

SMALL = {"vit": {"width": 48, "depth": 2}, "vgg16": {"width": 8}}


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        small = {
            name: state_memory.Workload(name, partial(getattr(state_memory, name), **size), batch=1)
            for name, size in SMALL.items()
        }
        patch.setattr(state_memory, "WORKLOADS", small)
        yield state_memory


@pytest.fixture(scope="module", params=list(SMALL))
def measured(script, request):
    """What some optimizers take with a small model, and what their state says of itself."""
    found, told = {}, {}
    for name in ("AdamW", "SINGD diagonal", "KFAC dense"):
        make, made = script.contenders()[name], []

        def keep(model, make=make, made=made):
            made.append(make(model))
            return made[0]

        found[name] = script.measure(script.WORKLOADS[request.param], keep)
        told[name] = state_bytes(made[0]) if name == "AdamW" else _described(made[0])
    return found, told


def _described(optimizer) -> int:
    return sum(row.state_bytes for row in optimizer.describe().rows)


def test_diagonal_singd_takes_no_more_than_adamw(measured):
    found, _ = measured
    assert found["SINGD diagonal"].state <= found["AdamW"].state
    assert found["SINGD diagonal"].peak <= found["AdamW"].peak


def test_all_that_is_kept_is_told(measured):
    found, told = measured
    assert {name: memory.state for name, memory in found.items()} == pytest.approx(told, rel=0.01)


def test_peaks_hold_more_than_the_state_and_updates_more_than_that(measured):
    found, _ = measured
    for memory in found.values():
        assert memory.state < memory.peak <= memory.update_peak


def test_writes_files_and_page(script, tmp_path, capsys, monkeypatch):
    few = {name: script.contenders()[name] for name in ("AdamW", "SINGD diagonal")}
    monkeypatch.setattr(script, "contenders", lambda: few)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n")
    script.main(["--out", str(tmp_path / "new"), "--page", str(page)])
    text = (tmp_path / "new" / "results.md").read_text()
    assert text in capsys.readouterr().out
    assert page.read_text() == f"before\n{script.BEGIN}\n{text}\n{script.END}\nafter\n"
    results = json.loads((tmp_path / "new" / "results.json").read_text())["models"]
    for of_model in results.values():
        ratio = of_model["SINGD diagonal"]["state"] / of_model["AdamW"]["state"]
        assert f"| {ratio:.2f} |" in text


def test_an_unknown_model_is_refused(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--models", "mlp"])
    assert "choose from" in capsys.readouterr().err


def test_the_page_shows_every_optimizer(script):
    page = script.PAGE.read_text("utf-8")
    shown = page[page.index(script.BEGIN) : page.index(script.END)]
    for name in script.contenders():
        assert shown.count(f"| {name} | ") == 4  # else run `make memory`

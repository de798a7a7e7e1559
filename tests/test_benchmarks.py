"""The benchmark script on models so small that only its own work is left to test."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ingot

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "step_time.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("step_time", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    images = module.Workload(
        title="Tiny images",
        model=lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        ),
        batch=lambda: (torch.randn(4, 2, 6, 6), torch.randint(3, (4,))),
        rounds=1,
        turn=3,
    )
    tokens = module.Workload(
        title="Tiny tokens",
        model=lambda: module.GPT(d=8, depth=1, heads=2, length=6, words=5),
        batch=lambda: (torch.randint(5, (2, 6)), torch.randint(5, (2, 6))),
        rounds=1,
        turn=1,
        per_token=True,
    )
    monkeypatch.setattr(module, "WORKLOADS", {"images": images, "tokens": tokens})
    return module


def test_writes_and_prints_what_it_measured(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "MIN_WINDOW", 2)
    out = tmp_path / "new" / "bench"
    script.main(["--rounds", "2", "--every", "1", "--out", str(out)])
    results = json.loads((out / "results.json").read_text())
    text = (out / "results.md").read_text()
    captured = capsys.readouterr()
    assert captured.out.strip() == text.strip()
    assert "images: round 2 of 2" in captured.err
    assert str(torch.__version__) == results["torch"]
    assert "noisy" in text
    assert list(results["models"]) == ["images", "tokens"]
    for measured in results["models"].values():
        assert len(measured) == 15
        for kind in ("iteration_ratio", "step_ratio"):
            assert set(measured["SGD momentum"][kind].values()) == {1.0}
        assert measured["AdamW"]["state_ratio"] == 1
        for name, one in measured.items():
            assert f"| {name} | " in text
            assert len(one["iteration_ms"]) == len(one["step_ms"]) == 2
            for step, iteration in zip(one["step_ms"], one["iteration_ms"], strict=True):
                assert 0 < step < iteration
            assert one["last_loss"] is not None


def test_counts_the_state_that_an_optimizer_keeps(script):
    workload, makers = script.WORKLOADS["tokens"], script.contenders(every=10, per_token=True)
    batches = [workload.batch()]

    def state_bytes(name):
        return script.prepare(workload.model(), makers[name], batches).state_bytes

    sizes = [p.numel() for p in workload.model().parameters()]
    assert state_bytes("SGD momentum") == 4 * sum(sizes)
    assert state_bytes("AdamW") == 4 * (2 * sum(sizes) + len(sizes))  # a counter for each parameter, too
    for package in ("official singd", "ingot SINGD"):
        assert state_bytes(f"{package} dense") > state_bytes(f"{package} diagonal") > 4 * sum(sizes)


@pytest.mark.parametrize(("every", "window"), [(1, 10), (3, 12), (10, 10), (25, 25)])
def test_a_round_is_whole_intervals(script, every, window):
    makers = {"ours": lambda model: ingot.SINGD(model, precond_every=every, precond_warmup=0)}
    contestants = script.measure(script.WORKLOADS["images"], makers, every, 4, progress=lambda _: None)
    measured = contestants["ours"]
    assert len(measured.iteration) == len(measured.step) == script.WARMUP_ITERATIONS + 4 * window
    assert window % every == 0
    updates = [state["updates"] for state in measured.optimizer.state.values() if "updates" in state]
    assert updates == [-(-len(measured.step) // every)] * 2  # one in each interval, in both layers


def test_says_that_the_official_package_is_missing(script, monkeypatch):
    monkeypatch.setattr(script, "Official", None)
    assert not [name for name in script.contenders(every=1, per_token=False) if "official" in name]
    assert "not installed: skipped" in script.preamble(script.conditions(every=1, threads=1))


def test_says_which_optimizer_diverged(script):
    workload = script.WORKLOADS["images"]
    makers = script.contenders(every=1, per_token=False)
    makers = {name: makers[name] for name in ("SGD momentum", "AdamW")}
    makers["wild"] = lambda model: torch.optim.SGD(model.parameters(), lr=1e30)
    results = script.summary(
        script.measure(workload, makers, 1, rounds=1, progress=lambda _: None), window=10
    )
    assert script.table("Tiny", results).endswith("distrust the times of: wild.\n")

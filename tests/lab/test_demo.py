from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from math import isfinite

import pytest
import torch
from torch import Tensor, nn

from ingot.lab.digits import digits
from ingot.lab.plot import plot_error
from ingot.lab.report import mean_and_spread, record
from ingot.lab.train import OPTIMIZERS, Run, Schedule, batches, state_bytes, train
from tests.lab.command import finish

STEPS = 6


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return finish(tmp_path_factory, "demo", STEPS)


class Spy:
    """Makes models that note the weights they start from and the batches they are trained on."""

    def __init__(self, make):
        self.make = make
        self.weights: dict[str, Tensor] = {}
        self.batches: list[Tensor] = []

    def __call__(self) -> nn.Module:
        model = self.make()
        model.register_forward_pre_hook(self.note)
        return model

    def note(self, model, args):
        if not self.weights:
            self.weights = {name: value.clone() for name, value in model.state_dict().items()}
        if model.training:
            self.batches.append(args[0].clone())


def spied(name: str, seed: int) -> Spy:
    task = digits()
    spy = Spy(task.model)
    train(replace(task, model=spy), name, seed, Schedule(STEPS))
    return spy


def test_writes_all_files_and_prints_the_reports_path_last(finished):
    out, printed = finished
    assert {path.name for path in out.iterdir()} == {"report.md", "records.json", "demo.png", "demo.svg"}
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (out / "demo.svg").read_text(encoding="utf-8")
    assert printed.splitlines()[-1] == str(out / "report.md")


def test_report_has_the_records_numbers(finished):
    out, printed = finished
    records = json.loads((out / "records.json").read_text(encoding="utf-8"))
    report = (out / "report.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("|")]
    table = {line[0]: line[1:] for line in lines}
    runs = {run["optimizer"]: run for run in records["runs"]}
    assert set(runs) == {"SINGD", "IKFAC", "KFAC", "AdamW", "SGD"} == set(OPTIMIZERS)
    for name, run in runs.items():
        error, loss, seconds = (run[key][-1] for key in ("test_error_percent", "test_loss", "seconds"))
        state = run["state_bytes"] / runs["AdamW"]["state_bytes"]
        numbers = [f"{run['lr']:g}", f"{error:.2f}", f"{loss:.3f}", f"{seconds:.2f}", f"{state:.2f}"]
        assert table[name] == numbers
        assert all(number in printed for number in numbers)
    for name, value in records["settings"].items():
        assert table[name] == [str(value)]
    assert table["steps"] == [str(STEPS)]
    assert table["torch"] == [torch.__version__]


def test_records_start_before_training_and_end_at_the_last_step():
    run = train(digits(), "SGD", 0, Schedule(steps=5, eval_every=2))
    assert run.steps == [0, 2, 4, 5]
    assert run.seconds[0] == 0
    assert run.seconds == sorted(run.seconds)
    assert len(run.steps) == len(run.seconds) == len(run.test_error_percent) == len(run.test_loss)


def test_a_loss_that_is_not_finite_ends_the_training_but_not_the_record():
    def wild(model):
        return torch.optim.SGD(model.parameters(), lr=1e30)

    run = train(digits(), "wild", 0, Schedule(steps=6, eval_every=2), make=wild)
    assert run.steps == [0, 2, 4, 6]
    assert not any(map(isfinite, run.test_loss[1:]))
    assert run.seconds[1] == run.seconds[-1]  # nothing was trained any more
    assert json.loads(json.dumps(record(run), allow_nan=False))["test_loss"][1:] == [None] * 3


def test_all_optimizers_start_and_are_fed_alike():
    first, *others = (spied(name, seed=0) for name in OPTIMIZERS)
    assert len(first.batches) == STEPS
    for other in others:
        assert first.weights.keys() == other.weights.keys()
        assert all(torch.equal(first.weights[key], other.weights[key]) for key in first.weights)
        assert len(other.batches) == STEPS
        assert all(torch.equal(a, b) for a, b in zip(first.batches, other.batches, strict=True))


def test_another_seed_is_another_start_and_another_order():
    zero, one = spied("SGD", seed=0), spied("SGD", seed=1)
    assert not torch.equal(zero.weights["0.weight"], one.weights["0.weight"])
    assert not torch.equal(zero.batches[0], one.batches[0])


def test_an_epoch_has_no_example_twice():
    epoch = torch.cat(list(islice(batches(130, 32, seed=0), 4)))
    assert len(epoch.unique()) == len(epoch) == 128


def test_split_is_fixed_stratified_and_disjoint():
    one, two = digits(), digits()
    assert torch.equal(one.train_x, two.train_x)
    assert (len(one.train_y), len(one.test_y)) == (1347, 450)
    assert one.test_y.bincount().min() >= 43
    rows = {tuple(x.flatten().tolist()) for x in one.train_x}
    assert not any(tuple(x.flatten().tolist()) in rows for x in one.test_x)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name):
    run = train(digits(), name, 0, Schedule(steps=30))
    assert run.test_error_percent[-1] < 45  # half of what guessing gives
    assert run.test_loss[-1] < run.test_loss[0]


def test_state_bytes_are_measured():
    model = nn.Linear(3, 4)
    optimizer = OPTIMIZERS["AdamW"](model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert state_bytes(optimizer) == 4 * (2 * (12 + 4) + 2)  # two moments, and one step count per parameter


def test_spread_needs_two_values():
    assert mean_and_spread([1.0]) == "1.00"
    assert mean_and_spread([1.0, 3.0]) == "2.00 ± 1.41"


def test_figure_bears_an_error_of_zero(tmp_path):
    runs = [Run("SGD", seed, 0.1, 0, [0, 1], [0.0, 1.0], [90.0, float(seed)], [2.0, 0.1]) for seed in (0, 1)]
    plot_error(runs, "nothing").savefig(tmp_path / "figure.png")

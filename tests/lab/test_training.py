"""The training loop: what it trains, in which order, and how it goes on after an interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import cos, isnan, pi
from pathlib import Path

import pytest
import torch
from torch import nn

from ingot.lab.interrupting import Interrupted
from ingot.lab.loading import Shares, Shuffled
from ingot.lab.optimizers import choose
from ingot.lab.records import Folder, Record, Run, runs_below
from ingot.lab.schedules import scheduled
from ingot.lab.task import Classification, Regression, Task, Tensors, Training, from_function
from ingot.lab.training import Loop, Trainer


def task(examples: int = 40, **training) -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, 5, generator=generator)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    model = lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 4))  # noqa: E731
    settings = {"epochs": 4, "batch_size": 8} | training
    return Task("A task", model, Tensors(x, y), Tensors(x[:13], y[:13]), training=Training(**settings))


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


# --- Order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_share_the_batches_of_one(world):
    alone = list(Shuffled(43, 8, seed=3, rank=0, world=1))
    assert len(alone) == 5
    assert len({i for batch in alone for i in batch}) == 40
    shares = [list(Shuffled(43, 8, seed=3, rank=rank, world=world)) for rank in range(world)]
    for number, batch in enumerate(alone):
        together = [i for share in shares for i in share[number]]
        assert sorted(together) == sorted(batch)
        assert len({len(share[number]) for share in shares}) == 1


def test_order_depends_on_seed_and_epoch_and_begins_anywhere():
    one, other = Shuffled(40, 8, 0, 0, 1), Shuffled(40, 8, 1, 0, 1)
    assert list(one) == list(one) != list(other)
    first = list(one)
    one.epoch = 1
    assert list(one) not in (first, list(other))  # another seed's is not the next epoch's
    one.epoch, one.first = 0, 3
    assert list(one) == first[3:]


def test_batches_that_cannot_be_shared():
    with pytest.raises(ValueError, match="multiple of 3"):
        Shuffled(40, 8, 0, 0, 3)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_each_test_batch_counts_once(world):
    counted = []
    for rank in range(world):
        shares = Shares(13, 4, rank, world)
        assert len(list(shares)) == len(Shares(13, 4, 0, world))
        counted += [batch for number, batch in enumerate(shares) if shares.counts(number)]
    assert sorted(i for batch in counted for i in batch) == list(range(13))


# --- Training ---------------------------------------------------------------------------------------------


def test_a_run_is_the_plain_loop(tmp_path):
    """Without anything around it: the same weights, losses and errors by a loop of ten lines."""
    made = replace(task(), model=lambda: nn.Linear(5, 4))
    trainer = Trainer(made, choose("AdamW lr=0.02"), 7, Loop(clip=0.5), tmp_path)
    run = trainer.train()
    torch.manual_seed(7)
    model = nn.Linear(5, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.999))
    sampler, step = Shuffled(40, 8, 7, 0, 1), 0
    x, y = made.train.tensors
    losses = []
    for epoch in range(4):
        sampler.epoch, total = epoch, 0.0
        for batch in sampler:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (0.5 + 0.5 * cos(pi * step / 20))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            step, total = step + 1, total + loss.item()
        losses.append(total / 5)
    torch.testing.assert_close(weights(trainer), [p.detach() for p in model.parameters()])
    assert run.column("train_loss")[1:] == pytest.approx(losses, rel=1e-5)
    scores, labels = model(made.test.tensors[0]), made.test.tensors[1]
    assert run.records[-1].error == pytest.approx(100 * scores.argmax(1).ne(labels).float().mean().item())
    assert run.records[-1].test_loss == pytest.approx(nn.functional.cross_entropy(scores, labels).item())
    assert run.column("step") == [0, 5, 10, 15, 20]


def test_schedules():
    cosine = scheduled("cosine", 40, 10, 100)
    assert [cosine(step) for step in (0, 50, 100)] == pytest.approx([1, 0.5, 0])
    falling = scheduled("step", 40, 10, 1200)
    assert [falling(step) for step in (0, 399, 400, 800)] == pytest.approx([1, 1, 0.1, 0.01])
    assert scheduled("constant", 40, 10, 100)(77) == 1
    with pytest.raises(ValueError, match="choose cosine, step, constant"):
        scheduled("linear", 40, 10, 100)


def test_the_seed_alone_determines_a_run():
    first, again, other = (Trainer(task(), choose("SINGD"), seed, Loop()).train() for seed in (1, 1, 2))
    assert first.column("test_loss") == again.column("test_loss") != other.column("test_loss")


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    run = Trainer(task(), choose("SGD lr=1e38"), 0, Loop(), tmp_path).train()
    assert run.state == "diverged"
    assert run.records[-1].step < 20
    assert Folder(tmp_path).load().state == "diverged"
    assert isnan(Folder(tmp_path).load().records[-1].test_loss)


def test_judged_without_dropout():
    made = replace(task(), model=lambda: nn.Sequential(nn.Dropout(0.9), nn.Linear(5, 4)))
    run = Trainer(made, choose("AdamW"), 3, Loop(epochs=1)).train()
    torch.manual_seed(3)
    model = made.model().eval()
    x, y = made.test.tensors
    assert run.records[0].test_loss == pytest.approx(nn.functional.cross_entropy(model(x), y).item())


def test_test_batches_of_other_processes_do_not_count(monkeypatch):
    monkeypatch.setattr(Shares, "counts", lambda self, number: number == 0)
    x, y = torch.randn(600, 5), torch.arange(600) % 4
    made = replace(task(), model=lambda: nn.Linear(5, 4), test=Tensors(x, y))
    run = Trainer(made, choose("AdamW"), 3, Loop(epochs=1)).train()
    torch.manual_seed(3)
    scores = nn.Linear(5, 4)(x[:256])
    assert run.records[0].test_loss == pytest.approx(nn.functional.cross_entropy(scores, y[:256]).item())


def test_evaluations_may_be_rare():
    run = Trainer(task(), choose("AdamW"), 0, Loop(evaluate_every=3)).train()
    assert run.column("epoch") == [0, 3, 4]


def test_evaluations_within_an_epoch_and_a_part_of_one(tmp_path):
    loop = Loop(epochs=1.6, evaluate_every=0.5)
    run = Trainer(task(), choose("AdamW"), 0, loop, tmp_path).train()
    assert run.column("step") == [0, 3, 5, 8]  # of five an epoch
    whole = Trainer(task(), choose("AdamW"), 0, Loop(epochs=1.6)).train()
    assert whole.column("step") == [0, 5, 8]
    # Evaluations change nothing: neither the dropout that follows nor the means of the losses.
    assert run.records[-1].test_loss == whole.records[-1].test_loss
    assert run.records[2].train_loss == whole.records[1].train_loss


def test_regression_and_whole_graphs_are_judged_by_their_loss():
    x = torch.randn(24, 5)
    made = Task("x", lambda: nn.Linear(5, 2), Tensors(x, x[:, :2]), Tensors(x, x[:, :2]), Regression())
    run = Trainer(made, choose("AdamW lr=0.1"), 0, Loop(epochs=30, batch_size=8)).train()
    assert run.records[-1].error == run.records[-1].test_loss < 0.1 * run.records[0].error


# --- Interruptions ----------------------------------------------------------------------------------------


class StopAfter:
    """A watcher that sends the process a signal after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, progress) -> None:
        if progress.step == self.steps:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("optimizer", ["SINGD:diagonal", "KFAC", "AdamW", "Muon"])
@pytest.mark.parametrize("stop", [3, 5, 11, 19])
def test_interrupted_runs_go_on_as_if_nothing_had_happened(tmp_path, optimizer, stop):
    expected = Trainer(task(), choose(optimizer), 0, Loop(), tmp_path / "whole")
    whole = expected.train()
    with pytest.raises(Interrupted):
        Trainer(task(), choose(optimizer), 0, Loop(), tmp_path / "cut").train(StopAfter(stop))
    assert Folder(tmp_path / "cut").load().state == "interrupted"
    resumed = Trainer(task(), choose(optimizer), 0, Loop(), tmp_path / "cut")
    run = resumed.train()
    assert run.state == "done"
    torch.testing.assert_close(weights(resumed), weights(expected), rtol=0, atol=0)
    for name in ("step", "test_loss", "error", "lr"):
        assert run.column(name) == whole.column(name)
    assert run.column("train_loss")[1:] == pytest.approx(whole.column("train_loss")[1:], rel=1e-6)
    kept = runs_below([tmp_path / "cut"])
    assert len(kept) == 1
    assert kept[0].column("test_loss") == whole.column("test_loss")
    assert not Folder(tmp_path / "cut").checkpoint.exists()


def test_what_came_after_the_checkpoint_is_forgotten(tmp_path):
    with pytest.raises(Interrupted):
        Trainer(task(), choose("SINGD:diagonal"), 0, Loop(), tmp_path).train(StopAfter(11))
    Folder(tmp_path).add(Record(15, 3.0, 9.0, 0.1, 7.0, 7.0, 7.0, 1), {"0/gain": 1.0})
    run = Trainer(task(), choose("SINGD:diagonal"), 0, Loop(), tmp_path).train()
    for found in (run, Folder(tmp_path).load()):
        assert found.column("step") == [0, 5, 10, 15, 20]
        assert 7.0 not in found.column("test_loss")
        assert [line["step"] for line in found.diagnostics] == [5, 10, 15, 20]


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = Trainer(task(), choose("AdamW"), 0, Loop(), tmp_path).train()
    before = (tmp_path / "records.jsonl").read_bytes()
    again = Trainer(task(), choose("AdamW"), 0, Loop(), tmp_path).train(StopAfter(1))
    assert again.column("test_loss") == first.column("test_loss")
    assert (tmp_path / "records.jsonl").read_bytes() == before
    fresh = Trainer(task(), choose("AdamW"), 0, Loop(), tmp_path).train(resume=False)
    assert len(fresh.records) == len(first.records)
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == len(first.records)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"chosen": choose("AdamW lr=0.5")}, "learning rate was 0.001, now 0.5"),
        ({"loop": Loop(epochs=9)}, "epochs was 4, now 9"),
        ({"loop": Loop(batch_size=4)}, "batch size was 8, now 4"),
    ],
)
def test_a_run_with_other_settings_is_not_taken_for_this_one(tmp_path, change, named):
    settings = {"chosen": choose("AdamW"), "loop": Loop()}
    Trainer(task(), seed=0, folder=tmp_path, **settings).train()
    with pytest.raises(ValueError, match=named):
        Trainer(task(), seed=0, folder=tmp_path, **(settings | change)).train()


def test_a_killed_run_goes_on(tmp_path):
    """Killed at once, a run loses no more than what came after its last checkpoint, and ends the same."""
    command = [sys.executable, "-m", "ingot.lab", "train", "digits", "--size", "tiny", "--epochs", "6"]
    command += ["-o", "SINGD:diagonal", "--threads", "1"]
    environment = os.environ | {"INGOT_SAVE_SECONDS": "0"}
    whole = subprocess.run(
        [*command, "--out", tmp_path / "whole"], capture_output=True, text=True, check=True
    )
    process = subprocess.Popen([*command, "--out", tmp_path / "cut"], env=environment)
    folder = tmp_path / "cut" / "SINGD_diagonal" / "seed0"
    while not (folder / "checkpoint").is_dir():
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    subprocess.run([*command, "--out", tmp_path / "cut"], capture_output=True, check=True)
    expected = Folder(Path(whole.stdout.strip().splitlines()[-1])).load()
    assert Folder(folder).load().column("test_loss") == expected.column("test_loss")


# --- Records ----------------------------------------------------------------------------------------------


def test_records_survive_a_line_that_was_cut(tmp_path):
    folder = Folder(tmp_path)
    folder.start(Run("t", "l", 0, {}))
    for step in (0, 5):
        folder.add(Record(step, 0.0, 0.0, 0.1, float("nan"), 1.0, 2.0, 3))
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"step": 10, "ep')
    found = folder.load()
    assert found.column("step") == [0, 5]
    assert isnan(found.records[0].train_loss)
    json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])  # no word but JSON's


def test_folders_without_runs(tmp_path):
    assert runs_below([tmp_path]) == []
    with pytest.raises(ValueError, match="there is no"):
        runs_below([tmp_path / "missing"])
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="no run that can be read"):
        runs_below([tmp_path])


# --- Own tasks --------------------------------------------------------------------------------------------


def test_a_function_may_return_four_things():
    x, y = torch.randn(16, 3), torch.arange(16) % 2

    def mine():
        return nn.Linear(3, 2), (x, y), (x, y), nn.CrossEntropyLoss()

    made = from_function("mine", mine)
    assert isinstance(made.objective, Classification)
    torch.manual_seed(0)
    first = made.model()
    second = made.model()
    assert not torch.equal(first.weight, second.weight)  # each seed has weights of its own
    run = Trainer(made, choose("SINGD"), 0, Loop(epochs=2, batch_size=4)).train()
    assert run.state == "done"


def test_a_function_may_return_any_dataset():
    data = [(torch.randn(3), torch.randn(2)) for _ in range(10)]
    made = from_function("mine", lambda: (lambda: nn.Linear(3, 2), data, data, nn.MSELoss()))
    assert isinstance(made.objective, Regression)
    assert Trainer(made, choose("AdamW"), 0, Loop(epochs=1, batch_size=4)).train().state == "done"


PAIR = (torch.ones(2, 1), torch.ones(2))


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (3, "must return"),
        ((1, 2), "returned a tuple of 2: it must return"),
        ((nn.Linear(1, 1), PAIR, PAIR, "mse"), "the loss is a str, not a function"),
        ((nn.Linear(1, 1), 5, 5, None), "pair of tensors"),
        ((7, PAIR, PAIR, None), "not a module"),
    ],
)
def test_functions_that_return_something_else(made, complaint):
    with pytest.raises(ValueError, match=complaint):
        from_function("mine", lambda: made)

"""The suite of tasks, the scoreboard made of its runs, and the command that does it all."""

import json
from dataclasses import replace
from math import inf, sqrt
from statistics import fmean, stdev

import pytest
import torch
from torch import nn

import ingot
from ingot.lab import suite
from ingot.lab.data.diamonds import load_diamonds
from ingot.lab.data.fashion import load_fashion
from ingot.lab.data.places import MissingDataError
from ingot.lab.optimizers import choose
from ingot.lab.records import Record, Run
from ingot.lab.scoreboard import geometric_mean, share_to_best, standing, standings, tables, verdict
from ingot.lab.suite import SUITE, Entry, suite_task
from ingot.lab.summary import Group
from ingot.lab.sweeping import VALUES, values_of
from ingot.lab.task import Task, Tensors, Training
from ingot.lab.training import Loop, Trainer
from ingot.lab.tuning import FINALISTS, FINALS, Search, complete, finalists, held_out, study_of, url_of
from tests.lab import made_data
from tests.lab.command import invoke, plain

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """All data of the suite, in the formats of the real one."""
    folder = tmp_path_factory.mktemp("data")
    made_data.fashion(folder)
    made_data.diamonds(folder)
    made_data.graph_arrays(folder)
    made_data.text(folder)
    for name in ("cifar10", "imagewoof"):
        made_data.image_arrays(folder, name, count=80)
    return folder


# --- Data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_files(tmp_path, zipped):
    made_data.fashion(tmp_path, zipped=zipped)
    train_x, train_y, test_x, test_y = load_fashion(tmp_path, 100, 10)
    assert train_x.shape == (100, 1, 28, 28)
    assert test_x.shape == (10, 1, 28, 28)
    pixels, labels = made_data.pictures(130, 28)
    torch.testing.assert_close(train_x[:, 0], torch.from_numpy(pixels[:100, :, :, 0]).float() / 255)
    assert train_y.tolist() == labels[:100].tolist()
    assert len(test_y) == 10


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"nothing", "MNIST's format"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 9, 1]), "cut off"),
        (None, "has no train-labels"),
    ],
)
def test_damaged_fashion_files(tmp_path, content, complaint):
    place = made_data.fashion(tmp_path, zipped=False)
    file = place / "train-labels-idx1-ubyte"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(MissingDataError, match=complaint):
        load_fashion(tmp_path, 10, 10)


def test_missing_fashion_names_the_package(tmp_path, monkeypatch):
    import datasets

    def offline(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setattr("ingot.lab.data.fashion.DEBIAN", tmp_path / "nowhere")
    with pytest.raises(MissingDataError, match="apt install dataset-fashion-mnist"):
        load_fashion(tmp_path, 10, 10)


def test_diamonds_are_normal_numbers_and_categories(tmp_path):
    made_data.diamonds(tmp_path)
    x, y = load_diamonds(tmp_path)
    assert x.shape == (200, 6 + 2 + 3 + 2)
    assert y.shape == (200, 1)
    torch.testing.assert_close(y.std(), torch.tensor(1.0))
    torch.testing.assert_close(x[:, 0].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    assert x[:, 6:8].sum(1).unique().tolist() == [1.0]
    # In order: Good before Ideal, and the first row is an Ideal one.
    assert x[0, 6:8].tolist() == [0.0, 1.0]


def test_constant_columns_do_not_spoil_the_others(tmp_path):
    file = made_data.diamonds(tmp_path)
    assert len({line.split(",")[4] for line in file.read_text().splitlines()[1:]}) == 1  # the depth
    x, _ = load_diamonds(tmp_path)
    assert x.abs().max() < 10


def test_records_that_contradict_themselves_are_left_out(tmp_path):
    file = made_data.diamonds(tmp_path)
    expected = load_diamonds(tmp_path)
    head, first, *others = file.read_text().splitlines()
    typos = [first.replace("4.1,4.2,", f"{x},{y},") for x, y in ((4.1, 42.0), (0.0, 0.0), (0.0, 4.2))]
    assert all(typo != first for typo in typos)
    file.write_text("\n".join([head, *typos[:1], first, *typos[1:], *others]))
    assert all(torch.equal(*pair) for pair in zip(load_diamonds(tmp_path), expected, strict=True))
    file.write_text("\n".join([head, *typos]))
    with pytest.raises(MissingDataError, match="no record whose depth"):
        load_diamonds(tmp_path)


def test_tables_that_do_not_serve(tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.lab.data.diamonds.find_spec", lambda name: None)
    with pytest.raises(MissingDataError, match="pip install plotnine"):
        load_diamonds(tmp_path)
    (tmp_path / "diamonds.csv").write_text("carat,price\n1,2\n")
    with pytest.raises(MissingDataError, match="no column depth"):
        load_diamonds(tmp_path)


# --- The suite --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUITE)
def test_every_task_learns(name, data):
    made = suite_task(name, data)
    judged = replace(made, test=made.train)  # of which a few steps say more
    steps = 16 * min(8, len(made.train)) / len(made.train)
    loop = Loop(epochs=steps, batch_size=8, evaluate_every=steps)
    run = Trainer(judged, choose("SINGD lr=3e-3"), 0, loop).train()
    assert run.records[-1].step >= 14
    assert run.records[-1].test_loss < run.records[0].test_loss
    assert len(made.test) > 0


def test_a_third_of_the_tasks_and_more_had_no_say_in_the_choice():
    validated = [name for name, entry in SUITE.items() if not entry.chosen_on]
    assert 3 * len(validated) >= len(SUITE)
    for kind in ("convolutional", "transformer"):
        assert any(SUITE[name].kind == kind for name in validated)


# --- The scoreboard ---------------------------------------------------------------------------------------


def run(label, seed, losses, errors=None, *, seconds=1.0, state="done"):
    """A run that was evaluated every ten steps."""
    records = [
        Record(10 * i, i, 10 * i * seconds, 1e-3, 0.0, loss, (errors or losses)[i], 0)
        for i, loss in enumerate(losses)
    ]
    return Run("t", label, seed, {"learning rate": 1e-3}, state=state, state_bytes=8, records=records)


def group(label, *curves, **settings):
    return Group(label, [run(label, seed, curve, **settings) for seed, curve in enumerate(curves)])


def test_way_to_the_best_loss_of_another():
    reference = group("AdamW", [4.0, 2.0, 1.0, 1.5])
    faster = group("SINGD", [4.0, 0.0, 0.0, 0.0], seconds=2.0)
    # Its line from 4 to 0 within ten steps passes 1 after 7.5 of them; AdamW takes 20.
    assert share_to_best(faster, reference, "step") == pytest.approx(7.5 / 20)
    assert share_to_best(faster, reference, "seconds") == pytest.approx(15 / 20)
    assert share_to_best(reference, reference, "step") == 1
    assert share_to_best(group("x", [4.0, 3.0, 2.0, 1.1]), reference, "step") == inf


def test_way_of_the_mean_over_seeds():
    reference = group("AdamW", [4.0, 2.0], [4.0, 0.0])
    assert share_to_best(group("x", [4.0, 1.5], [4.0, 0.5]), reference, "step") == 1


def test_standing_beside_the_reference():
    reference = group("AdamW", [4.0, 2.0], [4.0, 4.0], errors=[50.0, 20.0])
    found = standing(group("x", [4.0, 1.0], [4.0, 2.0], errors=[50.0, 10.0], seconds=1.5), reference)
    assert (found.loss, found.error) == (1.5, 10.0)
    assert found.loss_error == pytest.approx(sqrt(0.5) / sqrt(2))
    assert found.step_seconds == pytest.approx(1.5)
    assert found.state == 1
    assert found.diverged == 0


@pytest.mark.parametrize(
    ("losses", "state"),
    [([1.0, float("nan")], "diverged"), ([1.0, 1.5], "done")],
    ids=["not finite", "worse"],
)
def test_divergence_counts(losses, state):
    found = standing(
        Group("x", [run("x", 0, losses, state=state), run("x", 1, [1.0, 0.5])]), group("AdamW", [1.0, 0.5])
    )
    assert found.diverged == 1
    assert (found.loss == inf) == (state == "diverged")


def test_verdict_over_tasks():
    board = {
        "ahead": [
            group("AdamW", [4.0, 2.0], [4.0, 2.1]),
            group("x", [4.0, 1.0], [4.0, 1.1], errors=[1.0, 9.0]),
        ],
        "level": [group("AdamW", [4.0, 1.0], [4.0, 2.0]), group("x", [4.0, 1.1], [4.0, 2.1])],
        "behind": [group("AdamW", [4.0, 1.0], [4.0, 1.1]), group("x", [4.0, 2.0], [4.0, 2.1])],
    }
    found = verdict(standings(board), "x", "AdamW")
    assert found.ahead == ["ahead"]
    assert found.level == ["ahead", "level"]
    assert found.ahead_in_error == []
    assert found.steps == inf
    assert found.loss_ratio == pytest.approx((1.05 / 2.05 * 1.6 / 1.5 * 2.05 / 1.05) ** (1 / 3))
    title, columns, rows = tables(standings(board), "defaults")[2]
    assert title == "Beside AdamW, defaults"
    assert dict(zip(columns, rows[0], strict=True))["ahead in loss"] == "1 of 3"
    assert "never" in rows[0]


def test_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4)
    assert geometric_mean([2.0, inf]) == inf


def test_the_control_does_not_follow_the_curvature():
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = choose("control").make(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 6) * torch.arange(1, 7)).square().sum().backward()
        optimizer.step()
    factors = optimizer.state[model.weight]["K"]
    assert factors.unique().numel() == 1


# --- The command ------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Two tasks that take no time."""

    def made(shift):
        def make(folder):
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(64, 5, generator=generator)
            y = (x[:, shift] > 0).long()
            return Task("t", lambda: nn.Linear(5, 2), Tensors(x, y), Tensors(x, y), training=Training(2, 8))

        return make

    def missing(folder):
        raise MissingDataError("buy it")

    tasks = {
        "first": Entry("dense", True, made(0)),
        "second": Entry("dense", False, made(1)),
        "third": Entry("dense", False, missing),
    }
    monkeypatch.setattr(suite, "SUITE", tasks)
    from ingot.lab import evaluating

    evaluating._task.cache_clear()
    yield
    evaluating._task.cache_clear()


def test_evaluate_stores_and_shows_everything(small, tmp_path):
    words = ("evaluate", "-o", "control lr=2e-3", "--seeds", "2", "--out", str(tmp_path))
    result = invoke(*words, "--trials", "2", "--in-time")
    assert result.exit_code == 0, result.output
    assert "third is left out: buy it" in plain(result.stderr)
    found = json.loads((tmp_path / "scoreboard.json").read_text())
    assert set(found) == {"defaults", "in AdamW's time", "tuned", "searches"}
    for name in ("defaults", "in AdamW's time", "tuned"):
        assert set(found[name]) == {"first", "second"}
        assert set(found[name]["first"]) == {"AdamW", "control lr=2e-3"}
    (searched,) = found["searches"]["second"]["AdamW"]
    assert searched["trials"] == 2
    assert set(searched["settings"]) == {"lr", "weight_decay", "eps", "beta2"}
    assert "lr" not in found["searches"]["second"]["control lr=2e-3"][0]["settings"]  # which was given
    text = (tmp_path / "scoreboard.md").read_text()
    assert "### Beside AdamW, tuned" in text
    from ingot.lab.records import runs_below

    runs = runs_below([tmp_path / "defaults"])
    assert {run.seed for run in runs} == {0, 1}
    tuned = runs_below([tmp_path / "tuned"])
    assert {run.seed for run in tuned} == {100, 101}
    assert all(run.settings["steps"] <= 16 for run in runs_below([tmp_path / "in_time"]))
    # Said again, nothing is trained anew, and the numbers are the same.
    stamps = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("records.jsonl")}
    again = invoke(*words, "--trials", "2", "--in-time")
    assert again.exit_code == 0
    assert stamps == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("records.jsonl")}
    assert json.loads((tmp_path / "scoreboard.json").read_text()) == found


def test_several_searches_tell_how_much_is_luck(small, tmp_path):
    words = ("evaluate", "first", "-o", "SGD", "--seeds", "2", "--trials", "2", "--searches", "3")
    result = invoke(*words, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "scoreboard.json").read_text())
    from ingot.lab.records import runs_below

    for label in ("AdamW", "SGD"):
        searches = found["searches"]["first"][label]
        rates = [search["settings"]["lr"] for search in searches]
        assert len(set(rates)) == len(searches) == 3
        folders = [tmp_path / phase / "first" / label for phase in ("tuned", "tuned_1", "tuned_2")]
        runs = [runs_below([folder]) for folder in folders]
        assert [{run.settings["learning rate"] for run in its} for its in runs] == [{rate} for rate in rates]
        means = [fmean(run.records[-1].test_loss for run in its) for its in runs]
        standing = found["tuned"]["first"][label]
        assert standing["loss"] == pytest.approx(fmean(means))
        assert standing["loss_error"] == pytest.approx(stdev(means) / 3**0.5)  # of searches, not of runs


def test_what_cannot_train_a_model_is_left_out_there(small, tmp_path, monkeypatch):
    """As Muon where no layer is linear; where one is, it is trained."""

    def convolutional(folder):
        x, y = torch.randn(16, 1, 3), torch.zeros(16, dtype=torch.long)
        model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten())
        return Task("t", lambda: model, Tensors(x, y), Tensors(x, y), training=Training(1, 8))

    monkeypatch.setitem(suite.SUITE, "second", Entry("convolutional", False, convolutional))
    words = ("evaluate", "first", "second", "-o", "Muon", "-o", "SGD", "--seeds", "1", "--out", str(tmp_path))
    result = invoke(*words, "--trials", "1", "--focus", "Muon", "--in-time")
    assert result.exit_code == 0, result.output
    assert "second Muon is left out: Muon trains the weights of linear layers" in plain(result.stdout)
    found = json.loads((tmp_path / "scoreboard.json").read_text())
    assert set(found["defaults"]["first"]) == {"AdamW", "Muon", "SGD"}
    assert set(found["defaults"]["second"]) == {"AdamW", "SGD"}
    for phase in ("tuned", "in AdamW's time"):  # where SGD was not in focus
        assert set(found[phase]["first"]) == {"AdamW", "Muon"}
        assert set(found[phase]["second"]) == {"AdamW"}


def test_what_is_slower_has_fewer_steps_in_the_same_time(small, tmp_path, monkeypatch):
    from rich.console import Console

    from ingot.lab.evaluating import Evaluation, evaluate_in_time

    evaluation = Evaluation(["first"], ["AdamW", "SINGD"], 1, tmp_path)
    slow = {"first": [group("AdamW", [4.0, 2.0]), group("SINGD", [4.0, 2.0], seconds=2.0)]}
    fast = {"first": [group("AdamW", [4.0, 2.0]), group("SINGD", [4.0, 2.0], seconds=0.5)]}
    (found,) = evaluate_in_time(evaluation, slow, Console(quiet=True))["first"]
    assert found.runs[0].settings["steps"] == 8  # of 16
    evaluation = replace(evaluation, out=tmp_path / "fast")
    (found,) = evaluate_in_time(evaluation, fast, Console(quiet=True))["first"]
    assert found.runs[0].settings["steps"] == 16


def test_evaluate_in_two_processes(data, tmp_path):
    words = ("evaluate", "diamonds", "-o", "SINGD", "--seeds", "2", "--jobs", "2", "--data-dir", str(data))
    result = invoke(*words, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "scoreboard.json").read_text())["defaults"]["diamonds"]
    alone = Trainer(suite_task("diamonds", data), choose("SINGD"), 1, Loop()).train()
    assert len(list(tmp_path.rglob("run.json"))) == 4
    last = json.loads((tmp_path / "defaults/diamonds/SINGD/seed1/records.jsonl").read_text().splitlines()[-1])
    assert last["test_loss"] == pytest.approx(alone.records[-1].test_loss, rel=1e-4)
    assert found["AdamW"]["steps"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fashion_cmm",), "did you mean 'fashion_cnn'"),
        (("digits", "-o", "SINDG"), "did you mean 'SINGD'"),
        (("diamonds", "--data-dir", "nowhere"), "no folder nowhere"),
    ],
)
def test_wrong_words(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    result = invoke("evaluate", *words)
    assert result.exit_code == 2
    assert said in plain(result.stderr)


def test_what_is_in_focus_is_among_the_optimizers(small, tmp_path):
    words = ("evaluate", "first", "-o", "SGD", "--seeds", "1", "--trials", "1", "--focus", "SINGD")
    result = invoke(*words, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "--focus 'SINGD' is none of the optimizers" in plain(result.stderr)


def test_a_task_that_was_named_must_be_there(small, tmp_path):
    result = invoke("evaluate", "third", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "buy it" in plain(result.stderr)


# --- Sweeps -----------------------------------------------------------------------------------------------


def test_values_of_a_setting():
    assert values_of("lr=1e-3,0.1") == ("lr", [1e-3, 0.1])
    assert values_of("precond_every=2,10") == ("precond_every", [2, 10])
    assert values_of("damping")[1] == VALUES["damping"]
    with pytest.raises(ValueError, match=r"--over momentum=0\.1,0\.3"):
        values_of("momentum")
    with pytest.raises(ValueError, match="commas between"):
        values_of("lr=1e-3;2")


def test_defaults_are_among_the_values_that_are_tried():
    defaults = ingot.SINGD(nn.Linear(2, 2)).defaults
    assert all(defaults[setting] in values for setting, values in VALUES.items())


def test_sweep_shows_every_value_of_those_that_have_it(small, tmp_path):
    words = (
        "sweep",
        "--over",
        "lr=1e-3,1e-1",
        "--over",
        "damping=0.1,10",
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
    )
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    points = json.loads((tmp_path / "sweep.json").read_text())
    assert len(points) == 2 * (2 * 2 + 2)  # tasks, lr of both optimizers, damping of SINGD
    assert {p["optimizer"] for p in points if p["setting"] == "damping"} == {"SINGD"}
    same = [p for p in points if p["optimizer"] == "AdamW" and p["value"] == 1e-3]
    assert [p["loss"] for p in same] == pytest.approx([1.0, 1.0])
    # A hundred times the learning rate is a better one here, and so short a way.
    better = [p for p in points if p["optimizer"] == "AdamW" and p["value"] == 1e-1]
    assert all(p["loss"] < 1 for p in better)
    assert (tmp_path / "sweep.png").stat().st_size > 5000
    assert (tmp_path / "sweep.svg").is_file()


def test_a_search_has_held_out_data_and_gives_its_best(small, tmp_path, monkeypatch):
    from ingot.lab import evaluating

    seen = {}

    def noting(search, trials, tell):
        seen["examples"] = len(search.task.train)
        seen["study"] = run_search(search, trials, tell)
        return seen["study"]

    run_search = evaluating.run_search
    monkeypatch.setattr(evaluating, "run_search", noting)
    found = evaluating.tune_one(
        evaluating.Tuning("first", None, choose("AdamW"), 3, 0, Loop(tensorboard=False), tmp_path)
    )
    assert seen["examples"] == 64 - 64 // 5
    study = seen["study"]
    losses = {
        trial.number: fmean([trial.value, *study.user_attrs[f"finals of trial {trial.number}"]])
        for trial in study.get_trials()
    }
    best = min(losses, key=losses.__getitem__)
    assert found.loss == losses[best]
    assert found.settings == study.get_trials()[best].params


def test_the_best_of_a_search_has_to_be_so_on_other_held_out_examples(small, tmp_path):
    """A trial that was lucky once does not win, and what was trained is not trained again."""
    from ingot.lab import evaluating

    tuning = evaluating.Tuning("first", None, choose("AdamW"), 6, 0, Loop(tensorboard=False), tmp_path)
    evaluating.tune_one(tuning)
    task = evaluating._task("first", None)
    file = tmp_path / "searches" / "first" / "AdamW.db"
    search = Search(held_out(task), tuning.chosen, tuning.loop, "AdamW", url_of(file), prune=False)
    study = study_of(search)
    assert len([key for key in study.user_attrs if key.startswith("finals")]) == FINALISTS
    lucky = complete(study)[0]
    study.set_user_attr(f"finals of trial {lucky.number}", [100.0] * FINALS)
    again = finalists(study, search, task)
    assert again[-1].params == lucky.params
    assert again[-1].loss == pytest.approx((lucky.value + 100.0 * FINALS) / (1 + FINALS))


def test_finals_have_other_seeds_and_other_held_out_examples(small, tmp_path, monkeypatch):
    from ingot.lab import evaluating, tuning

    seen = []

    class Noting(Trainer):
        def __init__(self, task, chosen, seed, *others):
            seen.append((seed, task.test.tensors[0]))
            super().__init__(task, chosen, seed, *others)

    monkeypatch.setattr(tuning, "Trainer", Noting)
    evaluating.tune_one(
        evaluating.Tuning("first", None, choose("AdamW"), 1, 0, Loop(tensorboard=False), tmp_path)
    )
    task = evaluating._task("first", None)
    assert [seed for seed, _ in seen] == list(range(1 + FINALS))
    for part, (_, examples) in enumerate(seen):
        assert examples.equal(held_out(task, part).test.tensors[0])


def test_parts_that_are_held_out_have_no_example_in_common(small):
    from ingot.lab import evaluating

    task = evaluating._task("first", None)
    parts = [held_out(task, part) for part in range(5)]
    held = torch.cat([part.test.tensors[0] for part in parts])
    assert len(held.unique(dim=0)) == len(held) == 5 * (64 // 5)
    for part in parts:
        both = torch.cat((part.train.tensors[0], part.test.tensors[0]))
        assert len(both.unique(dim=0)) == len(both) == 64


def test_the_graph_network_is_judged_without_dropout(data):
    made = suite_task("cora", data)
    model = made.model().eval()
    scores = [made.objective.score(model, made.test[0]).loss.item() for _ in range(2)]
    assert scores[0] == scores[1]

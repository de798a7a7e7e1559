"""The search: what it looks at, that nothing is lost, and that several processes share one study."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import isfinite
from pathlib import Path

import optuna
import pytest
import torch

from ingot.lab.optimizers import OPTIMIZERS, choose
from ingot.lab.page import write_report
from ingot.lab.recipes import RECIPES, Options
from ingot.lab.training import Loop
from ingot.lab.tuning import (
    Search,
    held_out,
    importances,
    is_finished,
    opened,
    run_search,
    storage_of,
    study_of,
    url_of,
)
from tests.lab import made_data
from tests.lab.command import invoke
from tests.lab.test_training import task


def search(folder: Path, optimizer: str = "AdamW", **settings) -> Search:
    url = f"sqlite:///{folder / 'study.db'}"
    return Search(held_out(task()), choose(optimizer), Loop(epochs=2), "a study", url, **settings)


def trials(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    return study.get_trials(deepcopy=False)


def test_the_test_set_has_no_say():
    made = task()
    found = held_out(made)
    x, validation = found.train.tensors[0], found.test.tensors[0]
    assert (len(x), len(validation)) == (32, 8)
    rows = {tuple(row.tolist()) for row in torch.cat((x, validation))}
    assert rows == {tuple(row.tolist()) for row in made.train.tensors[0]}
    digits = RECIPES["digits"].task(Options())
    assert len(held_out(digits).test) == len(digits.train) // 5


def test_a_search_goes_on_as_it_was_begun(tmp_path):
    begun = search(tmp_path)
    run_search(begun, 1, lambda trial: None)
    with pytest.raises(ValueError, match=r"epochs was 2, now 3.*choose another --out"):
        run_search(replace(begun, loop=Loop(epochs=3)), 2, lambda trial: None)


def test_the_page_tells_trials_that_were_given_up_from_those_that_ended(tmp_path):
    study = optuna.create_study()
    lrs = optuna.distributions.FloatDistribution(1e-4, 1.0)
    for number, loss in enumerate((0.3, 0.2, float("inf"), 0.5, 0.4, 0.6)):
        state = optuna.trial.TrialState.PRUNED if number == 3 else optuna.trial.TrialState.COMPLETE
        made = optuna.create_trial(
            state=state,
            value=loss,
            params={"lr": 0.1 + number / 100},
            distributions={"lr": lrs},
            intermediate_values={1: loss},
        )
        study.add_trial(made)
    shown = write_report([], tmp_path, {"a <study>": study}).read_text(encoding="utf-8")
    assert "<h1>Settings searched</h1>" in shown
    assert "Search: a &lt;study&gt;" in shown
    assert "6 trials, 2 of them given up or diverged" in shown
    assert shown.index("<td>0.2000</td>") < shown.index("<td>0.3000</td>")
    assert "<td>0.5000</td>" not in shown
    assert list(importances(study)) == ["lr"]
    assert (tmp_path / "importances_a_study.svg").is_file()


def test_a_graph_has_nodes_for_a_search(tmp_path):
    made_data.graph_arrays(tmp_path)
    graph = RECIPES["gcn"].task(Options(data_dir=tmp_path))
    found = held_out(graph)
    learned, judged, tested = (data[0][-1] for data in (found.train, found.test, graph.test))
    assert judged.any()
    assert not (judged & (tested | learned)).any()


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "KFAC", "SINGD:diagonal"])
def test_a_search_tunes_what_the_paper_tunes(tmp_path, optimizer):
    study = run_search(search(tmp_path, optimizer), 2, lambda trial: None)
    space = choose(optimizer).space
    for trial in trials(study):
        assert trial.params.keys() == space.keys()
        assert all(space[key].low <= value <= space[key].high for key, value in trial.params.items())
        assert isfinite(trial.value)


@pytest.mark.slow
def test_trials_that_fall_behind_are_given_up(tmp_path):
    """The first five end; of the others some have losses above their median."""
    begun = search(tmp_path, "AdamW weight_decay=0.01 eps=1e-8 beta2=0.99")
    for prune in (True, False):
        folder = tmp_path / str(prune)
        folder.mkdir()
        found = replace(
            begun, storage=url_of(folder / "study.db"), loop=Loop(epochs=6), prune=prune, name=str(prune)
        )
        states = [trial.state.name for trial in trials(run_search(found, 12, lambda trial: None))]
        assert ("PRUNED" in states[5:]) == prune
        assert "PRUNED" not in states[:5]


def test_given_settings_are_not_searched(tmp_path):
    study = run_search(search(tmp_path, "AdamW lr=0.01 eps=1e-7"), 1, lambda trial: None)
    assert trials(study)[0].params.keys() == {"weight_decay", "beta2"}


def test_trials_have_settings_of_their_own_and_the_seed_repeats_them(tmp_path):
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
    found = [
        [t.params for t in trials(run_search(search(tmp_path / name, seed=seed), 3, lambda trial: None))]
        for name, seed in (("one", 0), ("two", 0), ("other", 1))
    ]
    assert found[0] == found[1] != found[2]
    assert len({params["lr"] for params in found[0]}) == 3


def test_a_search_goes_on_to_the_number_of_trials(tmp_path):
    first = run_search(search(tmp_path), 2, lambda trial: None)
    values = [trial.value for trial in trials(first)]
    told = []
    second = run_search(search(tmp_path), 5, told.append)
    assert [trial.value for trial in trials(second)][:2] == values
    assert len(told) == 3
    assert len(trials(second)) == 5
    run_search(search(tmp_path), 5, lambda trial: pytest.fail("there were enough"))


def test_samplers_and_storages_that_do_not_exist(tmp_path):
    with pytest.raises(ValueError, match="choose random, tpe"):
        study_of(search(tmp_path, sampler="grid"))
    with pytest.raises(ValueError, match=r"sqlite:///FILE\.db"):
        storage_of("nosuchdb://here")


@pytest.mark.slow
def test_tpe_and_importances(tmp_path):
    study = run_search(search(tmp_path, sampler="tpe", prune=False), 6, lambda trial: None)
    found = importances(study)
    assert found.keys() == OPTIMIZERS["AdamW"].space.keys()
    assert sum(found.values()) == pytest.approx(1, abs=1e-6)
    assert importances(study_of(search(tmp_path / "new"))) == {}


# --- Several processes, and what happens to them ----------------------------------------------------------


def command(folder: Path, url: str, *words: str) -> list[str]:
    """A search on the smallest task."""
    program = [sys.executable, "-m", "ingot.lab", "tune", "digits", "--size", "tiny", "-o", "AdamW"]
    return [*program, "--threads", "1", "--out", str(folder), "--storage", url, *words]


def finished(url: str) -> list[optuna.trial.FrozenTrial]:
    with opened(url) as storage:
        study = optuna.load_study(study_name="digits AdamW", storage=storage)
        return [trial for trial in trials(study) if is_finished(trial)]


def test_an_interrupted_search_loses_no_finished_trial(tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    # More than there is time for; and a signal may come while Python is where it cannot raise.
    process = subprocess.Popen(
        command(tmp_path, url, "--trials", "2000"), stdout=subprocess.PIPE, text=True, bufsize=1
    )
    lines = [process.stdout.readline() for _ in range(2)]
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
    assert process.returncode == 130
    before = {trial.number: trial.value for trial in finished(url)}
    assert len(before) >= 2
    assert all(line.startswith("trial") for line in lines)
    wanted = len(before) + 3
    words = command(tmp_path, url, "--trials", str(wanted))
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    after = finished(url)
    assert len(after) == wanted
    assert f"{wanted} finished trials in {url}" in done.stdout
    assert {t.number: t.value for t in after if t.number in before} == before


def shared_by_two(folder: Path, url: str) -> None:
    words = command(folder, url, "--trials", "6")
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    done = finished(url)
    assert 6 <= len(done) <= 7  # the one that was under way when the sixth ended may end, too
    assert len({trial.params["lr"] for trial in done}) == len(done)
    each = [sum(line.startswith("trial") for line in text.splitlines()) for text in said]
    assert sum(each) == len(done)
    assert all(each)


def test_all_may_begin_at_once(tmp_path):
    """Whoever comes second finds tables half made."""

    def begin(url: str) -> None:
        with opened(url):
            pass

    with ThreadPoolExecutor(6) as pool:
        for number in range(5):
            list(pool.map(begin, [f"sqlite:///{tmp_path / str(number)}.db"] * 6))


@pytest.mark.slow
def test_two_processes_share_a_file(tmp_path):
    shared_by_two(tmp_path, f"sqlite:///{tmp_path / 'study.db'}")


@pytest.mark.slow
def test_jobs_are_processes(tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    words = command(tmp_path, url, "--trials", "5", "--jobs", "2")
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert said.count("best loss") == 1  # helpers leave the last word to the first
    assert 5 <= len(finished(url)) <= 6


@pytest.fixture
def postgres(tmp_path):
    """A server of its own, on a free port, as a user that may run one."""
    initdb = shutil.which("initdb") or next(
        iter(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb"))), None
    )
    if initdb is None or pytest.importorskip("psycopg") is None:
        pytest.skip("PostgreSQL is not installed")
    as_user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    folder = Path("/tmp") / f"ingot-postgres-{os.getpid()}"  # where that user may write
    binaries = Path(initdb).resolve().parent
    subprocess.run(
        [*as_user, initdb, "-D", folder, "-A", "trust", "-U", "tester"], check=True, capture_output=True
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["-D", folder, "-p", str(port), "-k", folder, "-c", "fsync=off"]
    server = subprocess.Popen([*as_user, binaries / "postgres", *options], stderr=subprocess.DEVNULL)
    url = f"postgresql://tester@127.0.0.1:{port}/postgres"
    try:
        for _ in range(100):
            try:
                with opened(url):
                    break
            except ValueError:
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_two_processes_share_a_database(tmp_path, postgres):
    shared_by_two(tmp_path, postgres)


def test_the_best_settings_can_be_trained_with(tmp_path):
    words = ("tune", "digits", "--size", "tiny", "-o", "SINGD:diagonal", "--trials", "2", "--epochs", "1")
    result = invoke(*words, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    *_, words, page = result.stdout.strip().splitlines()
    best = words.partition(": ")[2].strip("'")
    chosen = choose(best)
    assert chosen.settings["structure"] == "diagonal"
    assert "damping" in chosen.settings
    assert page == str(tmp_path / "report.html")
    again = invoke("report", str(tmp_path), "--out", str(tmp_path / "again"))
    assert again.exit_code == 0, again.output
    shown = (tmp_path / "again" / "report.html").read_text(encoding="utf-8")
    assert "Search: digits SINGD diagonal" in shown
    assert "2 trials, 0 of them given up or diverged" in shown

"""The commands: what they say of themselves, what they make, and what is wrong with some words."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ingot.lab.bench import _settled
from ingot.lab.optimizers import choose
from ingot.lab.recipes import RECIPES
from ingot.lab.records import runs_below
from ingot.lab.structure_pictures import SHOWN, in_lines, plot_structures, shade
from tests.lab import made_data
from tests.lab.command import invoke, plain

COMMANDS = (
    "list",
    "train",
    "compare",
    "tune",
    "evaluate",
    "sweep",
    "bench",
    "structures",
    "report",
    "plan",
    "precision",
)
PYTHON = [sys.executable, "-m", "ingot.lab"]


def test_help_names_the_commands_and_where_to_begin():
    shown = plain(invoke("--help").stdout)
    assert all(command in shown for command in COMMANDS)
    assert "ingot compare digits" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_each_commands_help_is_complete(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    shown = plain(result.stdout)
    if command not in ("list", "precision"):
        assert f"ingot {command} " in shown  # an example
    # Every option has a word behind its name and type.
    for line in result.stdout.splitlines():
        if re.match(r"^│ +(--\w|\*)", line):
            assert re.search(r"[A-Za-z]{3,}", re.sub(r"--[\w-]+|<\w+>|-\w\b", "", line)), line


def test_list_has_all_recipes():
    shown = plain(invoke("list").stdout)
    assert all(name in shown for name in RECIPES)
    assert "imagewoof" in shown
    assert "hierarchical" not in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "digit"), "did you mean 'digits'"),
        (("train", "digits", "-o", "SINDG"), "did you mean 'SINGD'"),
        (("train", "digits", "-o", "SINGD:diagnal"), "diagonal"),
        (("train", "digits", "--size", "tine"), "did you mean 'tiny'"),
        (("train", "digits", "--schedule", "cosin"), "choose cosine, step, constant"),
        (("train", "digits", "--precision", "fp8"), "choose fp32, bf16, fp16"),
        (("train", "vgg", "--data", "cifar101"), "did you mean 'cifar10' or 'cifar100'"),
        (("train", "no.such:thing"), "there is no module 'no.such'"),
        (("compare", "digits", "AdamW", "adamw"), "named twice"),
        (("report", "nowhere"), "there is no nowhere"),
        (("report", "."), "`ingot train` or `ingot compare`"),
        (("structures", "toeplitz"), "triu_toeplitz"),
        (("tune", "digits", "--sampler", "best"), "choose random, tpe"),
        (("train", "digits", "--data-dir", "nowhere"), "no folder nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_words_are_met_with_the_right_ones(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    if words[-1] == "nowhere" and words[0] == "train":
        words = ("train", "gpt", *words[2:])
    result = invoke(
        *words, *(["--out", "out"] if words[0] in ("train", "compare", "tune", "structures") else [])
    )
    assert result.exit_code == 2
    assert said in plain(result.stderr)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["train", "compare", "precision"])
@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [("--epochs", "0", "1 or more"), ("--threads", "0", "1 or more"), ("--threads", "100000", "or fewer")],
)
def test_bad_values_name_the_remedy(tmp_path, command, option, value, remedy):
    task = [] if command == "precision" else ["digits"]
    result = invoke(command, *task, "--out", str(tmp_path / "new"), option, value)
    assert result.exit_code != 0
    assert f"Invalid value for '{option}': {value} is" in plain(result.stderr)
    assert remedy in plain(result.stderr)
    assert not (tmp_path / "new").exists()


def test_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    result = invoke("compare", "digits", "--out", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "name another" in plain(result.stderr)


# --- What they make ---------------------------------------------------------------------------------------


def test_peaks_are_measured_once(tmp_path):
    words = ("compare", "digits", "AdamW", "--size", "tiny", "--epochs", "1", "--out", str(tmp_path))
    assert invoke(*words).exit_code == 0
    (run,) = runs_below([tmp_path])
    weights = 4 * run.settings["parameters"]
    assert run.peak_bytes > 4 * weights  # weights, gradients and two moments at least
    assert run.state_bytes >= 2 * weights


def test_compare_trains_all_and_ends_with_the_path_of_the_report(tmp_path):
    out = tmp_path / "new"
    words = ("compare", "digits", "SGD", "AdamW", "SINGD:diagonal", "--size", "tiny", "--epochs", "2")
    result = invoke(*words, "--seeds", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().splitlines()[-1] == str(out / "report.html")
    made = {path.parent.relative_to(out).as_posix() for path in out.rglob("run.json")}
    assert made == {f"{name}/seed{seed}" for name in ("SGD", "AdamW", "SINGD_diagonal") for seed in (0, 1)}
    assert all(name in result.stdout for name in ("SGD", "AdamW", "SINGD diagonal"))
    again = invoke(*words, "--seeds", "2", "--out", str(out))
    assert again.stdout.splitlines()[:6] == result.stdout.splitlines()[:6]  # nothing was trained again
    other = invoke("report", str(out), "--out", str(tmp_path / "other"))
    assert other.stdout.strip() == str(tmp_path / "other" / "report.html")
    tables = [(folder / "report.md").read_text() for folder in (out, tmp_path / "other")]
    assert tables[0] == tables[1]


def test_a_task_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "users_task.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make_task():\n"
        "    x = torch.randn(32, 4)\n"
        "    y = (x[:, 0] > 0).long()\n"
        "    return nn.Linear(4, 2), (x, y), (x, y), nn.CrossEntropyLoss()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    words = ("compare", "users_task:make_task", "AdamW", "SINGD", "--epochs", "2", "--batch-size", "8")
    result = invoke(*words, "--out", "out")
    assert result.exit_code == 0, result.output
    assert Path("out/report.html").is_file()
    refused = invoke(*words, "--size", "tiny", "--out", "out")
    assert refused.exit_code == 2
    assert "size is for recipes" in plain(refused.stderr)
    without_function = invoke("compare", "users_task", "AdamW")
    assert "for a function in users_task.py write users_task:function" in plain(without_function.stderr)


def test_real_data_is_found_by_the_environment(tmp_path, monkeypatch):
    made_data.image_arrays(tmp_path, "cifar10", count=16)
    monkeypatch.setenv("INGOT_DATA", str(tmp_path))
    words = (
        "train",
        "vgg",
        "--data",
        "cifar10",
        "--size",
        "tiny",
        "--epochs",
        "1",
        "--out",
        str(tmp_path / "out"),
    )
    result = invoke(*words)
    assert result.exit_code == 0, result.output


def test_an_interruption_says_how_to_go_on(tmp_path):
    words = [*PYTHON, "train", "digits", "--epochs", "200", "--threads", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    records = tmp_path / "SINGD" / "seed0" / "records.jsonl"
    while not records.is_file() or len(records.read_text().splitlines()) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in said
    assert f"python -m ingot.lab train digits --epochs 200 --threads 1 --out {tmp_path}" in said
    assert (tmp_path / "SINGD" / "seed0" / "checkpoint").is_dir()


def test_zeros_can_be_told_from_small_numbers():
    shades = shade(torch.tensor([[1e-4, 0.0], [-5.0, 10.0]]))
    assert shades[0, 1] == 0
    assert 0.3 <= shades[0, 0] < -shades[1, 0] < shades[1, 1] == 1


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_every_structure_has_three_pictures(count):
    figure = plot_structures(SHOWN[:count], dim=8)
    assert sum(bool(axes.images) and axes.get_visible() for axes in figure.axes) == 3 * count


def test_long_names_are_broken_after_commas():
    assert in_lines("hierarchical(3,3)") == "hierarchical(3,3)"
    assert in_lines("upper(dense(2),tril_toeplitz)") == "upper(dense(2),\ntril_toeplitz)"


def test_structures_are_drawn(tmp_path):
    result = invoke("structures", "diagonal", "hierarchical(3,3)", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "structures.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "structures.svg").read_text(encoding="utf-8")


def test_bench_measures_beside_sgd():
    result = invoke("bench", "digits", "AdamW", "SINGD:diagonal", "--rounds", "2", "--every", "2")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in rows] == ["SGD", "AdamW", "SINGD diagonal"]
    assert rows[0].split("│")[3].strip() == rows[0].split("│")[6].strip() == "1.00"
    state = [float(line.split("│")[4]) for line in rows]
    assert 0 < state[2] < state[1]
    peaks, shares = ([float(line.split("│")[place]) for line in rows] for place in (2, 3))
    assert shares == pytest.approx([peak / peaks[0] for peak in peaks], abs=0.01)
    assert len(set(peaks)) > 1


def test_bench_measures_the_interval_that_is_asked_for():
    settled = _settled(choose("SINGD:diagonal"), 7)
    assert settled.settings["precond_every"] == 7
    assert settled.settings["precond_warmup"] == 0
    own = _settled(choose("SINGD:diagonal precond_every=3"), 7)
    assert own.settings["precond_every"] == 3
    assert _settled(choose("AdamW"), 7).settings == {}


# --- Several processes ------------------------------------------------------------------------------------


def test_two_processes_have_the_losses_of_one(tmp_path):
    words = [
        "compare",
        "digits",
        "SINGD",
        "SINGD:dense paper lr=0.01",  # whose steps depend on the scale of the curvature
        "KFAC paper lr=0.01 damping=0.1",
        "AdamW",
        "--size",
        "tiny",
        "--epochs",
        "2",
        "--threads",
        "1",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ingot.lab"]
    for command, out in ((PYTHON, "one"), ([sys.executable, *launch], "two")):
        done = subprocess.run(
            [*command, *words, "--out", tmp_path / out], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(str(tmp_path / out / "report.html")) == 1  # one of them speaks
    alone, together = (runs_below([tmp_path / name]) for name in ("one", "two"))
    assert len(alone) == len(together) == 4
    for one, two in zip(alone, together, strict=True):
        assert (one.settings["processes"], two.settings["processes"]) == (1, 2)
        assert one.label == two.label
        for name in ("train_loss", "test_loss", "error"):
            assert two.column(name)[1:] == pytest.approx(one.column(name)[1:], rel=1e-4), one.label

"""Frameworks that start several processes: the examples as they are, in two of them."""

import sys

import pytest

from tests.distributed.launch import run, torchrun

ON_CPU = {"ACCELERATE_USE_CPU": "true"}  # what `accelerate launch --cpu` sets, which wants MPI for several
IN_TWO = ("accelerator=cpu", "devices=2", "strategy=ddp")
LAUNCH = (
    "--multi_gpu",
    "--num_processes=2",
    "--num_machines=1",
    "--mixed_precision=no",
    "--dynamo_backend=no",
)
LAUNCH += ("--rdzv_backend=c10d", "--main_process_port=0", "--num_cpu_threads_per_process=1")


def _accelerate_launch(*arguments):
    command = [sys.executable, "-m", "tests.distributed.accelerate_launch", *LAUNCH, *arguments]
    return run(command, environment=ON_CPU)


def _check(ended, folder):
    """Both processes trained, with weights and factors that were equal, and learned."""
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert (folder / "equal0").exists()
    assert (folder / "equal1").exists()
    assert min(float(word.split()[0]) for word in ended.stdout.split("accuracy: ")[1:]) > 0.9


def test_accelerate_launch(tmp_path):
    _check(_accelerate_launch("-m", "tests.distributed.example", "accelerate_loop", str(tmp_path)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("accelerate_loop", ()),
        ("huggingface_trainer", ()),
        ("lightning_module", IN_TWO),
        ("lightning_fabric", IN_TWO),
    ],
)
def test_an_example_in_two_processes(tmp_path, name, options):
    arguments = ("-m", "tests.distributed.example", name, str(tmp_path), *options)
    _check(torchrun(2, *arguments, environment=ON_CPU), tmp_path)


@pytest.mark.slow
def test_the_recipe_by_accelerate_launch(tmp_path):
    """By torchrun it is held against one process in tests/lab."""
    words = ("train", "digits", "--epochs", "1", "--threads", "1", "--out", str(tmp_path))
    ended = _accelerate_launch("-m", "ingot.lab", *words)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert '"processes": 2' in next(tmp_path.glob("**/run.json")).read_text()

"""Frameworks that start several processes: the examples as they are, in two of them."""

import pytest

from tests.distributed.launch import torchrun

ON_CPU = {"ACCELERATE_USE_CPU": "true"}  # what `accelerate launch --cpu` sets


@pytest.mark.parametrize(
    "name", ["accelerate_loop", pytest.param("huggingface_trainer", marks=pytest.mark.slow)]
)
def test_an_example_in_two_processes(tmp_path, name):
    ended = torchrun(2, "-m", "tests.distributed.example", name, str(tmp_path), environment=ON_CPU)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert (tmp_path / "equal0").exists()
    assert (tmp_path / "equal1").exists()
    assert min(float(word.split()[0]) for word in ended.stdout.split("accuracy: ")[1:]) > 0.9

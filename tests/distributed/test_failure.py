"""Processes that die: the others fail soon, and a restart goes on as if nothing had happened."""

import random
import time

import pytest

from tests.distributed.launch import torchrun

# torchrun's own store of addresses outlives a restart, and gloo would try those of the processes that died.
ANEW = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _kill_and_restart(folder, kind, step, place, victim):
    arguments = ("-m", "tests.distributed.victim", str(folder), kind, str(step), place, str(victim))
    ended = torchrun(2, *arguments, options=("--max-restarts=1", "--monitor-interval=0.5"), environment=ANEW)
    assert ended.returncode == 0, ended.stderr[-4000:]
    for rank in range(2):
        resumed_at, difference = (folder / f"result{rank}").read_text().split()
        assert int(resumed_at) == step  # the checkpoints before it were found, and none was lost
        assert float(difference) <= 1e-12


def test_a_killed_process_and_an_elastic_restart(tmp_path):
    _kill_and_restart(tmp_path, "fsdp", 3, "backward", 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_killed_anywhere(tmp_path, number):
    chance = random.Random(number)
    kind, place = chance.choice(("ddp", "fsdp")), chance.choice(("forward", "backward", "step"))
    _kill_and_restart(tmp_path, kind, chance.randrange(1, 6), place, chance.randrange(2))


@pytest.mark.slow
def test_without_a_restart_the_others_fail_at_once(tmp_path):
    began = time.monotonic()
    ended = torchrun(
        2, "-m", "tests.distributed.victim", str(tmp_path), "ddp", "2", "forward", "1", timeout=300
    )
    assert ended.returncode != 0
    assert "SIGKILL" in ended.stderr
    assert time.monotonic() - began < 120  # the process group's timeout is half an hour
    assert len(list(tmp_path.glob("step*/.metadata"))) == 2


def test_with_fewer_batches_in_one_process_the_others_fail_in_time(tmp_path):
    """Without Join, which is told of it."""
    arguments = ("-m", "tests.distributed.victim", str(tmp_path), "ddp", "2", "waits", "1")
    began = time.monotonic()
    ended = torchrun(2, *arguments, timeout=300, environment={"TIMEOUT": "3"})
    assert ended.returncode != 0
    assert "Timed out" in ended.stderr
    assert time.monotonic() - began < 90


@pytest.mark.slow
def test_the_example_in_shards(tmp_path):
    ended = torchrun(2, "examples/sharded.py", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert float(ended.stdout.split("accuracy: ")[1].split()[0]) > 0.9
    assert len(list((tmp_path / "run").glob("epoch*/.metadata"))) == 8

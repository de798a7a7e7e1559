"""Processes that are killed at random moments go on as if nothing had been."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoints import trainer

KILLS = 5
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([trainer.__name__, "torch._dynamo"])  # which torch's optimizers import late


def _start(*arguments) -> tuple:
    progress, report = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=trainer.run, args=(*arguments, report))
    process.start()
    report.close()
    return process, progress


def _run(*arguments) -> dict:
    """Let a run come to its end."""
    process, _progress = _start(*arguments)
    process.join()
    assert process.exitcode == 0
    return torch.load(arguments[-1] / "checkpoint.pt", weights_only=True)


def _run_and_kill(chance: random.Random, *arguments) -> int:
    """Kill a run some steps later, anywhere within a step or a save; returns the step that it began with."""
    process, progress = _start(*arguments)
    began = progress.recv()
    last, duration = time.perf_counter(), 0.0
    for _ in range(chance.randint(1, 6)):
        progress.recv()
        last, duration = time.perf_counter(), time.perf_counter() - last
    time.sleep(chance.random() * duration)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL  # it was still running
    return began


@pytest.mark.parametrize(
    ("name", "save_every"), [("SINGD", 1), ("IKFAC", 2), ("KFAC", 3), ("SINGD in bfloat16", 1)]
)
def test_a_killed_run_ends_like_one_that_was_left_alone(name, save_every, tmp_path: Path):
    chance = random.Random(name)
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    alone.mkdir()
    killed.mkdir()
    expected = _run(name, save_every, alone)
    began = [_run_and_kill(chance, name, save_every, killed) for _ in range(KILLS)]
    assert began == sorted(began)
    assert began[-1] > 0  # there was something to go on from
    found = _run(name, save_every, killed)
    for part in ("model", "random"):
        torch.testing.assert_close(found.pop(part), expected.pop(part), rtol=0, atol=0)
    states = found["optimizer"].pop("state"), expected["optimizer"].pop("state")
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert found == expected  # settings, schedule, scale, step

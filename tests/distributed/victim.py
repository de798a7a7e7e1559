"""A training that saves at each step; in its first start, one process is killed in the middle of one.

Or it takes no more batches, and waits; the others must not, for longer than TIMEOUT seconds.

``torchrun --max-restarts 1 -m tests.distributed.victim FOLDER KIND STEP PLACE VICTIM``
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.distributed import models
from tests.distributed.training import Training, difference, leave

STEPS = 6


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=int(os.environ.get("TIMEOUT", "1800"))))
    folder, kind, step, place, victim = (
        Path(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        sys.argv[4],
        int(sys.argv[5]),
    )
    training = Training("cnn", kind)
    done = sorted(folder.glob("step*/.metadata"))
    state = {}
    if done:
        state["model"], state["optimizer"] = get_state_dict(training.model, training.optimizer)
        dcp.load(state, checkpoint_id=done[-1].parent)
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def dies(now):
        if first_start and index == step and place == now and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    for index in range(len(done), STEPS):
        if place == "waits" and index == step and dist.get_rank() == victim:
            time.sleep(600)
        training.optimizer.zero_grad()
        loss = training.loss(*training.mine(*models.batch("cnn", index)))
        dies("forward")
        loss.backward()
        dies("backward")
        training.optimizer.step()
        dies("step")
        state["model"], state["optimizer"] = get_state_dict(training.model, training.optimizer)
        dcp.save(state, checkpoint_id=folder / f"step{index:02d}")
    one = Training("cnn", "one").run(STEPS)
    (folder / f"result{dist.get_rank()}").write_text(f"{len(done)} {difference(training, one)}")


if __name__ == "__main__":
    main()
    leave()

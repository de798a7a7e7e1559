"""A training run as users write it: killed at any moment, it goes on from its last checkpoint."""

import os
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.optim.lr_scheduler import OneCycleLR

from ingot import IKFAC, KFAC, SINGD
from tests.checkpoints.runs import SHAPE, SPARSE, Mixed, loss

STEPS = 48
RUNS = {
    "SINGD": (SINGD, {"precond_momentum": 0.3, "structure": "hierarchical(1,1)"}),
    "IKFAC": (IKFAC, {"structure": ("dense", "tril_toeplitz")}),
    "KFAC": (KFAC, {"structure": "block_diagonal(3)"}),
    "SINGD in bfloat16": (SINGD, {"stochastic_rounding": True}),
}


def run(name: str, save_every: int, folder: Path, progress: Connection) -> None:
    """Train to the end, in the weights' precision or with autocast and a scaler, in two micro-batches."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, settings = RUNS[name]
    mixed = "bfloat16" not in name
    model = Mixed().to(torch.float32 if mixed else torch.bfloat16)
    optimizer = kind(model, **SPARSE, **settings)
    scheduler = OneCycleLR(optimizer, 0.01, total_steps=STEPS)
    scaler = torch.amp.GradScaler("cpu", enabled=mixed, init_scale=2.0**10, growth_interval=4)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    file, step = folder / "checkpoint.pt", 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        for key, part in parts.items():
            part.load_state_dict(saved[key])
        torch.set_rng_state(saved["random"])
        step = saved["step"]
    progress.send(step)
    while step < STEPS:
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(SHAPE, dtype=next(model.parameters()).dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                value = loss(model, x) / 2
            scaler.scale(value).backward()
        if mixed and step % 10 == 5:  # an overflow, as they happen: the scaler skips this step
            model.head.weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        step += 1
        if step % save_every == 0 or step == STEPS:
            states = {key: part.state_dict() for key, part in parts.items()}
            torch.save(states | {"random": torch.get_rng_state(), "step": step}, folder / "unfinished.pt")
            os.replace(folder / "unfinished.pt", file)
        progress.send(step)

"""Digits with FSDP2 and checkpoints that any number of processes can go on from.

torchrun --nproc-per-node 2 --max-restarts 3 examples/sharded.py
"""

import gc
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ingot import SINGD


def main(folder="runs/sharded", epochs=8):
    dist.init_process_group("gloo")  # "nccl" on graphics cards
    torch.manual_seed(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))
    fully_shard(model)
    optimizer = SINGD(model, lr=3e-3)
    state, done = {}, sorted(Path(folder).glob("epoch*/.metadata"))
    if done:  # after a restart as well, in however many processes
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=done[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for epoch in range(len(done), epochs):
        order = torch.randperm(1408, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(64):
            mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        dcp.save(state, checkpoint_id=Path(folder) / f"epoch{epoch:02d}")
    with torch.no_grad():
        accuracy = (model(images[1408:]).argmax(1) == labels[1408:]).float().mean()
    if dist.get_rank() == 0:
        print(f"accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
    gc.collect()  # the model, which would keep up what is ended here
    dist.destroy_process_group()

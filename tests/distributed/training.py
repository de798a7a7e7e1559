"""Trainings that tests compare: alone, as replicas, in shards or by tensor parallelism."""

import contextlib
import gc

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ingot
from tests.distributed import models

STEPS = 30
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def leave():
    """End what connects this process with others, after all that holds on to it is gone.

    Models in shards are in cycles. With them groups outlive their end, and torch aborts in some exits.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


class Training:
    """One model with its optimizer, alone or as one of several, and its batches.

    ``kind`` is "one"; "ddp" for replicas; "fsdp" for shards, with the keywords ``shard``; "tp" for tensor
    parallelism by a ``plan``, where all processes have the same batches.
    """

    def __init__(
        self,
        name,
        kind,
        dtype=torch.float64,
        optimizer="SINGD",
        early=False,
        shard=None,
        plan=None,
        **settings,
    ):
        self.name, self.kind, self.dtype = name, kind, dtype
        self.model = self.called = models.make(name, dtype)
        settings = {"lr": 1e-2, "precond_every": 3, "precond_warmup": 2} | settings
        settings.setdefault("loss_average", "batch" if name in ("cnn", "bypassed") else "token")
        self.is_sum = settings["loss_average"] is None

        def make():
            self.optimizer = getattr(ingot, optimizer)(self.model, **settings)

        if early:
            make()
        if kind == "ddp":
            self.called = DistributedDataParallel(self.model, find_unused_parameters=name == "branches")
        if kind == "fsdp":
            for block in models.blocks(self.model):
                fully_shard(block, **(shard or {}))
            fully_shard(self.model, **(shard or {}))
        if kind == "tp":
            parallelize_module(self.model, init_device_mesh("cpu", (world(),)), plan)
        if not early:
            make()

    def mine(self, x, y, sizes=None):
        """This process's part of a batch."""
        if self.kind in ("one", "tp"):
            return x, y
        parts = [len(x) // world()] * world() if sizes is None else sizes
        return x.split(parts)[rank()], y.split(parts)[rank()]

    def loss(self, x, y, weight=1.0):
        reduction = "sum" if self.is_sum else "mean"
        return weight * models.loss_of(self.called, x, y, reduction)

    def step(self, index):
        self.optimizer.zero_grad()
        self.loss(*self.mine(*models.batch(self.name, index, dtype=self.dtype))).backward()
        self.optimizer.step()

    def run(self, steps=STEPS, first=0):
        for index in range(first, first + steps):
            self.step(index)
        return self

    def weights(self):
        found = {}
        for name, p in self.model.named_parameters():
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            found[name] = whole.detach().clone()
        return found


def difference(a, b):
    """The largest difference between two trainings' weights."""
    first, second = a.weights(), b.weights()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def are_equal_everywhere(training):
    """Whether all processes have the same weights, bit by bit."""
    return is_same_everywhere(training.weights().values())


def is_same_everywhere(tensors):
    """Whether all processes have the same tensors, bit by bit."""
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    others = [torch.empty_like(flat) for _ in range(world())]
    dist.all_gather(others, flat)
    return all(torch.equal(flat, other) for other in others)


@contextlib.contextmanager
def counted():
    """Messages that are sent within, by name, and their bytes."""
    found = {}
    names = ("all_reduce", ALL_GATHER, "all_to_all_single")
    before = {name: getattr(dist, name) for name in names}

    def counting(name):
        def call(*args, **kwargs):
            sent = args[0] if name == "all_reduce" else args[1]
            messages, size = found.get(name, (0, 0))
            found[name] = messages + 1, size + sent.nbytes
            return before[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name in names:
            setattr(dist, name, before[name])

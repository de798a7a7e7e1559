"""Scenarios of replicas: work that is divided among them, and different numbers of batches."""

import torch
from torch import distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import ingot
from ingot import stepping
from tests.distributed import models
from tests.distributed.training import (
    Training,
    are_equal_everywhere,
    counted,
    difference,
    is_same_everywhere,
    rank,
    world,
)


def work():
    """Updates and natural gradients that are divided: how many each process makes, and what becomes of it."""
    found = {}
    for optimizer in ("SINGD", "KFAC"):
        settings = {"optimizer": optimizer, "structure": "dense"}
        one = Training("attention", "one", **settings).run(10)
        for kind in ("ddp", "fsdp"):
            training = Training("attention", kind, share_work=True, **settings)
            made, layers = _counted_work(training), len(training.optimizer._layers)
            training.run(10)
            updates = sum(s.get("updates", 0) for s in training.optimizer.state.values())
            shares = [len(made["updates"]) / updates, len(made["gradients"]) / (10 * layers)]
            equal = are_equal_everywhere(training)
            found[f"{kind} {optimizer}"] = [difference(training, one), shares, layers, equal]
    return found


def _counted_work(training):
    """The layers that this process updates, and makes natural gradients of, from now on."""
    optimizer, made = training.optimizer, {"updates": [], "gradients": []}
    update, natural = optimizer._update_here, stepping.natural_gradient

    def updating(layers, *rest):
        made["updates"].extend(layers)
        update(layers, *rest)

    def multiplying(layer, *rest):
        if layer in optimizer._layers.values():
            made["gradients"].append(layer)
        return natural(layer, *rest)

    optimizer._update_here, stepping.natural_gradient = updating, multiplying
    return made


def division():
    """What is divided by size: what steps without an update send, for layers of some hundred rows."""
    found = {}
    for structure, wanted in (("dense", None), ("dense", False), ("block_diagonal(32)", None)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 520), *(torch.nn.Linear(520, 520) for _ in range(3)))
        called = DistributedDataParallel(model)
        optimizer = ingot.SINGD(model, structure=structure, share_work=wanted, precond_warmup=0)
        per_step = []
        for index in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index))
            optimizer.zero_grad()
            with counted() as sent:
                called(x).square().mean().backward()
                optimizer.step()
            per_step.append(sent)
        kept = [layer.kept is not None for layer in optimizer._layers.values()]
        found[f"{structure} {wanted}"] = [per_step[-1], sum(kept)]
    return found


def joined():
    """Processes with different numbers of batches, the first one with the fewest, and what they have then."""
    found = {}
    for is_mean_of_all in (True, False):
        # Those that are done do no work, whether there is a division of it or not.
        training, one = Training("cnn", "ddp", share_work=is_mean_of_all), Training("cnn", "one")
        weight = 1 / world() if is_mean_of_all else 1.0
        first = 0
        for batches in (5, 0, 9):  # of the first process; the others have nine
            with Join([training.called, training.optimizer], divide_by_initial_world_size=is_mean_of_all):
                for index in range(first, first + (batches if rank() == 0 else 9)):
                    _step_in_parts(training, index)
            for index in range(first, first + 9):
                one.optimizer.zero_grad()
                x, y = models.batch("cnn", index)
                if index - first < batches:
                    one.loss(x, y).backward()
                else:
                    one.loss(x[len(x) // 2 :], y[len(y) // 2 :], weight).backward()
                one.optimizer.step()
            first += 9
        way = "a mean of all" if is_mean_of_all else "a mean of those that go on"
        states = [torch.as_tensor(v).double() for s in training.optimizer.state.values() for v in s.values()]
        equal = are_equal_everywhere(training), is_same_everywhere(states)
        found[way] = [difference(training, one), *equal]
    found["refused"] = _refused_joins()
    own, others = training.optimizer._now.replicas.groups[0], dist.group.WORLD
    found["timeouts"] = [str(g._get_backend(torch.device("cpu")).options._timeout) for g in (own, others)]
    return found


def _step_in_parts(training, index):
    """A step of two micro-batches, whose gradients are sent together."""
    x, y = training.mine(*models.batch("cnn", index))
    training.optimizer.zero_grad()
    with training.called.no_sync():
        training.loss(x[:1], y[:1], 1 / len(x)).backward()
    training.loss(x[1:], y[1:], 1 - 1 / len(x)).backward()
    training.optimizer.step()


def _refused_joins():
    """What is said where Join does not know enough."""
    training = Training("cnn", "ddp")
    again = Training("cnn", "ddp")
    with Join([again.called, again.optimizer]):
        again.step(0)
    separate = Training("cnn", "ddp", fisher="separate")
    ways = (
        (training, [training.called]),
        (again, [again.called]),
        (training, [training.optimizer, training.called]),
        (separate, [separate.called, separate.optimizer]),
    )
    found = []
    for which, several in ways:
        try:
            with Join(several):
                which.step(1)
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    return found

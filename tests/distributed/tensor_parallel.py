"""Scenarios of tensor parallelism: layers whose inputs and outputs are shared out by features."""

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ingot
from tests.distributed import models
from tests.distributed.training import Training, are_equal_everywhere, difference, rank, world

STRUCTURES = (
    "dense",
    "diagonal",
    "block_diagonal(4)",
    "block_diagonal(5)",
    "tril",
    "triu_toeplitz",
    "rank_triu(2)",
    "rank_tril_mirrored(2)",
    "hierarchical(2,2)",
)


def by_features():
    """The usual plan of a transformer: columns, then rows; what is between them has some of the features."""
    attention = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    return attention | {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def by_features_and_places():
    """The same where what is between blocks, norms included, has some of the places of each sample."""
    attention = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    return attention | {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norms.0": SequenceParallel(),
        "norms.1": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


PLANS = {"features": by_features, "features and places": by_features_and_places}


def _differences(family, plans):
    found = {}
    for optimizer, structure in family:
        settings = {"optimizer": optimizer, "structure": structure}
        one = Training("transformer", "one", **settings).run()
        for name in plans:
            training = Training("transformer", "tp", plan=PLANS[name](), **settings).run()
            found[f"{name} {optimizer} {structure}"] = difference(training, one)
    return found


def trajectories():
    """After 30 steps: rows that mix across the processes' borders and that do not, on both sides."""
    found = _differences([("SINGD", "diagonal"), ("SINGD", "block_diagonal(4)")], ["features"])
    return found | _differences([("SINGD", "block_diagonal(5)")], ["features and places"])


def all_structures():
    """The same for each structure, and each member of the family."""
    family = [("SINGD", structure) for structure in STRUCTURES]
    family += [("KFAC", "dense"), ("KFAC", "block_diagonal(4)"), ("IKFAC", "dense")]
    return _differences(family, PLANS)


def loops():
    """What may be different: the optimizer made first, a sum for a loss, a NaN in one, checkpoints."""
    one = Training("transformer", "one").run(10)
    early = Training("transformer", "tp", plan=by_features(), early=True).run(10)
    found = {"made before": difference(early, one)}
    summed = [
        Training("transformer", kind, plan=by_features(), loss_average=None, relative_damping=False).run(10)
        for kind in ("one", "tp")
    ]
    found["a sum"] = difference(*summed)
    found["shards of columns"] = difference(
        Training("transformer", "fsdp", shard={"shard_placement_fn": _by_columns}).run(10), one
    )
    # A layer's statistics are divided among processes, each of which has all features of some samples.
    training = Training("transformer", "tp", plan=by_features())
    seen = []
    training.optimizer._see_loss = lambda layer, use, group: seen.append(use.batch)
    training.run(1)
    found["samples"] = seen[0]
    found["factors"] = _share_of_factors(early, one)
    found |= _checkpoints(one)
    return found | _trouble()


def _by_columns(p):
    """What fully_shard is told to share out otherwise than by the first dimension, which must be even."""
    return Shard(1) if p.ndim == 2 and p.shape[1] % world() == 0 else Shard(0)


def _share_of_factors(training, one):
    """How many of all entries of K are in this process."""
    here, there = (
        sum((s["K"].to_local() if hasattr(s["K"], "to_local") else s["K"]).numel() for s in states)
        for states in (
            [state for state in t.optimizer.state.values() if "K" in state] for t in (training, one)
        )
    )
    return here / there


def _checkpoints(one):
    """All of the state in one place, from one process, and to it."""
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(one.model, one.optimizer, options=options)
    training = Training("transformer", "tp", plan=by_features())
    training.model.load_state_dict(
        {name: _like(p, one.weights()[name]) for name, p in training.model.named_parameters()}
    )
    set_optimizer_state_dict(training.model, training.optimizer, state, options=options)
    training.run(5, 10)
    back = Training("transformer", "one")
    back.model.load_state_dict(get_model_state_dict(training.model, options=options))
    state = get_optimizer_state_dict(training.model, training.optimizer, options=options)
    set_optimizer_state_dict(back.model, back.optimizer, state, options=options)
    one.run(10, 10)
    training.run(5, 15)
    back.run(5, 15)
    return {"from one": difference(training, one), "to one": difference(back, one)}


def _like(p, whole):
    if not hasattr(p, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, p.device_mesh, p.placements)


def _trouble():
    """A gradient that is not finite in one process alone: all of them refuse it."""
    training = Training("transformer", "tp", plan=by_features()).run(5)
    for index in range(5, 8):
        training.optimizer.zero_grad()
        training.loss(*models.batch("transformer", index)).backward()
        if index == 6 and rank() == world() - 1:
            training.model.up.weight.grad.to_local()[0, 0] = float("nan")
        training.optimizer.step()
    finite = all(bool(w.isfinite().all()) for w in training.weights().values())
    dropped = float(training.optimizer.state[training.model.up.weight]["dropped"])
    return {"trouble": [finite, are_equal_everywhere(training), dropped]}


def refused():
    """Weights that are shared out along two dimensions of a mesh: refused, or AdamW's."""
    mesh = init_device_mesh("cpu", (world() // 2, 2), mesh_dim_names=("data", "features"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    parallelize_module(model, mesh["features"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    messages = []
    for layer in (model[0], model[2]):
        try:
            ingot.SINGD(model, layer.parameters())
        except ValueError as error:
            messages.append(str(error))
    optimizer = ingot.SINGD(model, params=[{"params": "*", "precondition": False}])
    losses = []
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    dist.broadcast(x, 0)
    dist.broadcast(y, 0)
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"refused": messages, "losses": [losses[0], losses[-1]]}

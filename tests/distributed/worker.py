"""What each of several processes does in the tests: trainings whose results its first process writes down.

``torchrun --nproc-per-node 2 -m tests.distributed.worker RESULTS SCENARIO...``
"""

import contextlib
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import ingot
from tests.distributed import models, replicas, tensor_parallel
from tests.distributed.training import Training, are_equal_everywhere, counted, difference, leave, rank, world

STRUCTURES = (
    "dense",
    "diagonal",
    "block_diagonal(4)",
    "tril",
    "triu",
    "tril_toeplitz",
    "triu_toeplitz",
    "rank_triu(2)",
    "rank_tril(2)",
    "rank_triu_mirrored(2)",
    "rank_tril_mirrored(2)",
    "hierarchical(2,2)",
)
FAMILY = [("SINGD", structure) for structure in STRUCTURES]
FAMILY += [
    ("KFAC", "dense"),
    ("KFAC", "block_diagonal(4)"),
    ("IKFAC", "dense"),
    ("IKFAC", "hierarchical(2,2)"),
]
FEW = [("SINGD", "block_diagonal(4)"), ("KFAC", "dense")]
MORE = [*FEW, ("SINGD", "diagonal"), ("SINGD", "dense"), ("IKFAC", "triu")]


# --- Scenarios --------------------------------------------------------------------------------------------


def trajectories(name, family, dtype=torch.float64, lr=1e-2):
    found = {}
    for optimizer, structure in family:
        settings = {"optimizer": optimizer, "structure": structure, "dtype": dtype, "lr": lr}
        one = Training(name, "one", **settings).run()
        for kind in ("ddp", "fsdp"):
            several = Training(name, kind, **settings).run()
            found[f"{kind} {optimizer} {structure}"] = difference(several, one)
    return found


def loops():
    """Differences to one process, for the ways in which a batch may come in parts."""
    found = {}
    for average, kind in (("batch", "ddp"), (None, "ddp"), ("batch", "fsdp"), (None, "fsdp")):
        word = "sum" if average is None else "mean"
        # The loss is averaged over processes, whatever it is in each of them.
        settings = {"loss_average": average, "lr": 1e-2}
        weight = 1.0 if average == "batch" else float(world())
        one = Training("cnn", "one", **settings).run(8)
        again = {}
        for way in ("micro-batches, all sent", "micro-batches, the last sent", "uneven"):
            training = Training("cnn", kind, **settings)
            for index in range(8):
                training.optimizer.zero_grad()
                _backward(training, index, way, weight)
                training.optimizer.step()
            again[way] = difference(training, one)
        found |= {f"{kind}, {word}, {way}": value for way, value in again.items()}
    return found


def _backward(training, index, way, weight):
    x, y = models.batch(training.name, index)
    if way == "uneven":
        mine = training.mine(x, y, [5, 3] if world() == 2 else [3, 1, 2, 2])
        share = 1.0 if training.is_sum else world() * len(mine[0]) / len(x)
        training.loss(*mine, weight if training.is_sum else share).backward()
        return
    x, y = training.mine(x, y)
    parts = list(zip(x.chunk(2), y.chunk(2), strict=True))
    for number, part in enumerate(parts):
        sends = number == len(parts) - 1 or way == "micro-batches, all sent"
        share = weight if training.is_sum else 1 / len(parts)
        with _syncing(training, sends):
            training.loss(*part, share).backward()


@contextlib.contextmanager
def _syncing(training, sends):
    if training.kind == "ddp":
        with contextlib.nullcontext() if sends else training.called.no_sync():
            yield
        return
    training.model.set_requires_gradient_sync(sends)
    yield


def curvature():
    """Sampled or exact curvature in a pass of its own."""
    found = {}
    for kind in ("one", "ddp"):
        training = Training("cnn", kind, fisher="separate")
        for index in range(6):
            x, y = training.mine(*models.batch("cnn", index))
            training.optimizer.zero_grad()
            output = training.called(x)
            training.optimizer.curvature_backward(output, "cross_entropy", samples=None)
            torch.nn.functional.cross_entropy(output, y).backward()
            training.optimizer.step()
        found[kind] = training
    sharded = Training("cnn", "fsdp", fisher="separate")
    output = sharded.called(models.batch("cnn", 0)[0])
    refused = ""
    try:
        sharded.optimizer.curvature_backward(output, "cross_entropy")
    except RuntimeError as error:
        refused = str(error)
    return {"difference": difference(found["ddp"], found["one"]), "refused": refused}


def short_statistics():
    """Statistics that are sent in bfloat16."""
    one = Training("cnn", "one").run(10)
    sizes = {}
    for word, dtype in (("long", None), ("short", torch.bfloat16)):
        training = Training("cnn", "ddp", statistics_dtype=dtype, precond_every=1).run(1)
        with counted() as sent:
            training.run(1, 1)
        sizes[word] = sum(size for _, size in sent.values())
    training = Training("cnn", "ddp", statistics_dtype=torch.bfloat16).run(10)
    return {"difference": difference(training, one), "bytes": sizes, "equal": are_equal_everywhere(training)}


def messages():
    """What is sent at steps with and without an update of the factors."""
    found = {}
    for kind in ("ddp", "fsdp"):
        for structure in ("diagonal", "block_diagonal(4)", "dense"):
            training = Training("bypassed", kind, structure=structure, precond_every=4).run(5)
            per_step = []
            for index in range(5, 10):
                training.optimizer.zero_grad()
                x, y = training.mine(*models.batch("bypassed", index))
                with counted() as sent:
                    training.loss(x, y).backward()
                    training.optimizer.step()
                per_step.append(sent)
            found[f"{kind} {structure}"] = per_step
    return found


def sharded_loops():
    """FSDP2's ways, each beside one process."""
    one = Training("attention", "one").run(10)
    found = {"made before": difference(Training("attention", "fsdp", early=True).run(10), one)}
    training = Training("attention", "fsdp")
    for index in range(10):
        with torch.no_grad():  # which leaves whole parameters behind
            training.called(training.mine(*models.batch("attention", index))[0])
        training.step(index)
    found["evaluated between steps"] = difference(training, one)
    offload = CPUOffloadPolicy(pin_memory=False)
    found["offloaded"] = difference(
        Training("attention", "fsdp", shard={"offload_policy": offload}).run(10), one
    )
    short = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    training = Training("attention", "fsdp", dtype=torch.float32, shard={"mp_policy": short}).run(10)
    single = Training("attention", "one", dtype=torch.float32).run(10)
    found["bfloat16"] = difference(training, single)
    found["factors"] = sorted({str(s["K"].dtype) for s in training.optimizer.state.values() if "K" in s})
    found["diagnostics"] = _diagnosed(Training("attention", "fsdp").run(10), one)
    return found


def _diagnosed(sharded, one):
    """The largest relative difference of the health numbers."""
    here, there = (t.optimizer.diagnostics().scalars() for t in (sharded, one))
    assert here.keys() == there.keys()
    return max(abs(here[key] - there[key]) / max(1e-6, abs(there[key])) for key in there)


def memory():
    """Bytes of state in this process as a share of one process's."""
    found = {}
    for structure in ("diagonal", "block_diagonal(32)"):
        torch.manual_seed(0)
        sizes = []
        for sharded in (False, True):
            model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
            if sharded:
                fully_shard(model)
            optimizer = ingot.SINGD(model, structure=structure)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 256)).square().mean().backward()
                optimizer.step()
            values = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
            sizes.append(sum((v.to_local() if hasattr(v, "to_local") else v).nbytes for v in values))
        found[structure] = sizes[1] / sizes[0]
    return found


def hybrid():
    """Shards within groups of replicas."""
    mesh = init_device_mesh("cpu", (2, world() // 2), mesh_dim_names=("replicas", "shards"))
    found = {}
    for structure in ("diagonal", "block_diagonal(4)", "dense"):
        one = Training("attention", "one", structure=structure).run(10)
        training = Training("attention", "fsdp", structure=structure, shard={"mesh": mesh}).run(10)
        found[structure] = difference(training, one)
    return found


def trouble():
    """Numbers that are not finite in one process: all of them decide alike, and go on."""
    found = {}
    for kind in ("ddp", "fsdp"):
        for where_from in ("loss", "inputs"):
            training = Training("cnn", kind).run(5)
            for index in range(5, 9):
                x, y = training.mine(*models.batch("cnn", index))
                bad = index == 6 and rank() == world() - 1
                if bad and where_from == "inputs":
                    x = x.clone()
                    x[0] = float("nan")
                training.optimizer.zero_grad()
                training.loss(x, y, float("inf") if bad and where_from == "loss" else 1.0).backward()
                training.optimizer.step()
            finite = all(bool(w.isfinite().all()) for w in training.weights().values())
            found[f"{kind} {where_from}"] = [finite, are_equal_everywhere(training)]
    return found


def unused():
    """A layer that only one process uses."""
    training = Training("branches", "ddp", precond_every=1)
    for index in range(8):
        x, y = training.mine(*models.batch("cnn", index))
        training.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(training.called(x, index % 2 == 0 and rank() == 0), y).backward()
        training.optimizer.step()
    layer = training.optimizer._layers[training.model.extra.weight]
    updates = training.optimizer.state[layer.weight]["updates"]
    return {"equal": are_equal_everywhere(training), "updates": updates}


def saved(folder, kind, steps):
    """Train, and save with torch.distributed.checkpoint."""
    training = Training("attention", kind, structure="block_diagonal(4)").run(int(steps))
    state = {"model": get_model_state_dict(training.model)}
    state["optimizer"] = get_optimizer_state_dict(training.model, training.optimizer)
    dcp.save(state, checkpoint_id=folder)
    return {}


def resumed(folder, kind, first, steps, into=""):
    """Load what ``saved`` saved, with whatever processes, go on, and save again or compare with one run."""
    training = Training("attention", kind, structure="block_diagonal(4)")
    state = {"model": get_model_state_dict(training.model)}
    state["optimizer"] = get_optimizer_state_dict(training.model, training.optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(training.model, state["model"])
    set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"])
    training.run(int(steps), int(first))
    if into:
        state = {"model": get_model_state_dict(training.model)}
        state["optimizer"] = get_optimizer_state_dict(training.model, training.optimizer)
        dcp.save(state, checkpoint_id=into)
    one = Training("attention", "one", structure="block_diagonal(4)").run(int(first) + int(steps))
    return {"difference": difference(training, one)}


def whole_state():
    """All of the state in one place, into one process's optimizer and back."""
    training = Training("attention", "fsdp").run(5)
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(training.model, options=options)
    state = get_optimizer_state_dict(training.model, training.optimizer, options=options)
    one = Training("attention", "one")
    one.model.load_state_dict(weights)
    set_optimizer_state_dict(one.model, one.optimizer, state, options=options)
    back = Training("attention", "fsdp")
    set_model_state_dict(back.model, weights, options=options)
    set_optimizer_state_dict(back.model, back.optimizer, state, options=options)
    plain = Training("attention", "fsdp")
    set_model_state_dict(plain.model, weights, options=options)
    plain.optimizer.load_state_dict(training.optimizer.state_dict())
    for each in (training, one, back, plain):
        each.run(5, 5)
    return {
        "to one": difference(one, training),
        "and back": difference(back, training),
        "own": difference(plain, training),
    }


def in_float32(*families):
    """With the default learning rate: round-off grows with the steps."""
    found = {}
    for name, family in families:
        differences = trajectories(name, family, torch.float32, lr=1e-3)
        found |= {f"{name} {key}": value for key, value in differences.items()}
    return found


SCENARIOS = {
    "cnn": lambda: trajectories("cnn", FAMILY),
    "gpt2": lambda: trajectories("gpt2", FEW),
    "gpt2 all": lambda: trajectories("gpt2", FAMILY),
    "attention": lambda: trajectories("attention", FAMILY),
    "float32": lambda: in_float32(("cnn", FEW), ("attention", MORE[2:3])),
    "float32 more": lambda: in_float32(("cnn", MORE), ("gpt2", MORE)),
}
for scenario in (
    loops,
    curvature,
    short_statistics,
    messages,
    sharded_loops,
    memory,
    hybrid,
    trouble,
    unused,
):
    SCENARIOS[scenario.__name__] = scenario
SCENARIOS |= {
    "work": replicas.work,
    "division": replicas.division,
    "joined": replicas.joined,
    "tensor_parallel": tensor_parallel.trajectories,
    "tensor_parallel all": tensor_parallel.all_structures,
    "tensor_parallel loops": tensor_parallel.loops,
    "tensor_parallel refused": tensor_parallel.refused,
    "saved": saved,
    "resumed": resumed,
    "whole_state": whole_state,
}


def main():
    torch.set_num_threads(1)
    if torch.distributed.is_torchelastic_launched():
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    results, *scenarios = sys.argv[1:]
    found = {}
    for text in scenarios:
        name, *arguments = text.split(",")
        found[name] = SCENARIOS[name](*arguments)
    if rank() == 0:
        Path(results).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()

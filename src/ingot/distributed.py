"""Several processes: what they tell each other, and which part of a sharded tensor each of them has.

All that is sent is sent from here; the rest of the library sees local tensors. Three arrangements are known:
replicas of a model (DistributedDataParallel), where every process has all; parameters that are shared out
(``fully_shard``), where each has some rows of every weight and a part of every factor; and layers whose
inputs and outputs are shared out as well (tensor parallelism), so that each process has some of the features
of all samples. For statistics, these become some of the samples with all features.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ingot.scalars import Number, number

Group: TypeAlias = Any  # dist.ProcessGroup, which is not there on every platform


class Processes(NamedTuple):
    """Those that train one model together, as the groups to sum over one after the other.

    Gradients are means over ``averaged`` of them, each of which has samples of its own.
    """

    groups: tuple[Group, ...]
    averaged: int

    def sum_(self, flat: Tensor) -> list[Any]:
        """Begin to sum a tensor over all processes, in its place; returns what is to be waited for."""
        *first, last = self.groups
        for group in first:
            dist.all_reduce(flat, group=group)
        return [dist.all_reduce(flat, group=last, async_op=True)]

    @property
    def worker(self) -> int:
        """Which of the last group's processes this is: they are those that share work."""
        return dist.get_rank(self.groups[-1])

    @property
    def workers(self) -> int:
        """How many share work."""
        return dist.get_world_size(self.groups[-1])

    def gather(self, flat: Tensor, sizes: list[int]) -> list[Tensor]:
        """What each of those has, of so many numbers."""
        mine = nn.functional.pad(flat, (0, max(sizes) - len(flat)))
        every = mine.new_empty(len(sizes) * max(sizes))
        _all_gather(every, mine, self.groups[-1])
        return [part[:size] for part, size in zip(every.split(max(sizes)), sizes, strict=True)]


def _all_gather(every: Tensor, mine: Tensor, group: Group) -> None:
    # Its name since torch 2.13, where the old one warns.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(every, mine, group=group)


def are_several() -> bool:
    """Whether this process was told of others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# --- Replicas ---------------------------------------------------------------------------------------------


def running_replica() -> Any:
    """The DistributedDataParallel whose forward pass is running, if it has others beside it."""
    replica = nn.parallel.DistributedDataParallel._active_ddp_module
    return None if replica is None or replica.process_group.size() == 1 else replica


def group_of_ones_own(group: Group) -> Group:
    """Another group of the same processes: what is sent there gets into no order with what is sent here.

    They wait for each other as long as in the first one.
    """
    ranks, cpu = dist.get_process_group_ranks(group), torch.device("cpu")
    device = cpu if cpu in group._device_types else group._device_types[0]
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return dist.new_group(ranks, timeout, use_local_synchronization=True)


def all_processes() -> Group:
    """The group of all there are."""
    return dist.group.WORLD


def last_of(is_one: bool, group: Group, device: torch.device) -> int:
    """The last of those processes that are something, by its number in the group."""
    number = torch.tensor(dist.get_rank(group) if is_one else -1, device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    return int(number)


def same_everywhere(
    states: list[dict[str, Any]], devices: list[torch.device], source: int, group: Group
) -> list[dict[str, Any]]:
    """States of parameters on some devices as one process of a group has them, in all of it."""
    is_here, source = dist.get_rank(group) == source, dist.get_global_rank(group, source)
    # What is not on a parameter's device is small, and goes with the list of what there is.
    described = [
        {k: _Like(v.shape, v.dtype) if _is_on(v, device) else v for k, v in state.items()}
        for state, device in zip(states, devices, strict=True)
    ]
    box = [described]
    dist.broadcast_object_list(box, source, group, device=devices[0])
    found: list[dict[str, Any]] = []
    for state, those, device in zip(states, box[0], devices, strict=True):
        found.append({})
        for key, value in those.items():
            if isinstance(value, _Like):
                value = (
                    state[key].contiguous()
                    if is_here
                    else torch.empty(value.shape, dtype=value.dtype, device=device)
                )
                dist.broadcast(value, source, group)
            found[-1][key] = value
    return found


class _Like(NamedTuple):
    """A tensor but for its numbers."""

    shape: torch.Size
    dtype: torch.dtype


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device == device


def backward_ends(callback: Callable[[], None]) -> None:
    """Have something done at the end of the running backward pass, while gradients are still on their way."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# --- Shards -----------------------------------------------------------------------------------------------


def is_distributed(tensor: object) -> bool:
    """Whether a tensor is a DTensor. Nothing is imported to tell: without the class there is none of it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is in this process; writing to it writes to the tensor."""
    return tensor.detach().to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """A tensor with what all processes have of it; all of them must call this."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def settle_gradients(params: Iterable[Tensor]) -> None:
    """Let gradients be shared out as their parameters are.

    What is whole in all processes that have different samples, or places of them, gets a gradient that is
    the sum of what these have.
    """
    for p in params:
        if type(p.grad) is Tensor:  # as nearly always
            continue
        if is_distributed(p.grad) and p.grad.placements != p.placements:  # type: ignore[union-attr, attr-defined]
            p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[union-attr, attr-defined]


def by_samples(tensor: Tensor) -> Tensor:
    """All features of some samples: this process's part of what all have, or have some features of.

    Features that are shared out are exchanged for samples, each process sending what others need alone.
    """
    if not is_distributed(tensor):
        return tensor
    from torch.distributed.tensor import Shard as AlongDimension

    several = tensor if tensor.ndim > 1 else tensor.unsqueeze(0)  # a single sample is the first one's
    everywhere = [AlongDimension(0)] * several.device_mesh.ndim  # type: ignore[attr-defined]
    return local(several.redistribute(placements=everywhere))  # type: ignore[attr-defined]


def place_of(p: Tensor) -> int:
    """A number for this process's part of a parameter, the same where processes have the same part."""
    found = 0
    if is_distributed(p):
        for axis, place in enumerate(p.placements):  # type: ignore[attr-defined]
            if not place.is_replicate():
                mesh = p.device_mesh  # type: ignore[attr-defined]
                found = found * mesh.size(axis) + mesh.get_local_rank(axis)
    return found


def is_sharded_model(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on any part of a model."""
    return any(True for _ in _sharded_modules(model))


def reshard(model: nn.Module) -> None:
    """Let a model show its sharded parameters, which are the optimizer's.

    During forward and backward passes, and after one without the other, it shows whole ones.
    """
    for module in _sharded_modules(model):
        module.reshard()


def _sharded_modules(model: nn.Module) -> Iterable[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    found = getattr(fsdp, "FSDPModule", None)
    return () if found is None else (module for module in model.modules() if isinstance(module, found))


@dataclass(frozen=True)
class Shard:
    """How a parameter is shared out: by one of its dimensions, along one dimension of a mesh of processes.

    What is said of rows is said of that dimension.
    """

    mesh: Any  # DeviceMesh
    axis: int | None  # of the mesh; None where every process has all
    size: int  # of the parameter's dimension
    dim: int = 0  # which it is

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """All of the mesh."""
        return tuple(self.mesh.get_all_groups())

    @cached_property
    def group(self) -> Group:
        """Those that have the other parts."""
        return None if self.axis is None else self.mesh.get_group(self.axis)

    @cached_property
    def count(self) -> int:
        """How many parts there are."""
        return 1 if self.axis is None else self.mesh.size(self.axis)

    @cached_property
    def index(self) -> int:
        """Which of them is here."""
        return 0 if self.axis is None else self.mesh.get_local_rank(self.axis)

    @cached_property
    def sizes(self) -> list[int]:
        """How many rows each part has."""
        return _parts(self.size, self.count)

    @property
    def start(self) -> int:
        """The first row that is here."""
        return sum(self.sizes[: self.index])

    @property
    def stop(self) -> int:
        """The first row that is no longer here."""
        return self.start + self.sizes[self.index]

    # Factors are kept in parts of their last dimension, of about the same number of entries.

    def share(self, entries: Tensor) -> Tensor:
        """This process's part of entries that all of them have, as a part of the whole."""
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor import Shard as AlongDimension

        sizes = _parts(entries.shape[-1], self.count)
        part = entries.split(sizes, dim=-1)[self.index].clone(memory_format=torch.contiguous_format)
        along = AlongDimension(entries.ndim - 1)
        places = [along if axis == self.axis else Replicate() for axis in range(self.mesh.ndim)]
        shape, stride = entries.shape, entries.contiguous().stride()
        return DTensor.from_local(part, self.mesh, places, run_check=False, shape=shape, stride=stride)

    def rows_like(self, whole_tensor: Tensor, p: Tensor) -> Tensor:
        """This process's rows of a tensor that all of them have, laid out as a parameter is."""
        from torch.distributed.tensor import DTensor

        mesh, places = p.device_mesh, p.placements  # type: ignore[attr-defined]
        part = whole_tensor.narrow(self.dim, self.start, self.stop - self.start) if p.ndim else whole_tensor
        part = part.clone(memory_format=torch.contiguous_format)
        shape, stride = whole_tensor.shape, whole_tensor.contiguous().stride()
        return DTensor.from_local(part, mesh, places, run_check=False, shape=shape, stride=stride)

    def gather(self, shared: Sequence[Tensor]) -> list[Tensor]:
        """Entries that ``share`` made parts of, whole again, in one message for each dtype."""
        if self.group is None:
            return [local(tensor) for tensor in shared]
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in shared):
            alike = [index for index, tensor in enumerate(shared) if tensor.dtype == dtype]
            found |= dict(zip(alike, self._gather_alike([shared[i] for i in alike]), strict=True))
        return [found[index] for index in range(len(shared))]

    def _gather_alike(self, shared: list[Tensor]) -> list[Tensor]:
        lead = [tensor.shape[:-1].numel() for tensor in shared]
        widths = [-(-tensor.shape[-1] // self.count) for tensor in shared]  # of the first part, the largest
        parts = [local(tensor) for tensor in shared]
        padded = [
            nn.functional.pad(part, (0, width - part.shape[-1])).reshape(-1)
            for part, width in zip(parts, widths, strict=True)
        ]
        mine = torch.cat(padded)
        flat = mine.new_empty(self.count * len(mine))
        _all_gather(flat, mine, self.group)
        sizes = [n * width for n, width in zip(lead, widths, strict=True)]
        columns = flat.view(self.count, -1).split(sizes, dim=1)
        found = []
        for tensor, width, column in zip(shared, widths, columns, strict=True):
            *batch, numel = tensor.shape
            pieces = column.reshape(self.count, *batch, width).movedim(0, -2)
            found.append(pieces.reshape(*batch, self.count * width)[..., :numel].contiguous())
        return found

    def gather_rows(self, rows: Tensor) -> Tensor:
        """All rows of what each process has some of."""
        return rows if self.group is None else torch.cat(self.gather_uneven(rows, self.sizes))

    def gather_uneven(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        """The rows of each process, which has so many."""
        if self.group is None:
            return [rows]
        width = rows.shape[1:].numel()
        parts = Processes((self.group,), self.count).gather(rows.reshape(-1), [n * width for n in counts])
        return [part.view(n, *rows.shape[1:]) for part, n in zip(parts, counts, strict=True)]

    # A matrix whose rows are shared out becomes one whose columns are, and back: each process sends to each
    # other no more than what that needs.

    def columns(self, rows: Tensor) -> Tensor:
        """Some columns of all rows ``[size, m]``, from some rows of all columns."""
        widths = _parts(rows.shape[1], self.count)
        sent = torch.cat([part.reshape(-1) for part in rows.split(widths, dim=1)])
        mine = widths[self.index]
        received = self._exchange(sent, [n * mine for n in self.sizes], [len(rows) * w for w in widths])
        return received.view(self.size, mine)

    def rows(self, columns: Tensor, width: int) -> Tensor:
        """The same the other way round, for so many columns in all."""
        widths, here = _parts(width, self.count), self.sizes[self.index]
        sent = columns.reshape(-1)  # rows of other processes are next to each other
        received = self._exchange(
            sent, [here * w for w in widths], [n * widths[self.index] for n in self.sizes]
        )
        pieces = received.split([here * w for w in widths])
        return torch.cat([piece.view(here, w) for piece, w in zip(pieces, widths, strict=True)], dim=1)

    def _exchange(self, sent: Tensor, sizes_in: list[int], sizes_out: list[int]) -> Tensor:
        if self.group is None:
            return sent
        received = sent.new_empty(sum(sizes_in))
        dist.all_to_all_single(received, sent.contiguous(), sizes_in, sizes_out, group=self.group)
        return received

    def summed(self, numbers: Sequence[Number], device: torch.device) -> list[Number]:
        """Sums over all parts, in one message."""
        if self.group is None or not numbers:
            return list(numbers)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        vector = torch.stack([torch.as_tensor(n, dtype=dtype, device=device).reshape(()) for n in numbers])
        dist.all_reduce(vector, group=self.group)
        return [number(total) for total in vector]


def agreed(flags: Tensor, p: Tensor) -> Tensor:
    """Flags that are up where they are up in all processes that share out a parameter such as this."""
    ones = flags.to(torch.uint8)
    for group in p.device_mesh.get_all_groups():  # type: ignore[attr-defined]
        dist.all_reduce(ones, op=dist.ReduceOp.MIN, group=group)
    return ones.bool()


def _parts(size: int, count: int) -> list[int]:
    """How torch shares out: parts of the same size, as long as there is anything left."""
    each = -(-size // count)
    return [max(0, min(each, size - index * each)) for index in range(count)]


def refusal(p: Tensor, name: str) -> str:
    """What is said of a layer's parameter that is shared out in a way that is not known."""
    return (
        f"{name or 'a parameter'} is shared out as {p.placements}, "  # type: ignore[attr-defined]
        "and not along one dimension of the mesh by rows, or by columns of a matrix, as layers with factors "
        "can be: leave it to AdamW by a group with 'precondition': False, or let every process have all of it"
    )


def shard_of(p: Tensor, name: str = "") -> Shard | None:
    """How a parameter is shared out, None if it is an ordinary one; an error if it is in a way not known."""
    if not is_distributed(p):
        return None
    places = p.placements  # type: ignore[attr-defined]
    axes = [axis for axis, place in enumerate(places) if not place.is_replicate()]
    dims = [places[axis].dim for axis in axes if type(places[axis]).__name__ == "Shard"]
    if len(axes) > 1 or len(dims) < len(axes) or (dims and dims[0] > 0 and p.ndim != 2):
        raise ValueError(refusal(p, name))
    dim = dims[0] if dims else 0
    return Shard(p.device_mesh, axes[0] if axes else None, p.shape[dim] if p.ndim else 1, dim)  # type: ignore[attr-defined]

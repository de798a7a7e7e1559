"""What processes tell each other of their statistics: each one's sums become those of all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.distributed import Processes
from ingot.model import Layer
from ingot.scalars import number
from ingot.statistics import Pending, Sums


class Exchange:
    """The statistics of some layers on their way: sent when they are complete, waited for when needed.

    All processes name the same layers; what one of them has not seen counts for nothing there. There is one
    message for each dtype. Where gradients are averaged over processes, each process's own are those of the
    whole loss times the number of these.
    """

    def __init__(
        self, layers: Iterable[tuple[Layer, torch.dtype]], processes: Processes, short: torch.dtype | None
    ) -> None:
        self.processes = processes
        self._shared = [_Shared(*one) for one in layers]
        flats: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for one in self._shared:
            for tensor in one.numbers:
                flats.setdefault((tensor.dtype, tensor.device), []).append(tensor)
            for tensor in one.entries:
                flats.setdefault((short or tensor.dtype, tensor.device), []).append(tensor)
        self._sent = []
        for (dtype, _), tensors in flats.items():
            flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
            self._sent.append((tensors, flat, processes.sum_(flat)))

    def end(self) -> None:
        """Put the sums of all processes in the place of one's own."""
        for tensors, flat, works in self._sent:
            for work in works:
                work.wait()
            for tensor, summed in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(summed.view(tensor.shape))
        self._sent = []

    def put_back(self, others: Iterable[Exchange]) -> None:
        """Give the layers what all processes saw, in this exchange and in others of the same layers."""
        exchanges = [self, *others]
        for exchange in exchanges:
            exchange.end()
        power = next((one.power for e in exchanges for one in e._shared if one.power is not None), None)
        for several in zip(*(exchange._shared for exchange in exchanges), strict=True):
            several[0].put_back(several[1:], self.processes.averaged, power)


class _Shared:
    """A layer's statistics as tensors that are the same for all processes but for their values."""

    def __init__(self, layer: Layer, dtype: torch.dtype) -> None:
        self.layer, pending = layer, layer.pending or Pending()
        self.power = pending.power
        device, lead = layer.weight.device, layer.shape[0]
        sides = sorted({tap.flipped for tap in layer.taps})
        shapes = [(*lead, s.numel) for s in layer.structures] + [(*lead, 1)] * 3
        like = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.sums = {side: _as_tensors(pending.sums.get(side), like) for side in sides}
        self.terms = torch.full((1,), float(pending.terms), dtype=dtype, device=device)

    @property
    def entries(self) -> list[Tensor]:
        return [tensor for sums in self.sums.values() for tensor in (sums.k, sums.c)]

    @property
    def numbers(self) -> list[Tensor]:
        found = [
            t for s in self.sums.values() for t in (s.square_k, s.square_c, s.rows) if isinstance(t, Tensor)
        ]
        return [self.terms, *found]

    def put_back(self, others: Iterable[_Shared], processes: int, power: int | None) -> None:
        sums, terms = self.sums, self.terms
        for other in others:
            sums = {side: sums[side].plus(other.sums[side]) for side in sums}
            terms = terms + other.terms
        seen = any(isinstance(s.rows, Tensor) and bool((s.rows > 0).any()) for s in sums.values())
        self.layer.pending = Pending() if seen else None
        sums = {side: of._replace(rows=number(of.rows)) for side, of in sums.items()}
        if self.layer.pending is not None:
            count = int(terms.item()) if terms.is_cpu else terms
            self.layer.pending.replace(sums, count, processes, power)


def _as_tensors(sums: Sums | None, zeros: list[Tensor]) -> Sums:
    if sums is None:
        return Sums(*(zero.clone() for zero in zeros))
    pairs = zip(sums, zeros, strict=True)
    return Sums(*(torch.as_tensor(v, dtype=z.dtype, device=z.device).expand_as(z).clone() for v, z in pairs))


# --- Work that is shared out ----------------------------------------------------------------------------

WORTH_TELLING = 500
"""What takes so many operations for each byte of its result is made by one process, which tells the rest.

A processor makes some hundred operations in the time in which a byte goes to another process. Updates of
dense factors of about 350 rows have as many, and natural gradients by dense factors that have about 1000
rows together; blocks never do.
"""


class Work(NamedTuple):
    """What something takes that one of several processes may do: operations, and the bytes to tell."""

    flops: int
    size: int
    wanted: bool | None  # whether to share it; None is up to the sizes

    @property
    def is_worth_telling(self) -> bool:
        """Whether it is to be made by one process alone."""
        return self.flops > WORTH_TELLING * self.size if self.wanted is None else self.wanted


def shared_work(works: list[Work], workers: int) -> list[int] | None:
    """Which of several processes does which work, about the same each; None if each is to do all."""
    flops, size = sum(work.flops for work in works), sum(work.size for work in works)
    if workers == 1 or not works or not Work(flops, size, works[0].wanted).is_worth_telling:
        return None
    owners, busy = [0] * len(works), [0] * workers
    for index in sorted(range(len(works)), key=lambda index: -works[index].flops):
        owners[index] = busy.index(min(busy))
        busy[owners[index]] += works[index].flops
    return owners


def told(
    values: list[list[Tensor]], owners: list[int], dtypes: list[torch.dtype], processes: Processes
) -> list[list[Tensor]]:
    """What the owner of each list of tensors has, in one message for each dtype.

    All processes give tensors of the same shapes. What they get are parts of the message.
    """
    found: list[list[Tensor]] = [[] for _ in values]
    for dtype in dict.fromkeys(dtypes):
        alike = [index for index, its in enumerate(dtypes) if its == dtype]
        sizes, mine = [0] * processes.workers, []
        for index in alike:
            sizes[owners[index]] += sum(value.numel() for value in values[index])
            if owners[index] == processes.worker:
                mine += [value.reshape(-1).to(dtype) for value in values[index]]
        flat = torch.cat(mine) if mine else values[alike[0]][0].new_empty(0, dtype=dtype)
        rest = processes.gather(flat, sizes)
        for index in alike:
            owner, shapes = owners[index], [value.shape for value in values[index]]
            *parts, rest[owner] = rest[owner].split(
                [*(shape.numel() for shape in shapes), len(rest[owner]) - sum(s.numel() for s in shapes)]
            )
            found[index] = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return found

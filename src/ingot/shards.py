"""Natural gradients of weights whose rows or columns are shared out over processes.

C Cᵀ ∇W K Kᵀ is the product of two sides. Where each process has some rows of ∇W, the side of the columns is
its own affair, and so is that of the rows where the structure does not mix rows of different processes, as
diagonals and most blocks do not; blocks across a border are the affair of both sides. Otherwise the rows are
exchanged for columns, multiplied, and exchanged back: each process sends twice what it has, and no product is
made twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ingot import rules
from ingot.distributed import Processes, Shard, refusal, shard_of
from ingot.family import Rule
from ingot.layers import LayerAdapter
from ingot.model import Layer
from ingot.natural import products_of
from ingot.rules import Pair, Product


class Segment(NamedTuple):
    """Some rows of some of a layer's matrices, the same of each; and where they are among all rows."""

    start: int
    stop: int
    matrices: slice
    rows: slice


@dataclass(frozen=True)
class Layout:
    """How a layer's matrix lies in several processes.

    Attributes:
        shard: How its weight is shared out.
        bias: How the bias is, which is the last column, if there is one: by outputs, or not at all.
        rule: Whose factors they are.
        structures: Of K and C.
        matrices: How many matrices there are, one behind the other, where there are several.
        transposed: Whether the weight is the matrix's transpose.
        by: ``"rows"`` or ``"columns"`` of the matrix, or ``"neither"`` where a part of the weight is no part
            of it that could be multiplied.
        processes: Those that learn from each other.
    """

    shard: Shard
    bias: Shard | None
    rule: Rule
    structures: Pair
    matrices: int | None
    transposed: bool
    by: str
    processes: Processes

    def own(self, tensors: list[Tensor], params: Iterable[Tensor]) -> list[Tensor]:
        """Of tensors like these parameters, those to count here: a bias that all have counts once."""
        is_whole = self.bias is not None and self.bias.axis is None and self.shard.index > 0
        return [t for t, p in zip(tensors, params, strict=True) if not is_whole or p.ndim > 1]

    @cached_property
    def mixed(self) -> list[tuple[int, int]]:
        """Of all rows, or columns, of all matrices: from where to where those of several processes mix."""
        structure = self.structures[self.by == "rows"]
        ends = {sum(self.shard.sizes[:n]) for n in range(1, self.shard.count)}
        if self.by == "columns" and self.bias is not None:
            ends.add(structure.dim - 1)  # which belongs to no process's columns
        found = []
        for end in sorted(ends):
            matrix, row = divmod(end, structure.dim)
            start, stop = (matrix * structure.dim + at for at in structure.mixed_at(row))
            if start < stop and (start, stop) not in found:
                found.append((start, stop))
        return found

    @cached_property
    def is_mixed(self) -> bool:
        """Whether so much mixes that all is exchanged."""
        return 2 * sum(stop - start for start, stop in self.mixed) > self.shard.size

    def natural_gradient(self, k: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """That of this process's part of weight and bias, from its part of the gradient and whole factors."""
        if self.by == "rows":
            return self._of_rows(k, c, weight, bias)
        return self._of_columns(k, c, weight, bias)

    # --- By rows: outputs, of linear layers and convolutions ----------------------------------------------

    def _of_rows(self, k: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        rows = weight.mT if self.transposed else weight.flatten(1)
        if bias is not None:
            rows = torch.cat((rows, bias.view(-1, 1)), dim=1)
        start, stop = self.shard.start, self.shard.stop
        by_k = torch.empty_like(rows)
        for segment in self._segments(start, stop):
            entries = k if self.matrices is None else k[segment.matrices]
            product = products_of(self.rule, self.structures, entries, entries)[0]
            here = slice(segment.start - start, segment.stop - start)
            by_k[here] = product.apply_right(self._several(rows[here].clone(), segment)).reshape(
                -1, rows.shape[1]
            )
        if self.is_mixed:
            natural = self.shard.rows(
                self._times_c(c, self.shard.columns(by_k), 0, self.shard.size), rows.shape[1]
            )
        else:
            natural = self._of_separate_rows(c, by_k)
        beside = [] if bias is None else [natural[:, -1].reshape(bias.shape)]
        matrix = natural if bias is None else natural[:, :-1]
        return [(matrix.mT if self.transposed else matrix).reshape(weight.shape), *beside]

    def _of_separate_rows(self, c: Tensor, rows: Tensor) -> Tensor:
        """C Cᵀ times this process's rows, with those of others that the first and last of them mix with."""
        natural, start, stop = torch.empty_like(rows), self.shard.start, self.shard.stop
        begin = start
        for first, last in (*self.mixed, (stop, stop)):  # what is between them is nobody else's affair
            end = min(max(first, begin), stop)
            if begin < end:
                natural[begin - start : end - start] = self._times_c(
                    c, rows[begin - start : end - start], begin, end
                )
            begin = max(begin, min(last, stop))
        for (first, last), together in zip(self.mixed, self._gather_mixed(rows), strict=True):
            here = slice(max(first, start), min(last, stop))
            if here.start < here.stop:
                product = self._times_c(c, together, first, last)
                natural[here.start - start : here.stop - start] = product[
                    here.start - first : here.stop - first
                ]
        return natural

    def _gather_mixed(self, rows: Tensor) -> list[Tensor]:
        """All rows that mix with those of other processes, in one message."""
        if not self.mixed:
            return []
        start, stop = self.shard.start, self.shard.stop
        mine = [rows[max(a, start) - start : max(min(b, stop), max(a, start)) - start] for a, b in self.mixed]
        ends = [sum(self.shard.sizes[: n + 1]) for n in range(self.shard.count)]
        counts = [
            [max(0, min(b, end) - max(a, end - size)) for a, b in self.mixed]
            for end, size in zip(ends, self.shard.sizes, strict=True)
        ]
        gathered = self.shard.gather_uneven(torch.cat(mine), [sum(of) for of in counts])
        pieces = [part.split(of) for part, of in zip(gathered, counts, strict=True)]
        return [torch.cat([of[index] for of in pieces]) for index in range(len(self.mixed))]

    def _segments(self, start: int, stop: int) -> Iterator[Segment]:
        """Rows, cut where one matrix ends and another begins, unless several are there as a whole."""
        d_o = self.structures[1].dim
        while start < stop:
            matrix, first = divmod(start, d_o)
            count = (stop - start) // d_o if not first and stop - start >= d_o else 1
            last = min(d_o, first + stop - start)
            end = start + (last - first) * count
            yield Segment(start, end, slice(matrix, matrix + count), slice(first, last))
            start = end

    def _several(self, rows: Tensor, segment: Segment) -> Tensor:
        """Rows as those of several matrices, where a layer has several."""
        if self.matrices is None:
            return rows
        return rows.unflatten(0, (segment.matrices.stop - segment.matrices.start, -1))

    def _times_c(self, c: Tensor, rows: Tensor, start: int, stop: int) -> Tensor:
        """C Cᵀ times all rows between two places, which mix with no others."""
        natural = torch.empty_like(rows)
        if not rows.numel():
            return natural
        for segment in self._segments(start, stop):
            section, place = self.structures[1].section(segment.rows.start, segment.rows.stop)
            entries = (c if self.matrices is None else c[segment.matrices])[..., place].contiguous()
            product = products_of(self.rule, (section, section), entries, entries)[1]
            here = slice(segment.start - start, segment.stop - start)
            several = self._several(rows[here], segment)
            natural[here] = product.apply(several, torch.empty_like(several)).reshape(-1, rows.shape[1])
        return natural

    # --- By columns: inputs -------------------------------------------------------------------------------

    def _of_columns(self, k: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        of_k, of_c = self.structures
        column = None if bias is None else self._all_of_bias(bias)
        by_c = products_of(self.rule, (of_k, of_c), k, c)[1]
        matrix = weight.mT if self.transposed else weight
        if matrix.numel():
            matrix = by_c.apply(matrix, torch.empty_like(matrix))
        if column is not None:
            column = by_c.apply(column, torch.empty_like(column))
        if not self.mixed:
            natural = self._times_section(k, matrix, self.shard.start, self.shard.stop)
            if column is not None:
                column = self._times_section(k, column, of_k.dim - 1, of_k.dim)
        else:
            natural, column = self._of_mixed_columns(
                products_of(self.rule, (of_k, of_c), k, c)[0], matrix, column
            )
        found = [(natural.mT if self.transposed else natural).reshape(weight.shape)]
        if bias is None or column is None or self.bias is None:
            return found
        return [*found, column[self.bias.start : self.bias.stop].reshape(bias.shape)]

    def _of_mixed_columns(
        self, by_k: Product, matrix: Tensor, column: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Some outputs of all inputs, and the bias of these beside them, times K Kᵀ; and back."""
        outputs = Shard(self.shard.mesh, self.shard.axis, self.structures[1].dim)
        turned = self.shard.columns(matrix.mT).mT
        if column is not None:
            turned = torch.cat((turned, column[outputs.start : outputs.stop]), dim=1)
        if turned.numel():
            turned = by_k.apply_right(turned.contiguous())
        if column is not None:
            turned, column = turned[:, :-1], outputs.gather_rows(turned[:, -1:].contiguous())
        return self.shard.rows(turned.mT, outputs.size).mT, column

    def _all_of_bias(self, bias: Tensor) -> Tensor:
        assert self.bias is not None
        return self.bias.gather_rows(bias.view(-1, 1))

    def _times_section(self, k: Tensor, matrix: Tensor, start: int, stop: int) -> Tensor:
        """A matrix of these columns times their part of K Kᵀ."""
        if not matrix.numel():
            return matrix
        section, place = self.structures[0].section(start, stop)
        entries = k[..., place].contiguous()
        return products_of(self.rule, (section, section), entries, entries)[0].apply_right(matrix)


def layout_of(layer: Layer, rule: Rule, averaged: bool) -> Layout | None:
    """How a layer lies in several processes, None if each has all of it.

    Gradients are ``averaged`` over processes that have samples of their own, and not where all see the same.
    """
    shard = shard_of(layer.weight, f"the weight of {layer.name!r}")
    if shard is None:
        return None
    bias = None if layer.bias is None else shard_of(layer.bias, f"the bias of {layer.name!r}")
    lead, transposed, by = layer.shape[0], layer.adapter.transposed, "neither"
    if type(layer.adapter).weight_matrix is LayerAdapter.weight_matrix:
        by = "rows" if (shard.dim == 0) != transposed else "columns"
    if by == "neither" and shard.dim:
        raise ValueError(refusal(layer.weight, f"the weight of {layer.name!r}"))
    if layer.bias is not None and bias is not None and by != "columns" and bias.axis != shard.axis:
        raise ValueError(refusal(layer.bias, f"the bias of {layer.name!r}"))
    processes = Processes(shard.groups, shard.mesh.size() if averaged else 1)
    several = lead[0] if lead else None
    return Layout(shard, bias, rule, layer.structures, several, transposed, by, processes)


def natural_gradient(layer: Layer, layout: Layout, k: Tensor, c: Tensor, local: list[Tensor]) -> list[Tensor]:
    """That of this process's part of a layer's weight and bias; all processes must call this."""
    weight, *bias = local
    if layout.by != "neither":
        return layout.natural_gradient(k, c, weight, bias[0] if bias else None)
    shard, of_bias = layout.shard, [layout.bias] if layout.bias is not None else []
    matrix = layer.adapter.weight_matrix(layer.module, shard.gather_rows(weight))
    columns = [s.gather_rows(b).view(*matrix.shape[:-1], 1) for s, b in zip(of_bias, bias, strict=True)]
    of_k, of_c = products_of(layout.rule, layout.structures, k, c)
    both = torch.cat((matrix, *columns), dim=-1)
    both = rules.natural_gradient(of_k, of_c, both)
    natural = layer.adapter.matrix_weight(layer.module, both[..., : matrix.shape[-1]], layer.weight)
    found = [natural[shard.start : shard.stop]]
    return found + [
        both[..., -1].reshape(-1)[s.start : s.stop].view(b.shape) for s, b in zip(of_bias, bias, strict=True)
    ]

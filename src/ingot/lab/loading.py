"""Batches in an order that the seed alone determines, divided among processes, from any step on."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from ingot.lab.task import Batch


def _length(data: Dataset[Any]) -> int:
    assert isinstance(data, Sized)
    return len(data)


class Shuffled(Sampler[list[int]]):
    """This process's share of each batch of an epoch. What is left after the last full batch is dropped.

    Whatever the number of processes, a batch has the same examples.
    """

    def __init__(self, examples: int, batch_size: int, seed: int, rank: int, world: int) -> None:
        batch_size = min(batch_size, max(1, examples))
        if batch_size % world and examples > 1:
            raise ValueError(
                f"batches of {batch_size} cannot be shared by {world} processes: choose a multiple of {world}"
            )
        self.examples, self.batch_size, self.seed, self.rank, self.world = (
            examples,
            batch_size,
            seed,
            rank,
            world,
        )
        self.epoch, self.first = 0, 0  # where to begin

    def __len__(self) -> int:
        return self.examples // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        order = torch.randperm(self.examples, generator=generator)
        for number in range(self.first, len(self)):
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            # A single example, such as a graph, is everybody's.
            yield (batch[self.rank :: self.world] if len(batch) > 1 else batch).tolist()


class Shares(Sampler[list[int]]):
    """Every so manyth batch of a test set; all processes have as many, the last of which may not count."""

    def __init__(self, examples: int, batch_size: int, rank: int, world: int) -> None:
        self.batches = torch.arange(examples).split(batch_size)
        self.rank, self.world = rank, world

    def __len__(self) -> int:
        return -(-len(self.batches) // self.world)

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            mine = number * self.world + self.rank
            yield self.batches[min(mine, len(self.batches) - 1)].tolist()

    def counts(self, number: int) -> bool:
        """Whether the batch of this number is counted by no other process."""
        return number * self.world + self.rank < len(self.batches)


def loader(data: Dataset[Any], sampler: Sampler[list[int]], workers: int) -> DataLoader[Batch]:
    """What loads a dataset's batches; datasets that give whole batches are asked for these."""
    whole = getattr(data, "gives_batches", False)
    return DataLoader(
        data,
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=_as_it_is if whole else default_collate,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # or else each epoch would take a number from the model's own
    )


def training_batches(
    data: Dataset[Any], batch_size: int, seed: int, rank: int, world: int, workers: int
) -> tuple[DataLoader[Batch], Shuffled]:
    """The loader of training batches, and what says where it begins."""
    sampler = Shuffled(_length(data), batch_size, seed, rank, world)
    return loader(data, sampler, workers), sampler


def test_batches(
    data: Dataset[Any], batch_size: int, rank: int, world: int, workers: int
) -> tuple[DataLoader[Batch], Shares]:
    """The loader of this process's test batches, and what says which of them count."""
    sampler = Shares(_length(data), batch_size, rank, world)
    return loader(data, sampler, workers), sampler


def _as_it_is(batch: Batch) -> Batch:
    return batch

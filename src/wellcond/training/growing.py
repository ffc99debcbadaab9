"""Batches that grow during training, over a Trainer whose batches all have one size.

The loader gives one batch for each optimizer step, of whatever size; `wellcond.training.engine` takes it through the
model in micro-batches. The training is one epoch for the Trainer, so that a resume skips whole batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from wellcond.training.repeatable import seeded


class GrowingBatches(Sampler[list[int]]):
    """Pass after pass over the samples in random order, cut into batches of given sizes; one process's share of each.

    A sample of pass p has the number index + p·count, as in `wellcond.training.repeatable.RepeatedOrder`.

    Args:
        count: samples.
        sizes: of the batches of all processes together; multiples of ``processes``.
        seed: of the order.
        process, processes: which share of each batch.

    >>> [len(batch) for batch in GrowingBatches(5, [2, 4, 6], seed=0)]
    [2, 4, 6]
    """

    def __init__(
        self, count: int, sizes: Sequence[int], seed: int, *, process: int = 0, processes: int = 1
    ) -> None:
        if count < 1:
            raise ValueError("there is no sample to make batches of")
        self.count = count
        self.sizes = sizes
        self.seed = seed
        self.process = process
        self.processes = processes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        numbers = self._numbers()
        for size in self.sizes:
            batch = [next(numbers) for _ in range(size)]
            yield batch[self.process :: self.processes]

    def _numbers(self) -> Iterator[int]:
        turn = 0
        while True:
            with seeded(self.seed, turn):
                order = torch.randperm(self.count)
            yield from (order + turn * self.count).tolist()
            turn += 1

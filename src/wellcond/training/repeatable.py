"""Random augmentation that does not depend on what ran before: of seed, epoch and index alone."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from wellcond.data import StreamedImages


class Repeatable(Dataset[Any]):
    """A data set whose random transforms draw the same numbers for the same seed, epoch and index.

    The loader reads a batch ahead, in as many worker processes as it likes. With numbers from the running random
    state, a run that goes on from a checkpoint would augment the batch after it differently.

    Args:
        images: any data set with a length; its transforms may use ``torch``, ``numpy.random`` and ``random``.
        seed: of the run.
        draws: False for items without random numbers, which saves a third of a millisecond for each.
    """

    def __init__(self, images: Dataset[Any], seed: int, *, draws: bool = True) -> None:
        self.images = images
        self.seed = seed
        self.draws = draws
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        # `RepeatedOrder` counts on beyond the end: the same image, other random numbers.
        which = index % len(self)
        if not self.draws:
            return self.images[which]
        with seeded(self.seed, self.epoch, index):
            return self.images[which]


class RepeatableStream(IterableDataset[Any]):
    """A stream whose random transforms draw the same numbers for the same seed, epoch, worker and place in the stream.

    It goes on from its beginning when it is at its end, so that every batch is full whatever the number of worker
    processes and of skipped images; an epoch ends after the number of batches that its length gives.

    Args:
        images: the stream.
        seed: of the run.
        repeats: how often each image comes in a row, transformed anew.
    """

    def __init__(self, images: StreamedImages, seed: int, *, repeats: int = 1) -> None:
        self.images = images
        self.seed = seed
        self.repeats = repeats
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        place = 0
        while True:
            start = place
            for row in self.images.rows(self.epoch):
                for _ in range(self.repeats):
                    with seeded(self.seed, self.epoch, 0 if worker is None else worker.id, place):
                        item = self.images.item(row)
                    if item is None:
                        break
                    place += 1
                    yield item
            if place == start:
                return  # a worker without a share, or nothing that can be read


class RepeatedOrder(Sampler[int]):
    """Random order of an epoch in which every image comes ``repeats`` times in a row, each augmented anew.

    An epoch keeps its length, so that it shows a part of the images. Source: `RASampler` of
    https://github.com/facebookresearch/deit (samplers.py), there with three repeats.

    >>> order = list(RepeatedOrder(Repeatable(range(6), seed=0), repeats=3))
    >>> len(order), [len({index % 6 for index in order[i : i + 3]}) for i in (0, 3)], len(set(order))
    (6, [1, 1], 6)
    """

    def __init__(self, images: Repeatable, repeats: int) -> None:
        self.images = images
        self.repeats = repeats

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[int]:
        count = len(self)
        with seeded(self.images.seed, self.images.epoch):
            order = torch.randperm(count)[: -(-count // self.repeats)].tolist()
        # Numbers beyond the end mean the same image, see `Repeatable`.
        repeated = (index + copy * count for index in order for copy in range(self.repeats))
        return itertools.islice(repeated, count)


def first_items(images: Dataset[Any], count: int) -> list[Any]:
    """The first items of a data set or of a stream.

    >>> first_items([7, 8, 9], 2)
    [7, 8]
    """
    if isinstance(images, IterableDataset):
        return list(itertools.islice(images, count))
    return [images[i] for i in range(min(count, len(images)))]  # type: ignore[arg-type]


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed the three random states from these numbers; afterwards they are what they were.

    >>> with seeded(0, 1, 2):
    ...     first = torch.rand(1), np.random.rand(), random.random()
    >>> with seeded(0, 1, 2):
    ...     (torch.rand(1), np.random.rand(), random.random()) == first
    True
    """
    words = np.random.SeedSequence([number % 2**63 for number in numbers]).generate_state(3)
    states = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(int(words[0]))
            np.random.seed(int(words[1]))  # noqa: NPY002, transforms of others use it
            random.seed(int(words[2]))
            yield
        finally:
            np.random.set_state(states[0])  # noqa: NPY002
            random.setstate(states[1])


class Epochs(TrainerCallback):
    """Tells the data set its epoch before the loader starts, also in the middle of one after a resume."""

    def __init__(self, images: Repeatable | RepeatableStream, steps_per_epoch: int) -> None:
        self.images = images
        self.steps_per_epoch = steps_per_epoch

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.images.epoch = state.global_step // self.steps_per_epoch

"""Random augmentation that does not depend on what ran before: of seed, epoch and index alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


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
        if not self.draws:
            return self.images[index]
        with seeded(self.seed, self.epoch, index):
            return self.images[index]


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

    def __init__(self, images: Repeatable, steps_per_epoch: int) -> None:
        self.images = images
        self.steps_per_epoch = steps_per_epoch

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.images.epoch = state.global_step // self.steps_per_epoch

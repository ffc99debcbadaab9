"""The interface between the training loop and the kinds of things that are trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

Scored = Mapping[str, Tensor] | list[Any]
"""What is known of every sample of a batch: tensors whose first axis is the samples, or an object for each."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """The score that arms are compared by.

    Attributes:
        name: its key among the scores.
        higher_is_better: or lower.
        unit: "%" or "" or the like.
    """

    name: str
    higher_is_better: bool = True
    unit: str = ""


class Scorer(Protocol):
    """Sums up over the test set."""

    def update(self, scored: Scored) -> None:
        """Take in one batch."""

    def compute(self) -> dict[str, float]:
        """The scores of all that was taken in."""


class Task(Protocol):
    """A frozen dataclass; its fields are part of what makes two runs comparable, and go into ``run.json``."""

    @property
    def metric(self) -> Metric:
        """The score that arms are compared by."""

    @property
    def batch_multiple(self) -> int:
        """Batches of every process are a multiple of it."""

    def collate(self, items: list[Any]) -> dict[str, Any]:
        """A batch out of items of the data set."""

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A training batch with its random changes.

        torch's, numpy's and Python's random states are seeded from seed, step and process: a resume repeats them.
        """

    def inputs(self, batch: Mapping[str, Any], *, training: bool) -> Any:
        """What `wellcond.running.call_model` calls the model with."""

    def loss(self, outputs: Any, batch: Mapping[str, Any], *, training: bool) -> Tensor:
        """Mean over the batch, with what the training adds (smoothing) if ``training``."""

    def scored(self, outputs: Any, batch: Mapping[str, Any]) -> Scored:
        """What the scorer needs of each sample, from outputs in eval mode."""

    def scorer(self) -> Scorer:
        """A fresh one for each evaluation."""

    def final_scores(self, model: nn.Module, test: Dataset[Any]) -> dict[str, float]:
        """Further scores, once, of the trained model in eval mode; ``{}`` if there are none."""


@runtime_checkable
class Illustrated(Protocol):
    """A task whose results can be looked at; the report draws them."""

    def examples(self, model: nn.Module, test: Dataset[Any]) -> list[dict[str, Any]]:
        """What the trained model, in eval mode, makes of the first test samples, as JSON can hold it."""


class Means:
    """The mean over samples of each named value.

    Args:
        scale: factors by name, such as 100 for per cent; others are 1.

    >>> means = Means(accuracy=100.0)
    >>> means.update({"accuracy": torch.tensor([1.0, 0.0]), "loss": torch.tensor([0.5, 1.5])})
    >>> means.update({"accuracy": torch.tensor([1.0, 1.0]), "loss": torch.tensor([2.0, 2.0])})
    >>> means.compute()
    {'accuracy': 75.0, 'loss': 1.5}
    """

    def __init__(self, **scale: float) -> None:
        self.scale = scale
        self.sums: dict[str, float] = {}
        self.count = 0

    def update(self, scored: Scored) -> None:
        if not isinstance(scored, Mapping):
            raise TypeError(f"means are of named tensors, got {type(scored).__name__}")
        for name, values in scored.items():
            self.sums[name] = self.sums.get(name, 0.0) + values.to(torch.float64).sum().item()
        self.count += len(next(iter(scored.values())))

    def compute(self) -> dict[str, float]:
        """Raises ValueError if there was no sample."""
        if self.count == 0:
            raise ValueError("there was no sample to score: the test set is empty")
        return {name: self.scale.get(name, 1.0) * total / self.count for name, total in self.sums.items()}

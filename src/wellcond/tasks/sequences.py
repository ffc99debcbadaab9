"""Classification of sequences of token ids, one or two a sample, padded to one length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from wellcond.tasks.task import Means, Metric

INPUTS = ("input_ids", "attention_mask", "other_ids", "other_mask")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceClassification:
    """Samples ``{"input_ids": (n,), "labels": ()}``, those of pairs with ``"other_ids": (m,)`` too.

    The model is called with ``input_ids`` and ``attention_mask`` ``(B, N)``, for pairs with ``other_ids`` and
    ``other_mask`` too; it returns logits ``(B, classes)``.

    Attributes:
        length: N, to which every sequence is padded, so that no sample's result depends on the others in its batch.
        padding: the id of padding.

    >>> task = SequenceClassification(length=3)
    >>> batch = task.collate([{"input_ids": torch.tensor([5, 6]), "labels": torch.tensor(1)}])
    >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist(), batch["labels"].tolist()
    ([[5, 6, 0]], [[1, 1, 0]], [1])
    """

    length: int
    padding: int = 0

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", unit="%")

    @property
    def batch_multiple(self) -> int:
        return 1

    def collate(self, items: list[Any]) -> dict[str, Any]:
        """Raises ValueError for a sequence longer than `length`, or a batch of single sequences and pairs."""
        batch: dict[str, Any] = {"labels": torch.stack([item["labels"] for item in items])}
        for ids, mask in (("input_ids", "attention_mask"), ("other_ids", "other_mask")):
            sequences = [item[ids] for item in items if ids in item]
            if sequences:
                if len(sequences) < len(items):
                    raise ValueError(
                        f"{len(sequences)} of {len(items)} samples have {ids}: all must, or none"
                    )
                batch[ids], batch[mask] = self.padded(sequences)
        return batch

    def padded(self, sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Ids and mask ``(B, length)``, 1 = real."""
        ids = torch.full((len(sequences), self.length), self.padding)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            n = len(sequence)
            if n > self.length:
                raise ValueError(
                    f"a sequence has {n} tokens, and the model takes {self.length}: cut it where it is read, where "
                    f"that is counted, or take a longer model"
                )
            ids[row, :n] = sequence
            mask[row, :n] = 1
        return ids, mask

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def inputs(self, batch: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
        return {name: batch[name] for name in INPUTS if name in batch}

    def loss(self, outputs: Any, batch: Mapping[str, Any], *, training: bool) -> Tensor:
        return cross_entropy(outputs, batch["labels"])

    def scored(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {
            "accuracy": (outputs.argmax(-1) == batch["labels"]).float(),
            "loss": cross_entropy(outputs.float(), batch["labels"], reduction="none"),
        }

    def scorer(self) -> Means:
        return Means(accuracy=100.0)

    def final_scores(self, model: nn.Module, test: Dataset[Any]) -> dict[str, float]:
        return {}

"""Masked language modelling: some tokens are hidden, the model says what they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, default_collate

from wellcond.data.masking import NOT_PREDICTED, Masking
from wellcond.tasks.task import Metric, Scored


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLanguageModel:
    """Batches ``{"input_ids": (B, N)}``, and ``"labels": (B, N)`` where masks are fixed, as those of a test set are.

    A batch without labels gets its masks when it is trained on. The model returns an output with ``logits``, of all
    positions ``(B, N, vocabulary)`` or of those with a label alone ``(M, vocabulary)``, sequence by sequence.

    Scores: ``loss``, the mean cross-entropy of all predictions in nats, and ``accuracy`` in %. A tenth of the
    predictions is of tokens that are visible (the 80/10/10 rule), so the loss lies below that of hidden tokens alone.
    It is comparable within one vocabulary only.

    Attributes:
        masking: the rule.
    """

    masking: Masking

    @property
    def metric(self) -> Metric:
        return Metric("loss", higher_is_better=False, unit="nats")

    @property
    def batch_multiple(self) -> int:
        return 1

    def collate(self, items: list[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = default_collate(items)
        return batch

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        if "labels" in batch:
            return batch
        device = batch["input_ids"].device
        # Random numbers are those of the CPU: the same masks on every device.
        inputs, labels = self.masking.apply(batch["input_ids"].cpu())
        return batch | {"input_ids": inputs.to(device), "labels": labels.to(device)}

    def inputs(self, batch: Mapping[str, Any], *, training: bool) -> Any:
        """Labels go along: a model with sparse prediction looks at them to see which positions to decode."""
        return {
            name: batch[name]
            for name in ("input_ids", "attention_mask", "labels")
            if batch.get(name) is not None
        }

    def loss(self, outputs: Any, batch: Mapping[str, Any], *, training: bool) -> Tensor:
        logits, targets, _ = _predictions(outputs, batch["labels"])
        return cross_entropy(logits.float(), targets)

    def scored(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        logits, targets, sequence = _predictions(outputs, batch["labels"])
        nats = cross_entropy(logits.float(), targets, reduction="none")
        right = (logits.argmax(-1) == targets).to(nats.dtype)
        empty = nats.new_zeros(len(batch["labels"]))
        return {
            "nats": empty.index_add(0, sequence, nats),
            "right": empty.index_add(0, sequence, right),
            "predictions": empty.index_add(0, sequence, torch.ones_like(nats)),
        }

    def scorer(self) -> PerPrediction:
        return PerPrediction()

    def final_scores(self, model: nn.Module, test: Dataset[Any]) -> dict[str, float]:
        return {}


class PerPrediction:
    """Sums over sequences, divided by the number of predictions: each counts the same, however many a sequence has.

    >>> scorer = PerPrediction()
    >>> scorer.update({"nats": torch.tensor([6.0, 1.0]), "right": torch.tensor([1.0, 1.0]),
    ...                "predictions": torch.tensor([3.0, 1.0])})
    >>> scorer.compute()
    {'loss': 1.75, 'accuracy': 50.0}
    """

    def __init__(self) -> None:
        self.nats = self.right = self.predictions = 0.0

    def update(self, scored: Scored) -> None:
        if not isinstance(scored, Mapping):
            raise TypeError(f"expected sums for each sequence, got {type(scored).__name__}")
        self.nats += scored["nats"].double().sum().item()
        self.right += scored["right"].double().sum().item()
        self.predictions += scored["predictions"].double().sum().item()

    def compute(self) -> dict[str, float]:
        """Raises ValueError if there was no prediction."""
        if self.predictions == 0:
            raise ValueError("there was no prediction to score: the test set is empty or has no masks")
        return {"loss": self.nats / self.predictions, "accuracy": 100.0 * self.right / self.predictions}


def _predictions(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``(M, vocabulary)``, targets ``(M,)`` and the sequence of each ``(M,)``, dense or sparse alike."""
    chosen = labels != NOT_PREDICTED
    logits: Tensor = outputs.logits
    if logits.ndim == 3:
        logits = logits[chosen]
    targets = labels[chosen]
    if len(logits) != len(targets):
        raise ValueError(
            f"{len(targets)} positions have a label, but the model returned logits of shape {tuple(logits.shape)}: "
            f"it must decode all positions or those with a label"
        )
    return logits, targets, chosen.nonzero()[:, 0]

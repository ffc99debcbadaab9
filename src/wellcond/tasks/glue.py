"""Classification and regression of sentences and pairs, with the metrics of GLUE."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from wellcond.tasks.task import Metric, Scored


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """The share of right classes.

    >>> accuracy(torch.tensor([1, 1, 1, 1]), torch.tensor([1, 1, 0, 1]))
    0.75
    """
    return float((predictions == labels).double().mean())


def f1(predictions: Tensor, labels: Tensor) -> float:
    """The harmonic mean of precision and recall of class 1; 0 where it is neither predicted nor there.

    >>> f1(torch.tensor([1, 1, 0]), torch.tensor([1, 0, 1]))
    0.5
    """
    from torchmetrics.functional.classification import binary_f1_score

    return float(binary_f1_score(predictions.long(), labels.long()))


def matthews(predictions: Tensor, labels: Tensor) -> float:
    """The correlation coefficient of Matthews of two classes; 0 where one class alone is predicted, or there.

    >>> matthews(torch.tensor([1, 1, 1, 1]), torch.tensor([1, 1, 0, 1]))
    0.0
    """
    if any(int(of.min()) == int(of.max()) for of in (predictions, labels)):
        return 0.0
    from torchmetrics.functional.classification import binary_matthews_corrcoef

    return float(binary_matthews_corrcoef(predictions.long(), labels.long()))


def pearson(predictions: Tensor, labels: Tensor) -> float:
    """Pearson's correlation; 0 where predictions or labels are all the same.

    >>> round(pearson(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0])), 6)
    1.0
    """
    from scipy.stats import pearsonr

    return _correlation(pearsonr, predictions, labels)


def spearman(predictions: Tensor, labels: Tensor) -> float:
    """Spearman's rank correlation; 0 where predictions or labels are all the same.

    >>> round(spearman(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([2.0, 4.0, 5.0])), 6)
    1.0
    """
    from scipy.stats import spearmanr

    return _correlation(spearmanr, predictions, labels)


def _correlation(of: Callable[..., Any], predictions: Tensor, labels: Tensor) -> float:
    x, y = predictions.double().numpy(), labels.double().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant input, for which there is a value here
        value = float(of(x, y).statistic)
    return 0.0 if math.isnan(value) else value


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    metric.__name__: metric for metric in (accuracy, f1, matthews, pearson, spearman)
}
"""Of predictions ``(n,)`` and labels ``(n,)``; all are reported times 100."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceTask:
    """Batches of `wellcond.data.sentences.Sentences`, padded on the right to the longest of them.

    The model takes ids and a mask, and returns an output with ``logits`` ``(B, classes)``; ``(B, 1)`` for a regression,
    which is trained on the squared error.

    Scores: each metric, times 100, of each part of the validation set (``accuracy``, or ``accuracy_matched`` and
    ``accuracy_mismatched``), and ``loss`` over all of it.

    Attributes:
        classes: how many; 1 means a regression.
        metrics: names in `METRICS`; the first one of the first part compares arms.
        parts: names of the parts; one without a name: the validation set is one.
        pad: the id of the padding token.

    Raises:
        ValueError: a metric is not known, there is none, or one class alone.
    """

    classes: int = 2
    metrics: tuple[str, ...] = ("accuracy",)
    parts: tuple[str, ...] = ("",)
    pad: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.metrics if name not in METRICS]
        if unknown or not self.metrics:
            raise ValueError(f"unknown metrics {unknown}; choose among {', '.join(METRICS)}")
        if self.classes < 1:
            raise ValueError(f"classes counts from 1, a regression, got {self.classes}")

    @property
    def regression(self) -> bool:
        """Whether labels are numbers."""
        return self.classes == 1

    @property
    def metric(self) -> Metric:
        return Metric(
            _named(self.metrics[0], self.parts[0]), unit="%" if self.metrics[0] == "accuracy" else ""
        )

    @property
    def batch_multiple(self) -> int:
        return 1

    def collate(self, items: list[Any]) -> dict[str, Any]:
        ids = [item["input_ids"] for item in items]
        batch: dict[str, Any] = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        }
        if "token_type_ids" in items[0]:
            batch["token_type_ids"] = pad_sequence(
                [item["token_type_ids"] for item in items], batch_first=True
            )
        return batch | {name: torch.stack([item[name] for item in items]) for name in ("labels", "part")}

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def inputs(self, batch: Mapping[str, Any], *, training: bool) -> Any:
        return {
            name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch
        }

    def loss(self, outputs: Any, batch: Mapping[str, Any], *, training: bool) -> Tensor:
        return self._losses(outputs, batch["labels"]).mean()

    def scored(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        logits = self._logits(outputs).float()
        return {
            "prediction": logits[:, 0] if self.regression else logits.argmax(-1),
            "label": batch["labels"],
            "part": batch["part"],
            "loss": self._losses(outputs, batch["labels"]),
        }

    def scorer(self) -> SentenceScorer:
        return SentenceScorer(self.metrics, self.parts)

    def final_scores(self, model: nn.Module, test: Dataset[Any]) -> dict[str, float]:
        return {}

    def _losses(self, outputs: Any, labels: Tensor) -> Tensor:
        """``(B,)``."""
        logits = self._logits(outputs).float()
        if self.regression:
            return mse_loss(logits[:, 0], labels.float(), reduction="none")
        return cross_entropy(logits, labels, reduction="none")

    def _logits(self, outputs: Any) -> Tensor:
        logits: Tensor = outputs.logits
        if logits.ndim != 2 or logits.shape[1] != self.classes:
            raise ValueError(
                f"the model returned logits of shape {tuple(logits.shape)} for {self.classes} classes: build it with "
                f"num_labels={self.classes}"
            )
        return logits


class SentenceScorer:
    """Keeps predictions and labels, and computes each metric of each part from all of them.

    >>> scorer = SentenceScorer(("matthews", "accuracy"), ("",))
    >>> part = {"label": torch.tensor([1, 1, 0, 1]), "part": torch.zeros(4), "loss": torch.ones(4)}
    >>> scorer.update(part | {"prediction": torch.tensor([1, 1, 1, 1])})
    >>> scorer.compute()
    {'matthews': 0.0, 'accuracy': 75.0, 'loss': 1.0}
    """

    def __init__(self, metrics: tuple[str, ...], parts: tuple[str, ...]) -> None:
        self.metrics = metrics
        self.parts = parts
        self.kept: list[dict[str, Tensor]] = []

    def update(self, scored: Scored) -> None:
        if not isinstance(scored, Mapping):
            raise TypeError(f"expected predictions and labels, got {type(scored).__name__}")
        self.kept.append({name: values.detach().cpu() for name, values in scored.items()})

    def compute(self) -> dict[str, float]:
        """Raises ValueError if a part has no sample, or a prediction is not finite."""
        if not self.kept:
            raise ValueError("there was no sample to score: the validation set is empty")
        of = {name: torch.cat([some[name] for some in self.kept]) for name in self.kept[0]}
        if not of["prediction"].isfinite().all():
            raise ValueError(f"{int((~of['prediction'].isfinite()).sum())} predictions are not finite")
        scores = {}
        for number, part in enumerate(self.parts):
            inside = of["part"] == number
            if not inside.any():
                raise ValueError(f"no sample of part {part or number} was scored")
            for name in self.metrics:
                value = METRICS[name](of["prediction"][inside], of["label"][inside])
                scores[_named(name, part)] = 100.0 * value
        return scores | {"loss": float(of["loss"].double().mean())}


def _named(metric: str, part: str) -> str:
    return f"{metric}_{part}" if part else metric

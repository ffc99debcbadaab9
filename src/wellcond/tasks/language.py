"""Causal language modelling: loss in nats, bits per byte, and scores from prefixes alone for what may leak."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, default_collate

from wellcond.data.tokens import IGNORED
from wellcond.leak import logits_of
from wellcond.running import call_model
from wellcond.tasks.task import Metric, Scored


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLanguageModel:
    """Batches of `wellcond.data.tokens.Blocks`; the model takes ids and returns logits for each.

    Scores: ``loss`` in nats a token, over all validation tokens; ``bits_per_byte``, the same information over the bytes
    of the text, which does not depend on the tokens it was cut into. A loss is comparable within one vocabulary only.

    A model that is conditioned with ``allow_leak=True`` sees later tokens when a block goes through it whole, so its
    ``loss`` is not that of a causal model. `final_scores` therefore also scores every model prefix-only.

    Attributes:
        prefix_blocks: validation blocks that are scored prefix-only, spread evenly over all; 0: none.
        prefix_positions: positions of each that are scored so, from its first to its last, spread evenly.
        prefix_batch: blocks that go through the model at once for it.
    """

    prefix_blocks: int = 32
    prefix_positions: int = 32
    prefix_batch: int = 8

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
        return batch

    def inputs(self, batch: Mapping[str, Any], *, training: bool) -> Any:
        return {"input_ids": batch["input_ids"], "use_cache": False}

    def loss(self, outputs: Any, batch: Mapping[str, Any], *, training: bool) -> Tensor:
        logits, labels = logits_of(outputs, batch["input_ids"]), batch["labels"]
        return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)

    def scored(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        logits, labels = logits_of(outputs, batch["input_ids"]), batch["labels"]
        nats = cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return {
            "nats": nats.view_as(labels).sum(-1),
            "tokens": (labels != IGNORED).sum(-1),
            "bytes": batch["bytes"],
        }

    def scorer(self) -> LanguageScorer:
        return LanguageScorer()

    def final_scores(self, model: nn.Module, test: Dataset[Any]) -> dict[str, float]:
        """``whole_loss``, ``prefix_loss`` and their difference ``prefix_gap``, in nats, on one sample of positions.

        ``whole_loss`` takes the prediction at a position from the block as a whole, as ``loss`` does; ``prefix_loss``
        from a forward of the block up to that position, where nothing later can help. A causal model has a gap of 0
        up to rounding; a positive gap is information from the future.
        """
        count = min(self.prefix_blocks, len(test))  # type: ignore[arg-type]
        if count == 0:
            return {}
        chosen = torch.linspace(0, len(test) - 1, count).long().tolist()  # type: ignore[arg-type]
        device = next(model.parameters()).device
        whole, prefix, tokens = 0.0, 0.0, 0
        for start in range(0, count, self.prefix_batch):
            batch = self.collate([test[i] for i in chosen[start : start + self.prefix_batch]])
            ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
            positions = spread(ids.shape[1], self.prefix_positions)
            targets = labels[:, positions]
            seen = self.predict(model, ids)[:, positions]
            alone = torch.stack([self.predict(model, ids[:, : p + 1])[:, -1] for p in positions], 1)
            whole += _nats(seen, targets)
            prefix += _nats(alone, targets)
            tokens += int((targets != IGNORED).sum())
        return {
            "whole_loss": whole / tokens,
            "prefix_loss": prefix / tokens,
            "prefix_gap": (prefix - whole) / tokens,
        }

    def predict(self, model: nn.Module, ids: Tensor) -> Tensor:
        """Logits ``(B, N, vocabulary)`` of ids ``(B, N)``."""
        return logits_of(call_model(model, self.inputs({"input_ids": ids}, training=False)), ids)


class LanguageScorer:
    """Sums of nats, tokens and bytes, so that every token counts alike whatever block it is in.

    >>> scorer = LanguageScorer()
    >>> scorer.update({"nats": torch.tensor([3.0, 1.0]), "tokens": torch.tensor([3, 1]), "bytes": torch.tensor([6, 2])})
    >>> scores = scorer.compute()
    >>> scores["loss"], round(scores["bits_per_byte"], 4)
    (1.0, 0.7213)
    """

    def __init__(self) -> None:
        self.nats, self.tokens, self.bytes = 0.0, 0, 0

    def update(self, scored: Scored) -> None:
        assert isinstance(scored, Mapping)
        self.nats += scored["nats"].double().sum().item()
        self.tokens += int(scored["tokens"].sum())
        self.bytes += int(scored["bytes"].sum())

    def compute(self) -> dict[str, float]:
        """``loss`` and ``bits_per_byte``. Raises ValueError if there was no token, or none that stands for text."""
        if self.tokens == 0 or self.bytes == 0:
            raise ValueError(
                f"{self.tokens} tokens of {self.bytes} bytes cannot be scored: the test set is empty"
            )
        return {"loss": self.nats / self.tokens, "bits_per_byte": self.nats / self.bytes / math.log(2)}


def spread(length: int, count: int) -> list[int]:
    """``count`` positions of ``length``, evenly from the first to the last; all if there are fewer.

    >>> spread(10, 4), spread(2, 4)
    ([0, 3, 6, 9], [0, 1])
    """
    return torch.linspace(0, length - 1, min(count, length)).long().tolist()


def _nats(logits: Tensor, targets: Tensor) -> float:
    flat = logits.flatten(0, 1).float()
    return cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum").item()

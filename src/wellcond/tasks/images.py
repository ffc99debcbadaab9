"""Image classification: pixels in, logits out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, default_collate

from wellcond.tasks.task import Means, Metric


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixing:
    """Mixup and CutMix of a batch, by `timm.data.Mixup`.

    Attributes:
        mixup, cutmix: the parameters of their Beta distributions; 0: off.
        probability: of mixing a batch at all.
        switch: of CutMix rather than mixup, where both are on.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5

    def mix(self, pixels: Tensor, labels: Tensor, *, classes: int, smoothing: float) -> tuple[Tensor, Tensor]:
        """Mixed images and smoothed targets ``(B, classes)``; random numbers come from ``numpy.random``.

        Raises ValueError for an odd batch: images are mixed in pairs.

        >>> import torch
        >>> images, targets = Mixing(mixup=0.8).mix(
        ...     torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]), classes=3, smoothing=0.1)
        >>> images.shape, targets.sum(1).allclose(torch.ones(4))
        (torch.Size([4, 3, 8, 8]), True)
        """
        from timm.data.mixup import Mixup

        if len(pixels) % 2:
            raise ValueError(f"images are mixed in pairs, and a batch has {len(pixels)}; make it even")
        mixup: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = Mixup(  # type: ignore[no-untyped-call]
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            prob=self.probability,
            switch_prob=self.switch,
            mode="batch",
            label_smoothing=smoothing,
            num_classes=classes,
        )
        # timm mixes in place; the caller's images stay as they are.
        return mixup(pixels.clone(), labels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageClassification:
    """Batches ``{"pixel_values": (B, C, H, W), "labels": (B,)}``; the model takes pixels and returns logits.

    Attributes:
        classes: outputs of the model.
        label_smoothing: of the training loss; it is in the targets where images are mixed.
        mixing: mixup and CutMix; None: off.
    """

    classes: int = 10
    label_smoothing: float = 0.0
    mixing: Mixing | None = None

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", unit="%")

    @property
    def batch_multiple(self) -> int:
        return 1 if self.mixing is None else 2

    def collate(self, items: list[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = default_collate(items)
        return batch

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.mixing is None:
            return batch
        pixels, labels = self.mixing.mix(
            batch["pixel_values"], batch["labels"], classes=self.classes, smoothing=self.label_smoothing
        )
        return batch | {"pixel_values": pixels, "labels": labels}

    def inputs(self, batch: Mapping[str, Any], *, training: bool) -> Any:
        return batch["pixel_values"]

    def loss(self, outputs: Any, batch: Mapping[str, Any], *, training: bool) -> Tensor:
        labels = batch["labels"]
        # Mixed labels are smoothed already.
        smooth = training and not labels.is_floating_point()
        return cross_entropy(outputs, labels, label_smoothing=self.label_smoothing if smooth else 0.0)

    def scored(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        labels = batch["labels"]
        return {
            "accuracy": (outputs.argmax(-1) == labels).float(),
            "loss": cross_entropy(outputs.float(), labels, reduction="none"),
        }

    def scorer(self) -> Means:
        return Means(accuracy=100.0)

    def final_scores(self, model: nn.Module, test: Dataset[Any]) -> dict[str, float]:
        return {}

"""Detection and instance segmentation with torchvision's detectors; scores are COCO's average precisions."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from wellcond.tasks.task import Metric, Scored

SUMMARY = {
    "map": "ap",
    "map_50": "ap50",
    "map_75": "ap75",
    "map_small": "ap_small",
    "map_medium": "ap_medium",
    "map_large": "ap_large",
}
"""torchmetrics' names of COCO's average precisions, and ours."""

EXAMPLES = 4
"""Test images that are kept to be looked at."""

CERTAIN = 0.5
"""Detections with a lower score are not shown."""

NO_SUCH_OBJECTS = -1
"""What COCO's evaluation says of a size that no object has."""


@dataclasses.dataclass(frozen=True)
class Judged:
    """One image's detections and what is really there, with masks as compressed runs, to be sent and kept.

    Attributes:
        found: ``boxes (n, 4)``, ``labels (n,)``, ``scores (n,)`` and ``masks``, a list of n compressed masks.
        there: ``boxes``, ``labels``, ``iscrowd``, ``area`` and ``masks``.
    """

    found: dict[str, Any]
    there: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection:
    """Items are of ``image``, ``boxes``, ``labels`` and the rest that `wellcond.data.coco.CocoImages` has.

    Batches are ``{"images": [(C, H, W), ...], "targets": [{...}, ...]}``: images of one batch differ in size, and the
    detector pads them itself.

    Attributes:
        masks: whether masks are learnt and scored as well as boxes.
        headline: the score that arms are compared by: ``"box_ap"``, ``"box_ap50"``, ``"mask_ap"``, ...
    """

    masks: bool = True
    headline: str = "box_ap"

    def __post_init__(self) -> None:
        known = [f"{kind}_{name}" for kind in self._kinds() for name in SUMMARY.values()]
        if self.headline not in known:
            raise ValueError(f"there is no score {self.headline!r}; choose among {', '.join(known)}")

    @property
    def metric(self) -> Metric:
        return Metric(self.headline, unit="%")

    @property
    def batch_multiple(self) -> int:
        return 1

    def collate(self, items: list[Any]) -> dict[str, Any]:
        return {
            "images": [item["image"] for item in items],
            "targets": [
                {
                    key: value
                    for key, value in item.items()
                    if key != "image" and (self.masks or key != "masks")
                }
                for item in items
            ],
        }

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def inputs(self, batch: Mapping[str, Any], *, training: bool) -> Any:
        """Images, and in training what to learn from: crowds are regions, no objects, and are left out of it."""
        if not training:
            return (list(batch["images"]),)
        learnt = []
        for target in batch["targets"]:
            single = target["iscrowd"] == 0
            keys = ("boxes", "labels", "masks") if self.masks else ("boxes", "labels")
            learnt.append({key: target[key][single] for key in keys})
        return list(batch["images"]), learnt

    def loss(self, outputs: Any, batch: Mapping[str, Any], *, training: bool) -> Tensor:
        """The sum of the detector's four or five losses. Raises ValueError in eval mode, where it has none."""
        if not isinstance(outputs, Mapping):
            raise ValueError("a detector in eval mode returns detections and no loss")
        losses: list[Tensor] = list(outputs.values())
        return torch.stack(losses).sum()

    def scored(self, outputs: Any, batch: Mapping[str, Any]) -> list[Judged]:
        judged = []
        for found, target in zip(outputs, batch["targets"], strict=True):
            kept = {key: found[key].detach().cpu() for key in ("boxes", "labels", "scores")}
            there = {key: target[key].detach().cpu() for key in ("boxes", "labels", "iscrowd", "area")}
            if self.masks:
                # Probabilities (n, 1, H, W); COCO's results have them cut at a half.
                kept["masks"] = compressed(found["masks"][:, 0] > 0.5)
                there["masks"] = compressed(target["masks"] > 0)
            judged.append(Judged(kept, there))
        return judged

    def scorer(self) -> AveragePrecision:
        return AveragePrecision(masks=self.masks)

    def final_scores(self, model: nn.Module, test: Dataset[Any]) -> dict[str, float]:
        return {}

    def examples(self, model: nn.Module, test: Dataset[Any]) -> list[dict[str, Any]]:
        """The first images, what was found in them with a score of a half or more, and what is there.

        An image is a PNG in base64; boxes are lists of corners; masks are compressed runs as COCO's results have them.
        """
        device = next(model.parameters()).device
        names = class_names(test)
        shown = []
        for index in range(min(EXAMPLES, len(test))):  # type: ignore[arg-type]
            item = test[index]
            batch = self.collate([item])
            images = [image.to(device) for image in batch["images"]]
            (judged,) = self.scored(model(images), batch)
            certain = [i for i, score in enumerate(judged.found["scores"].tolist()) if score >= CERTAIN]
            shown.append(
                {
                    "image": as_png(item["image"]),
                    "found": _listed(judged.found, certain, names),
                    "there": _listed(judged.there, range(len(judged.there["labels"])), names),
                }
            )
        return shown

    def _kinds(self) -> tuple[str, ...]:
        return ("box", "mask") if self.masks else ("box",)


def class_names(samples: Any) -> Sequence[str]:
    """The names of a data set's classes, label 1 the first; those of the whole where this is a subset."""
    whole: Any = samples.dataset if isinstance(samples, Subset) else samples
    names: Sequence[str] = whole.names
    return names


def as_png(image: Tensor) -> str:
    """An image ``(1 or 3, H, W)`` from 0 to 1 as a PNG file in base64."""
    from torchvision.transforms.v2.functional import to_pil_image

    file = io.BytesIO()
    to_pil_image((image.clamp(0, 1) * 255).round().to(torch.uint8).cpu()).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _listed(objects: Mapping[str, Any], which: Iterable[int], names: Sequence[str]) -> list[dict[str, Any]]:
    listed = []
    for i in which:
        entry: dict[str, Any] = {
            "name": names[int(objects["labels"][i]) - 1],
            "box": [round(edge, 2) for edge in objects["boxes"][i].tolist()],
        }
        if "scores" in objects:
            entry["score"] = round(float(objects["scores"][i]), 4)
        if "masks" in objects:
            mask = objects["masks"][i]
            entry["mask"] = {"size": mask["size"], "counts": mask["counts"].decode("ascii")}
        listed.append(entry)
    return listed


class AveragePrecision:
    """COCO's average precisions in %, by torchmetrics and faster-coco-eval.

    ``box_ap`` is the mean over classes and IoU from 0.5 to 0.95; ``box_ap50`` and ``box_ap75`` at one IoU;
    ``box_ap_small``, ``_medium``, ``_large`` of objects below 32², below 96² and above, left out where no object has
    that size. The same of masks with ``mask_``. Without any detection they are 0; detections that lie on a crowd region
    count neither way, as in COCO's own evaluation.

    >>> scorer = AveragePrecision(masks=False)
    >>> box, label = torch.tensor([[0.0, 0.0, 10.0, 10.0]]), torch.tensor([1])
    >>> there = {"boxes": box, "labels": label, "iscrowd": label * 0, "area": torch.tensor([100.0])}
    >>> scorer.update([Judged({"boxes": box, "labels": label, "scores": torch.tensor([0.9])}, there)])
    >>> {name: round(value) for name, value in scorer.compute().items()}
    {'box_ap': 100, 'box_ap50': 100, 'box_ap75': 100, 'box_ap_small': 100}
    """

    def __init__(self, *, masks: bool) -> None:
        from torchmetrics.detection import MeanAveragePrecision

        self.masks = masks
        # The results of all processes are gathered before they come here.
        self.metric = MeanAveragePrecision(
            iou_type=("bbox", "segm") if masks else ("bbox",),
            # COCO's own in float64: torchmetrics makes them in float32, where a recall of exactly 0.6 counts as less.
            iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(),
            rec_thresholds=np.linspace(0, 1, 101).tolist(),
            backend="faster_coco_eval",
            sync_on_compute=False,
        )
        self.metric.warn_on_many_detections = False  # COCO keeps the best hundred, detectors give no more
        self.images = 0

    def update(self, scored: Scored) -> None:
        if isinstance(scored, Mapping):
            raise TypeError("detections are scored from a list of Judged, got a mapping")
        for judged in scored:
            self.metric.update([self._decoded(judged.found)], [self._decoded(judged.there)])
            self.images += 1

    def compute(self) -> dict[str, float]:
        """Raises ValueError if there was no image, or no object in any."""
        if self.images == 0:
            raise ValueError("there was no image to score: the test set is empty")
        if not any(len(labels) for labels in self.metric.groundtruth_labels):
            raise ValueError(
                f"none of {self.images} test images holds an object: average precision has no meaning"
            )
        values = self.metric.compute()
        prefixes = {"box": "bbox_", "mask": "segm_"} if self.masks else {"box": ""}
        return {
            f"{kind}_{ours}": 100 * float(values[prefix + theirs])
            for kind, prefix in prefixes.items()
            for theirs, ours in SUMMARY.items()
            if values[prefix + theirs] != NO_SUCH_OBJECTS
        }

    def _decoded(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        return dict(objects) | {"masks": expanded(objects["masks"])} if self.masks else dict(objects)


def compressed(masks: Tensor) -> list[dict[str, Any]]:
    """Masks ``(n, H, W)`` bool as COCO's compressed runs: ``{"size": [H, W], "counts": bytes}`` each.

    >>> runs = compressed(torch.eye(3, dtype=torch.bool)[None])
    >>> expanded(runs)[0].int().tolist()
    [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    from faster_coco_eval.core import mask as runs

    return [
        {"size": list(mask.shape), "counts": runs.encode(np.asfortranarray(mask, dtype=np.uint8))["counts"]}
        for mask in masks.cpu().numpy()
    ]


def expanded(masks: list[dict[str, Any]]) -> Tensor:
    """Masks ``(n, H, W)`` bool from compressed runs; ``(0, 1, 1)`` for none."""
    from faster_coco_eval.core import mask as runs

    if not masks:
        return torch.zeros(0, 1, 1, dtype=torch.bool)
    return torch.from_numpy(np.stack([runs.decode(mask) for mask in masks])).bool()

"""Detectors on a tiny XCiT learn an image or two by heart: drawn shapes, and photographs where their packages are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_iou
from torchvision.transforms import v2

import wellcond as wc
from tests.data.coco_folders import nuclei, street, trees, write_coco
from wellcond.data.coco import CocoImages, read_annotations
from wellcond.data.detection_transforms import of_each_object
from wellcond.models.mask_rcnn import faster_rcnn, mask_rcnn
from wellcond.models.xcit_pyramid import TokenPyramid
from wellcond.tasks import Detection


@dataclasses.dataclass(frozen=True)
class Photographs:
    """What is learnt: which images of a COCO folder, resized to a short side, and how long.

    Attributes:
        write: makes the folder.
        images: which of them.
        short: side in pixels.
        anchor: edge of the finest anchors in pixels; each level's are twice as large.
        steps: of training.
        masks: whether there are any.
        crop: edge of the piece in the middle that is taken first, where objects are many and small.
    """

    write: Callable[[Path], Path]
    images: tuple[int, ...]
    short: int
    anchor: int
    steps: int
    masks: bool = True
    crop: int | None = None


PHOTOGRAPHS = {
    "drawn shapes": Photographs(lambda root: write_coco(root, size=(96, 128)), (0, 1), 96, 16, 40),
    "trees from above": Photographs(trees, (2, 3), 160, 8, 60, masks=False),
    "a street": Photographs(street, (0,), 160, 16, 60),
    "nuclei": Photographs(nuclei, (0,), 192, 16, 80, crop=192),
}


def tiny_detector(classes: int, wanted: Photographs) -> nn.Module:
    body = timm.models.xcit.Xcit(
        img_size=wanted.short,
        patch_size=8,
        embed_dim=64,
        depth=4,
        num_heads=4,
        mlp_ratio=2.0,
        cls_attn_layers=1,
    )
    pyramid = TokenPyramid(body, (1, 2, 3), (4, 8, 16), channels=48)
    anchors = AnchorGenerator(tuple((wanted.anchor * 2**i,) for i in range(4)), ((0.5, 1.0, 2.0),) * 4)
    options: dict[str, Any] = {
        "box_features": 128,
        "rpn_anchor_generator": anchors,
        "rpn_pre_nms_top_n_train": 300,
        "rpn_post_nms_top_n_train": 150,
        "rpn_pre_nms_top_n_test": 300,
        "rpn_post_nms_top_n_test": 150,
        "box_batch_size_per_image": 64,
        "min_size": wanted.short,
        "max_size": 4 * wanted.short,
    }
    if wanted.masks:
        return mask_rcnn(pyramid, classes, mask_widths=(32, 32), **options)
    return faster_rcnn(pyramid, classes, **options)


def items(wanted: Photographs, root: Path) -> tuple[list[dict[str, Tensor]], int]:
    """The images at their size in training, and how many classes there are."""
    root = wanted.write(root)
    annotations = read_annotations(
        root / "annotations" / "instances_train2017.json",
        root / "train2017",
        training=True,
        masks=wanted.masks,
    )
    first = [] if wanted.crop is None else [v2.CenterCrop(wanted.crop)]
    transform = v2.Compose(
        [
            *first,
            v2.RandomShortestSize([wanted.short]),
            v2.SanitizeBoundingBoxes(min_size=4, labels_getter=of_each_object),
        ]
    )
    images = CocoImages(annotations, masks=wanted.masks, transform=transform)
    return [images[i] for i in wanted.images], len(annotations.categories)


@pytest.mark.slow
@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_photographs_are_learnt_by_heart(name: str, tmp_path: Path) -> None:
    wanted = PHOTOGRAPHS[name]
    samples, classes = items(wanted, tmp_path)
    torch.manual_seed(0)
    model = tiny_detector(classes, wanted)
    wc.condition_(model)
    task = Detection(masks=wanted.masks)
    batch = task.collate(samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    losses = []
    for _ in range(wanted.steps):
        loss = task.loss(model(*task.inputs(batch, training=True)), batch, training=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        found = model(*task.inputs(batch, training=False))
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]
    for sample, detections in zip(samples, found, strict=True):
        certain = detections["scores"] >= 0.5
        overlap = box_iou(detections["boxes"][certain], sample["boxes"])
        same = detections["labels"][certain][:, None] == sample["labels"]
        hit = ((overlap > 0.5) & same).any(0).float().mean()
        assert hit >= 0.5
    if wanted.masks:
        scorer = task.scorer()
        scorer.update(task.scored(found, batch))
        assert scorer.compute()["mask_ap50"] > 25

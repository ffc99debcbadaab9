"""Random changes of training images with boxes and masks: those of the published XCiT detectors.

Source: https://github.com/facebookresearch/xcit, detection/configs/xcit/mask_rcnn_xcit_small_12_p16_3x_coco.py,
``train_pipeline``, which took them from DETR.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

SHORT_SIDES = tuple(range(480, 801, 32))
LONG_SIDE = 1333
SHORT_SIDES_BEFORE_CROP = (400, 500, 600)
CROP = (384, 600)


def augmentation(
    short_sides: Sequence[int] = SHORT_SIDES,
    long_side: int = LONG_SIDE,
    before_crop: Sequence[int] = SHORT_SIDES_BEFORE_CROP,
    crop: tuple[int, int] = CROP,
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Flip half of the images; resize half of them at once, and half in two steps with a random crop in between.

    Args:
        short_sides: one is chosen for each image; its longer side stays within ``long_side``.
        before_crop: short sides of the first step.
        crop: least and greatest edge of the crop, as far as the image goes. It may hold no object.

    Returns:
        A function of an item as `wellcond.data.coco.CocoImages` hands it over. Objects of which less than a pixel
        is left are taken out, with their labels and masks.
    """
    from torchvision.transforms import v2

    resize = functools.partial(v2.RandomShortestSize, max_size=long_side)
    transform: Callable[[dict[str, Any]], dict[str, Any]] = v2.Compose(
        [
            v2.RandomHorizontalFlip(0.5),
            v2.RandomChoice(
                [
                    resize(list(short_sides)),
                    v2.Compose([resize(list(before_crop)), RangeCrop(*crop), resize(list(short_sides))]),
                ]
            ),
            v2.SanitizeBoundingBoxes(min_size=1, labels_getter=of_each_object),
        ]
    )
    return transform


@dataclasses.dataclass(frozen=True)
class RangeCrop:
    """A crop of random height and width from ``least`` to ``greatest``, at a random place.

    Edges of the image that are shorter bound it. Source: mmdet's ``RandomCrop`` of the type ``absolute_range``.

    >>> import torch
    >>> from torchvision import tv_tensors
    >>> RangeCrop(4, 4)({"image": tv_tensors.Image(torch.zeros(3, 9, 3))})["image"].shape
    torch.Size([3, 4, 3])
    """

    least: int
    greatest: int

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        import torch
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        edges = item["image"].shape[-2:]
        lengths = [int(torch.randint(min(e, self.least), min(e, self.greatest) + 1, ())) for e in edges]
        starts = [int(torch.randint(e - length + 1, ())) for e, length in zip(edges, lengths, strict=True)]
        return {
            key: functional.crop(value, *starts, *lengths)
            if isinstance(value, tv_tensors.TVTensor)
            else value
            for key, value in item.items()
        }


def of_each_object(item: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """What has an entry for each object besides boxes and masks."""
    return tuple(item[key] for key in ("labels", "iscrowd", "area"))

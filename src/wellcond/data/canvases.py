"""Digits pasted on canvases: objects whose boxes and masks are known, for detection without any download."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from wellcond.data.images import Split

NAMES = tuple("0123456789")
"""The classes; label 1 is the first, since detectors take 0 for the background."""


@dataclasses.dataclass(frozen=True)
class Canvases(Dataset[dict[str, Tensor]]):
    """Grey images of varied size with a few digits each, made anew from seed and index whenever one is asked for.

    Digits vary in size and brightness, lie anywhere, never touch each other, and the ground is noise with strokes of
    the digits' brightness. Items are those of every data set of detection here: ``image (1, H, W)`` float32
    from 0 to 1; for n objects ``boxes (n, 4)`` float32, left, top, right and bottom in pixels; ``labels (n,)`` int64
    from 1; ``masks (n, H, W)`` uint8; ``iscrowd (n,)`` int64, all 0; ``area (n,)`` float32 of the masks; and
    ``image_id ()`` int64.

    Args:
        digits: ``(k, 8, 8)`` from 0 to 1.
        labels: ``(k,)`` the digits they are.
        count: how many canvases.
        seed: of all that is random; different seeds give different canvases.
        edge: the shorter edge of every canvas, in pixels.
        longest: the longer edge is at most so long.
        sizes: shortest and longest edge of a digit's frame.
        most: digits on a canvas, 1 to so many.

    Raises:
        ValueError: a digit's frame would not fit on the smallest canvas, or there is no digit.

    >>> canvases = digit_canvases(train=4, test=2)
    >>> item = canvases.train[0]
    >>> item["image"].shape, item["boxes"].shape, item["masks"].shape
    (torch.Size([1, 92, 64]), torch.Size([3, 4]), torch.Size([3, 92, 64]))
    """

    digits: Tensor
    labels: Tensor
    count: int
    seed: int
    edge: int = 64
    longest: int = 96
    sizes: tuple[int, int] = (16, 32)
    most: int = 4

    def __post_init__(self) -> None:
        if len(self.digits) == 0 or len(self.digits) != len(self.labels):
            raise ValueError(f"{len(self.digits)} digits and {len(self.labels)} labels make no canvas")
        if self.sizes[1] > self.edge:
            raise ValueError(
                f"a digit of {self.sizes[1]} pixels does not fit on a canvas of {self.edge}; "
                f"make canvases larger or digits smaller"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES

    @property
    def draws(self) -> bool:
        """A canvas is the same whenever it is made."""
        return False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(f"there is no canvas {index}, they go from 0 to {self.count - 1}")
        draw = np.random.default_rng([self.seed, index])
        height, width = self.edge, int(draw.integers(self.edge, self.longest + 1))
        if draw.integers(2):
            height, width = width, height
        image = torch.from_numpy(draw.uniform(0, 0.25, (height, width)).astype(np.float32))
        self._strike(image, draw)
        taken = torch.zeros(height, width, dtype=torch.bool)
        masks, labels = [], []
        for _ in range(int(draw.integers(1, self.most + 1))):
            which = int(draw.integers(len(self.digits)))
            size = int(draw.integers(self.sizes[0], self.sizes[1] + 1))
            bright = float(draw.uniform(0.6, 1.0))
            digit = functional.interpolate(
                self.digits[which][None, None], size=(size, size), mode="bilinear", align_corners=False
            )[0, 0]
            # A few attempts: a canvas too full for one more digit has one less.
            for _ in range(20):
                top, left = (int(draw.integers(edge - size + 1)) for edge in (height, width))
                place = (slice(top, top + size), slice(left, left + size))
                if not taken[place].any():
                    break
            else:
                continue
            taken[place] = True
            mask = torch.zeros(height, width, dtype=torch.bool)
            mask[place] = digit > 0.4
            image[place] = torch.maximum(image[place], digit * bright)
            masks.append(mask)
            labels.append(int(self.labels[which]) + 1)
        return as_item(image[None], torch.stack(masks), torch.tensor(labels), index)

    def _strike(self, image: Tensor, draw: np.random.Generator) -> None:
        """Strokes as bright as digits, so that brightness alone makes no object."""
        height, width = image.shape
        for _ in range(int(draw.integers(0, 4))):
            (top, left), length = (int(draw.integers(edge - 8)) for edge in (height, width)), 6
            bright = float(draw.uniform(0.5, 1.0))
            if draw.integers(2):
                image[top : top + length, left : left + 2] = bright
            else:
                image[top : top + 2, left : left + length] = bright


def as_item(image: Tensor, masks: Tensor, labels: Tensor, index: int) -> dict[str, Tensor]:
    """An item of detection from masks ``(n, H, W)`` bool, each with a pixel: boxes and areas are read off them."""
    from torchvision.ops import masks_to_boxes

    boxes = masks_to_boxes(masks)
    boxes[:, 2:] += 1  # torchvision gives the last pixel inside; a box ends where it does
    return {
        "image": image,
        "boxes": boxes.float(),
        "labels": labels,
        "masks": masks.to(torch.uint8),
        "iscrowd": torch.zeros_like(labels),
        "area": masks.flatten(1).sum(1).float(),
        "image_id": torch.tensor(index),
    }


def digit_canvases(train: int, test: int) -> Split:
    """Canvases of scikit-learn's digits; those on test canvases are never on training ones.

    The digits are split as `wellcond.data.digits` splits them.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32) / 16
    labels = torch.tensor(data.target, dtype=torch.long)
    parts = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    first, second = (
        Canvases(pixels[part], labels[part], count, seed)
        for part, count, seed in zip(parts, (train, test), (0, 1), strict=True)
    )
    return Split(first, second)

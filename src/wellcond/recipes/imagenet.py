"""What the ImageNet recipes have in common: reading the images, timm's augmentation, the cost."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from wellcond.data import Split, image_folder, stream
from wellcond.recipes.recipe import Source

IMAGES = 1_281_167
"""Training images of ImageNet-1k (https://www.image-net.org/challenges/LSVRC/2012/)."""

CLASSES = 1000
SIZE = 224


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Arguments of `timm.data.create_transform`, and how test images are cropped.

    Attributes:
        color_jitter, auto_augment, erase: brightness, contrast and saturation; RandAugment in timm's notation;
            probability of erasing a rectangle with noise. None or 0: off.
        interpolation: of the random crops.
        crop_share: a test image is resized so that the central crop is this share of its shorter side.
    """

    color_jitter: float | None = None
    auto_augment: str | None = None
    erase: float = 0.0
    interpolation: str = "bicubic"
    crop_share: float = 0.875

    def train(self) -> Any:
        """The random transform of a training image: crop of 8 to 100 % of its area, flip, and what is on.

        Pixels are normalised with ImageNet's means and deviations, as all five recipes' sources do.
        """
        from timm.data.transforms_factory import create_transform

        # timm takes None for off, which its annotation leaves out.
        jitter: Any = self.color_jitter
        return create_transform(
            SIZE,
            is_training=True,
            color_jitter=jitter,
            auto_augment=self.auto_augment,
            interpolation=self.interpolation,
            re_prob=self.erase,
            re_mode="pixel",
            re_count=1,
        )

    def test(self) -> Any:
        """The transform of a test image: bicubic resize and central crop."""
        from timm.data.transforms_factory import create_transform

        return create_transform(SIZE, is_training=False, interpolation="bicubic", crop_pct=self.crop_share)


def read_imagenet(source: Source, augmentation: Augmentation) -> Split:
    """ImageNet-1k from a folder with train/ and val/, or streamed from the Hugging Face hub.

    Warns if there are fewer classes than the model has outputs, as in a smoke run.

    Raises:
        FileNotFoundError, ValueError: no folder is given, or its layout is wrong; the message says how to mend it.
        ConnectionError: the hub is out of reach.
    """
    if source.hub and source.folder is not None:
        raise ValueError(
            f"--hub streams the images, --data-dir {source.folder} reads them from a folder: give one"
        )
    train, test = augmentation.train(), augmentation.test()
    if source.hub:
        split, classes = stream(train=train, test=test, corrupt=source.corrupt)
    elif source.folder is not None:
        split, classes = image_folder(source.folder, train, test, source.corrupt)
    else:
        raise FileNotFoundError(
            "ImageNet has no usual place: --data-dir names the folder that holds train/CLASS/*.JPEG and "
            "val/CLASS/*.JPEG, or --hub streams ILSVRC/imagenet-1k from the Hugging Face hub"
        )
    if len(classes) > CLASSES:
        raise ValueError(f"there are {len(classes)} classes, but the model has {CLASSES} outputs")
    if len(classes) < CLASSES:
        warnings.warn(
            f"{len(classes)} classes for {CLASSES} outputs: good for a smoke run, but this is not ImageNet-1k",
            stacklevel=2,
        )
    return split


def cost(epochs: int, images_per_second: float, note: str) -> str:
    """What the training steps take on one GPU at a known throughput, baseline arm.

    >>> cost(300, 390.86, "timm's benchmark")
    "273 h on one RTX 3090 (391 images/s: timm's benchmark)"
    """
    hours = epochs * IMAGES / images_per_second / 3600
    return f"{hours:.0f} h on one RTX 3090 ({images_per_second:.0f} images/s: {note})"

"""Folders of images, one folder a class, checked before anything is trained."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from wellcond.data.images import Split

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""As torchvision's ImageFolder has them."""

Corrupt = Literal["fatal", "skip"]
"""What to do about a training image that cannot be read. A test image that cannot be read is always fatal."""

Transform = Callable[[Any], Tensor]
Sample = tuple[Path, int]


class CorruptImage(ValueError):
    """An image that cannot be read; the message has its path."""


class FolderImages(Dataset[dict[str, Tensor]]):
    """Images read from files: items ``{"pixel_values": (3, H, W) float32, "labels": () int64}``.

    Args:
        samples: files and labels.
        transform: makes a tensor of a PIL image in RGB.
        corrupt: ``"fatal"`` raises `CorruptImage`; ``"skip"`` warns and gives the next readable image in its place.

    Raises:
        CorruptImage: an image cannot be read, or with ``"skip"`` none can.
    """

    def __init__(self, samples: Sequence[Sample], transform: Transform, corrupt: Corrupt = "fatal") -> None:
        self.samples = samples
        self.transform = transform
        self.corrupt = corrupt

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        for step in range(len(self.samples)):
            path, label = self.samples[(index + step) % len(self.samples)]
            try:
                image = read_rgb(path)
            except CorruptImage as error:
                if self.corrupt == "fatal":
                    raise
                warnings.warn(f"skipped: {error}", stacklevel=2)
                continue
            return {"pixel_values": self.transform(image), "labels": torch.tensor(label)}
        raise CorruptImage(f"none of {len(self.samples)} images can be read")


def read_rgb(path: Path) -> Any:
    """A PIL image in RGB. Raises CorruptImage with the path if it cannot be decoded to its end."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    # Pillow's readers raise whatever their parsers do: SyntaxError for PNG, struct.error, IndexError, ...
    except Exception as error:
        raise CorruptImage(f"the image {path} cannot be read: {type(error).__name__}: {error}") from error


def image_folder(
    root: str | os.PathLike[str], train: Transform, test: Transform, corrupt: Corrupt = "fatal"
) -> tuple[Split, list[str]]:
    """Training and test images of ``root/train/CLASS/*`` and ``root/val/CLASS/*``, and the names of the classes.

    Args:
        root: the folder; ``validation`` is understood in place of ``val``.
        train, test: make a tensor of a PIL image.
        corrupt: what to do about a training image that cannot be read.

    Raises:
        FileNotFoundError: ``root`` or one of its parts is missing.
        ValueError: the layout is not as above; the message says what to do about it.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}; --data-dir names the folder that holds train/ and val/"
        )
    train_part = _part(folder, ("train",))
    test_part = _part(folder, ("val", "validation"))
    train_classes, test_classes = _classes(train_part), _classes(test_part)
    if train_classes != test_classes:
        raise ValueError(_mismatch(train_part, train_classes, test_part, test_classes))
    _refuse_numeric_order(train_part, train_classes)
    labels = {name: label for label, name in enumerate(train_classes)}
    return (
        Split(
            FolderImages(_samples(train_part, labels), train, corrupt),
            FolderImages(_samples(test_part, labels), test),
        ),
        train_classes,
    )


def _part(root: Path, names: Sequence[str]) -> Path:
    found = [root / name for name in names if (root / name).is_dir()]
    if len(found) > 1:
        raise ValueError(
            f"{root} holds both {' and '.join(path.name for path in found)}; remove or rename one"
        )
    if not found:
        inside = sorted(path.name for path in root.iterdir())[:5]
        raise FileNotFoundError(
            f"{root} holds no folder {' or '.join(names)} (it holds {', '.join(inside) or 'nothing'}); images lie in "
            f"{root}/train/CLASS/ and {root}/val/CLASS/, --data-dir names the folder above both"
        )
    return found[0]


def _classes(part: Path) -> list[str]:
    """The class folders of a part, sorted as text; errors for images that lie beside them."""
    entries = sorted(part.iterdir(), key=lambda path: path.name)
    folders = [path.name for path in entries if path.is_dir() and not path.name.startswith(".")]
    flat = [path.name for path in entries if path.is_file() and _is_image(path.name)]
    if flat:
        beside = f"beside {len(folders)} class folders" if folders else "and no class folder"
        raise ValueError(
            f"{part} holds {len(flat)} images directly ({flat[0]}, ...) {beside}: their classes are unknown. Move each "
            f"into {part}/CLASS/ with the class names of the training folder; for ImageNet's validation images "
            f"the classes are in ILSVRC2012_validation_ground_truth.txt of the development kit"
        )
    if not folders:
        raise ValueError(f"{part} holds no class folders; images lie in {part}/CLASS/")
    return folders


def _samples(part: Path, labels: dict[str, int]) -> list[Sample]:
    samples: list[Sample] = []
    empty = []
    for name, label in labels.items():
        found = sorted(
            Path(where) / file
            for where, _, files in os.walk(part / name, followlinks=True)
            for file in files
            if _is_image(file)
        )
        if not found:
            empty.append(name)
        samples += [(path, label) for path in found]
    if not samples:
        raise ValueError(f"{part} holds no images; known endings are {', '.join(IMAGE_ENDINGS)}")
    if empty:
        raise ValueError(
            f"{part}: no images in {_some(empty)}; known endings are {', '.join(IMAGE_ENDINGS)}. Fill them, or remove "
            f"these classes from train and val alike"
        )
    return samples


def _mismatch(train: Path, train_classes: list[str], test: Path, test_classes: list[str]) -> str:
    only_train = sorted(set(train_classes) - set(test_classes))
    only_test = sorted(set(test_classes) - set(train_classes))
    missing = [
        f"{_some(names)} only in {part}" for names, part in ((only_train, train), (only_test, test)) if names
    ]
    return (
        f"training and test classes differ: {'; '.join(missing)}. A label is the rank of a folder's name, so every "
        f"label after the first difference would mean two things. Make both lists of folders the same"
    )


def _refuse_numeric_order(part: Path, classes: list[str]) -> None:
    """1, 10, 2: sorted as text, label 1 is folder 10, which no list of class numbers means."""
    if all(name.isdecimal() for name in classes) and classes != sorted(classes, key=int):
        width = max(map(len, classes))
        raise ValueError(
            f"the classes of {part} are numbers, and as text they sort as {', '.join(classes[:4])}, ...: labels would "
            f"not follow the numbers. Rename them in train and val to {width} digits: "
            f'for d in *; do mv "$d" "$(printf %0{width}d "$d")"; done'
        )


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_ENDINGS) and not name.startswith(".")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

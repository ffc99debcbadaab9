"""ImageNet-1k from the Hugging Face hub, read while it is trained on, without a copy on disk."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from wellcond.data.folder import Corrupt, CorruptImage, Transform
from wellcond.data.images import Split

IMAGENET = "ILSVRC/imagenet-1k"
SHUFFLE_BUFFER = 10_000
"""Images among which the next is drawn; the shards themselves are shuffled too."""


class StreamedImages(IterableDataset[dict[str, Tensor]]):
    """Images of a stream, in the order of an epoch; items as of `wellcond.data.folder.FolderImages`.

    Args:
        source: a ``datasets.IterableDataset`` of undecoded images, with the columns ``image`` and ``label``.
        transform: makes a tensor of a PIL image in RGB.
        length: how many there are.
        corrupt: ``"fatal"`` or ``"skip"``; a skipped image is left out.
    """

    def __init__(self, source: Any, transform: Transform, length: int, corrupt: Corrupt = "fatal") -> None:
        self.source = source
        self.transform = transform
        self.length = length
        self.corrupt = corrupt

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for row in self.rows(0):
            item = self.item(row)
            if item is not None:
                yield item

    def rows(self, epoch: int) -> Iterator[Any]:
        """Undecoded rows in the order of an epoch; in a worker process of a loader, its share of them."""
        self.source.set_epoch(epoch)
        return iter(self.source)

    def item(self, row: Any) -> dict[str, Tensor] | None:
        """The item of a row; None if its image is corrupt and to be skipped."""
        from io import BytesIO

        from PIL import Image

        stored = row["image"]
        try:
            with Image.open(BytesIO(stored["bytes"]) if stored["bytes"] else stored["path"]) as image:
                rgb = image.convert("RGB")
        except Exception as error:  # Pillow's readers raise whatever their parsers do
            broken = CorruptImage(
                f"the image {stored['path']} of the stream cannot be read: {type(error).__name__}: {error}"
            )
            if self.corrupt == "fatal":
                raise broken from error
            warnings.warn(f"skipped: {broken}", stacklevel=2)
            return None
        return {"pixel_values": self.transform(rgb), "labels": torch.tensor(row["label"])}

    def take(self, count: int) -> StreamedImages:
        """The first ``count`` images of each epoch: a stream cannot be sampled without reading it."""
        short = copy.copy(self)
        short.source = self.source.take(count)
        short.length = min(count, self.length)
        return short

    def first(self, count: int) -> list[dict[str, Tensor]]:
        """The first items of epoch 0."""
        return list(itertools.islice(self, count))


def stream(
    name: str = IMAGENET, *, train: Transform, test: Transform, corrupt: Corrupt = "fatal", seed: int = 0
) -> tuple[Split, list[str]]:
    """Training and validation images of a hub data set, or of a local folder that ``datasets`` understands.

    Args:
        name: of the data set.
        train, test: make a tensor of a PIL image.
        corrupt: what to do about a training image that cannot be read; a test image is always fatal.
        seed: of the order.

    Returns:
        The images and the names of the classes.

    Raises:
        ConnectionError: the hub cannot be reached, or this process is told to stay offline.
        ValueError: the data set is not there or not for this account, or has no images, labels or sizes.
    """
    import datasets

    try:
        parts = datasets.load_dataset(name, streaming=True)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise ValueError(
            f"the data set {name!r} is not there, or not for you: ImageNet asks for consent at "
            f"https://huggingface.co/datasets/{IMAGENET}, and then for `hf auth login` ({error})"
        ) from error
    except (ConnectionError, OSError) as error:
        raise ConnectionError(
            f"cannot stream {name!r}: the Hugging Face hub is out of reach ({type(error).__name__}: {error}). "
            f"Go online and leave HF_HUB_OFFLINE unset, or give a folder with train/ and val/ by --data-dir"
        ) from error
    missing = [part for part in ("train", "validation") if part not in parts]
    if missing:
        raise ValueError(
            f"the data set {name!r} has no split {', '.join(missing)}; it has {', '.join(parts)}"
        )
    made = []
    for part in ("train", "validation"):
        source = parts[part]
        features = source.features or {}
        if "image" not in features or not hasattr(features.get("label"), "names"):
            raise ValueError(
                f"{name!r} has the columns {list(features)}; expected image and label with class names"
            )
        if part == "train":
            source = source.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        made.append((source.cast_column("image", datasets.Image(decode=False)), _length(source, part)))
    (train_source, train_length), (test_source, test_length) = made
    return (
        Split(
            StreamedImages(train_source, train, train_length, corrupt),
            StreamedImages(test_source, test, test_length),
        ),
        list(parts["train"].features["label"].names),
    )


def _length(source: Any, part: str) -> int:
    """The number of images that the data set's own description gives; counted if it gives none."""
    splits = source.info.splits or {}
    if part in splits and splits[part].num_examples:
        return int(splits[part].num_examples)
    return sum(1 for _ in source.select_columns("label"))

"""Labelled images in memory, and the ones that ship with scikit-learn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Images(Dataset[dict[str, Tensor]]):
    """Labelled images: items ``{"pixel_values": (C, H, W) float32, "labels": () int64}``.

    Args:
        pixels: ``(n, C, H, W)``, normalised.
        labels: ``(n,)`` int64.

    Raises:
        ValueError: the two lengths differ.
    """

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        if len(pixels) != len(labels):
            raise ValueError(f"{len(pixels)} images but {len(labels)} labels")
        self.pixels = pixels
        self.labels = labels

    @property
    def draws(self) -> bool:
        """Whether items take random numbers: tensors in memory do not, a class made from this one can."""
        return type(self) is not Images

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}


@dataclasses.dataclass(frozen=True)
class Split:
    """Training and test samples, never the same ones. Both have a length; items are what a task collates.

    Attributes:
        train, test: the samples.
        details: what was found in the data and makes results comparable, such as the digest of a vocabulary. It is
            part of the configuration in ``run.json``: a run folder takes no results of other data.
        tokenizer: of transformers, which every checkpoint takes along; None: there is none.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: Any = None


def normalised_split(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> Split:
    """Both parts with the mean and standard deviation of the training pixels taken out."""
    mean, std = train.mean(), train.std()
    return Split(Images((train - mean) / std, train_labels), Images((test - mean) / std, test_labels))


def digits(test_share: float = 0.25) -> Split:
    """scikit-learn's 1,797 handwritten digits, 8×8 grey: a fixed stratified split, the same on every machine.

    >>> split = digits()
    >>> len(split.train), len(split.test), tuple(split.train[0]["pixel_values"].shape)
    (1347, 450, (1, 8, 8))
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32)[:, None]
    labels = torch.tensor(data.target, dtype=torch.long)
    train, test = train_test_split(range(len(labels)), test_size=test_share, random_state=0, stratify=labels)
    return normalised_split(pixels[train], labels[train], pixels[test], labels[test])


def enlarged(split: Split, times: int) -> Split:
    """Every pixel repeated ``times`` in both directions.

    >>> enlarged(digits(), 2).train[0]["pixel_values"].shape
    torch.Size([1, 16, 16])
    """
    return _changed(split, lambda x: x.repeat_interleave(times, -1).repeat_interleave(times, -2))


def bordered(split: Split, width: int) -> Split:
    """The outermost pixels repeated ``width`` times on all four sides.

    >>> bordered(digits(), 2).train[0]["pixel_values"].shape
    torch.Size([1, 12, 12])
    """
    return _changed(split, lambda x: torch.nn.functional.pad(x, [width] * 4, mode="replicate"))


def _changed(split: Split, change: Callable[[Tensor], Tensor]) -> Split:
    train, test = split.train, split.test
    if not (isinstance(train, Images) and isinstance(test, Images)):
        raise TypeError(f"these images are not in memory: {type(train).__name__}, {type(test).__name__}")
    return Split(Images(change(train.pixels), train.labels), Images(change(test.pixels), test.labels))

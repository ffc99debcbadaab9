"""Labelled sequences of token ids in memory, and what happens to those that are too long."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

Ids = npt.NDArray[np.unsignedinteger[Any]]
PADDING = 0
"""The id of padding in every task; no real token has it."""
BYTES = 257
"""Ids of byte-level text and of grey pixels: padding, and each of 256 values plus one."""


class Sequences(Dataset[dict[str, Tensor]]):
    """Labelled sequences, or pairs of them, each with its own length.

    Items are ``{"input_ids": (n,) int64, "labels": () int64}``; those of pairs have ``"other_ids": (m,) int64`` too.

    Args:
        ids: one array ``(n,)`` per sample, without padding.
        labels: one for each.
        other_ids: the second of each pair.

    Raises:
        ValueError: the counts differ, or a sequence is empty or holds the id of padding.

    >>> Sequences([np.array([3, 1], np.uint8)], [1])[0]
    {'input_ids': tensor([3, 1]), 'labels': tensor(1)}
    """

    draws = False  # items take no random numbers

    def __init__(
        self, ids: Sequence[Ids], labels: Sequence[int] | Tensor, other_ids: Sequence[Ids] | None = None
    ) -> None:
        counts = {len(part) for part in (ids, labels, other_ids) if part is not None}
        if len(counts) > 1:
            raise ValueError(f"{len(ids)} sequences and {len(labels)} labels do not belong together")
        for i, sequence in enumerate([*ids, *(other_ids or ())]):
            if sequence.ndim != 1 or len(sequence) == 0 or not sequence.all():
                raise ValueError(
                    f"sequence {i % len(ids)} is empty or holds {PADDING}, the id of padding: shape {sequence.shape}"
                )
        self.ids = list(ids)
        self.labels = torch.as_tensor(labels, dtype=torch.long)
        self.other_ids = None if other_ids is None else list(other_ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = {"input_ids": _as_tensor(self.ids[index]), "labels": self.labels[index]}
        if self.other_ids is not None:
            item["other_ids"] = _as_tensor(self.other_ids[index])
        return item


def _as_tensor(ids: Ids) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def byte_ids(text: bytes) -> Ids:
    """The bytes of a text, each plus one.

    >>> byte_ids(b"ab").tolist()
    [98, 99]
    """
    return (np.frombuffer(text, np.uint8).astype(np.uint16) + 1).astype(np.uint16)


@dataclasses.dataclass
class Cutting:
    """Sequences longer than ``length`` are cut, counted and reported; published in the task, so never an accident.

    >>> cutting = Cutting(2)
    >>> cutting.cut(byte_ids(b"abc")).tolist(), cutting.cut(byte_ids(b"ab")).tolist()
    ([98, 99], [98, 99])
    >>> cutting.report("texts")
    '1 of 2 texts are longer than 2 tokens (the longest has 3): cut at the end, as in the published task'
    """

    length: int
    seen: int = 0
    longer: int = 0
    longest: int = 0

    def cut(self, ids: Ids) -> Ids:
        """The first ``length`` ids."""
        self.seen += 1
        self.longer += len(ids) > self.length
        self.longest = max(self.longest, len(ids))
        return ids[: self.length]

    def report(self, what: str) -> str | None:
        """One sentence; None if nothing was cut."""
        if not self.longer:
            return None
        return (
            f"{self.longer} of {self.seen} {what} are longer than {self.length} tokens (the longest has "
            f"{self.longest}): cut at the end, as in the published task"
        )


def require_fit(ids: Ids, length: int, whose: str) -> Ids:
    """The ids as they are; ValueError if there are more than ``length``, whose end would be lost."""
    if len(ids) > length:
        raise ValueError(
            f"{whose} has {len(ids)} tokens, and {length} fit: it is not cut, its answer would be wrong"
        )
    return ids


class Pixels(Dataset[dict[str, Tensor]]):
    """Grey images read row by row: items ``{"input_ids": (H·W,) int64 from 1 to 256, "labels": () int64}``.

    A black pixel is a token like any other. The published code masks it as padding, because both have the id 0 there.

    Args:
        images: ``(n, H, W)`` uint8.
        labels: ``(n,)``.

    Raises:
        ValueError: the counts differ, or the images are not grey bytes.

    >>> Pixels(np.array([[[0, 255], [7, 0]]], np.uint8), np.array([3]))[0]
    {'input_ids': tensor([  1, 256,   8,   1]), 'labels': tensor(3)}
    """

    draws = False  # items take no random numbers

    def __init__(self, images: npt.NDArray[np.uint8], labels: npt.NDArray[Any]) -> None:
        if images.ndim != 3 or images.dtype != np.uint8 or len(images) != len(labels):
            raise ValueError(
                f"expected as many grey images (n, H, W) of bytes as labels, got {images.shape} {images.dtype} and "
                f"{len(labels)} labels"
            )
        self.images = images
        self.labels = torch.as_tensor(labels, dtype=torch.long)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": torch.from_numpy(self.images[index].reshape(-1).astype(np.int64) + 1),
            "labels": self.labels[index],
        }

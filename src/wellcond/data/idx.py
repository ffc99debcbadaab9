"""MNIST and Fashion-MNIST as they are published: IDX files, plain or gzipped, in a local folder."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wellcond.data.images import Split, normalised_split

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where the Debian package dataset-fashion-mnist puts its files."""

UNSIGNED_BYTE = 0x08


def read_idx(path: str | os.PathLike[str]) -> Tensor:
    """The array in an IDX file of unsigned bytes, ``uint8`` of the shape in its header.

    Source: http://yann.lecun.com/exdb/mnist/, "the IDX file format": two zero bytes, a type, the number of dimensions,
    each dimension as a big-endian 32-bit number, then the numbers.

    Raises:
        ValueError: names the file and what is wrong with it: not IDX, another type, too short, too long, broken gzip.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "labels"
    >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))
    >>> read_idx(path)
    tensor([7, 8, 9], dtype=torch.uint8)
    """
    content = _content(Path(path))
    if len(content) < 4 or content[:2] != b"\0\0":
        raise ValueError(
            f"{path} is no IDX file: it begins with {content[:4].hex(' ') or 'nothing'}, not with 00 00"
        )
    kind, dimensions = content[2], content[3]
    if kind != UNSIGNED_BYTE:
        raise ValueError(f"{path} holds numbers of IDX type 0x{kind:02x}; images and labels are of type 0x08")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise ValueError(f"{path} is cut off in its header: {len(content)} bytes of {start}")
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    found, expected = len(content) - start, math.prod(shape)
    if found != expected:
        what = "is cut off" if found < expected else "has bytes left over"
        raise ValueError(
            f"{path} {what}: its header says {shape}, {expected} bytes, but {found} follow; fetch it anew"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def idx_folder(folder: str | os.PathLike[str], *, install: str) -> Split:
    """Train and test images of a folder that holds MNIST's four files, at any depth, normalised.

    Args:
        folder: holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the same two of ``t10k``; a dot in
            place of the second hyphen and ``.gz`` at the end are understood.
        install: how to get the files, for the error message.

    Raises:
        FileNotFoundError: the folder or one of the files is missing; the message ends with ``install``.
        ValueError: a file is broken, is there twice, or images and labels do not belong together.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}. {install}")
    train, train_labels = _part(root, "train", install)
    test, test_labels = _part(root, "t10k", install)
    if train.shape[1:] != test.shape[1:]:
        raise ValueError(
            f"{root}: training images are {tuple(train.shape[1:])}, test images {tuple(test.shape[1:])}"
        )
    return normalised_split(train, train_labels, test, test_labels)


def _part(root: Path, part: str, install: str) -> tuple[Tensor, Tensor]:
    """Images ``(n, 1, H, W)`` float32 from 0 to 1, and labels ``(n,)`` int64, of ``train`` or ``t10k``."""
    image_file, label_file = (
        _find(root, f"{part}-images", 3, install),
        _find(root, f"{part}-labels", 1, install),
    )
    images, labels = read_idx(image_file), read_idx(label_file)
    for path, array, dimensions in ((image_file, images, 3), (label_file, labels, 1)):
        if array.ndim != dimensions:
            raise ValueError(f"{path} has {array.ndim} dimensions, expected {dimensions}")
    if len(images) != len(labels):
        raise ValueError(f"{image_file} has {len(images)} images, but {label_file} {len(labels)} labels")
    if len(images) == 0:
        raise ValueError(f"{image_file} has no images")
    if labels.max() > 9:
        raise ValueError(f"{label_file} has the label {labels.max()}; the ten classes are 0 to 9")
    return images[:, None].float() / 255, labels.long()


def _find(root: Path, stem: str, dimensions: int, install: str) -> Path:
    names = [f"{stem}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    found = sorted({path for name in names for path in root.rglob(name) if path.is_file()})
    if not found:
        raise FileNotFoundError(f"{root} holds no {names[0]}, plain or .gz. {install}")
    if len({path.parent for path in found}) > 1:
        raise ValueError(
            f"{names[0]} is there {len(found)} times ({', '.join(map(str, found))}): name one folder"
        )
    return found[0]


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is broken gzip ({error}); fetch it anew") from error

"""The three tasks whose data are published elsewhere: IMDB reviews, pairs of ACL papers, CIFAR-10 in grey.

Each is read from the folder that its download unpacks to; reviews and images also from the Hugging Face hub.
Texts longer than the task's 4,000 bytes are cut, as the Long Range Arena's own pipelines cut them
(lra_benchmarks/text_classification and matching, ``max_length``); how many is a warning, and in ``Split.details``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wellcond.data.images import Split
from wellcond.data.lra.sequences import Cutting, Ids, Pixels, Sequences, byte_ids

IMDB_HUB, CIFAR10_HUB = "stanfordnlp/imdb", "uoft-cs/cifar10"
IMDB = (
    "Download https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz, unpack it, and give the folder aclImdb, "
    "or take --hub"
)
AAN = (
    "Download https://storage.googleapis.com/long-range-arena/lra_release.gz, unpack it, and give the folder "
    "lra_release/lra_release/tsv_data; no copy on the Hugging Face hub is known here"
)
CIFAR10 = (
    "Download https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz, unpack it, and give the folder that holds "
    "cifar-10-batches-py; or take --hub"
)
CIFAR10_TRAINING = 45_000
"""lra_config.py, image: 45,000 to train, 5,000 to validate (not used here), 10,000 to test."""

Text = tuple[bytes, int]
Pair = tuple[bytes, bytes, int]


def text_folder(folder: Path, *, length: int) -> Split:
    """IMDB: 25,000 reviews to train, 25,000 to test, byte by byte; label 1 is positive.

    Args:
        folder: ``aclImdb``, which holds ``train/pos``, ``train/neg``, ``test/pos`` and ``test/neg``.
        length: bytes that are kept of a review.

    Raises:
        FileNotFoundError: a folder or its reviews are missing; the message says where to get them.
    """
    return _texts(*(_reviews(folder / part) for part in ("train", "test")), length=length)


def text_hub(*, length: int) -> Split:
    """The same from the Hugging Face hub. Raises ConnectionError if it cannot be reached and holds no copy here."""
    loaded = _from_hub(IMDB_HUB)
    parts = (
        ((row["text"].encode(), int(row["label"])) for row in loaded[part]) for part in ("train", "test")
    )
    return _texts(*parts, length=length)


def retrieval_folder(folder: Path, *, length: int) -> Split:
    """AAN: whether one of two papers cites the other, byte by byte; 147,086 pairs to train, 17,437 to test.

    Args:
        folder: holds ``new_aan_pairs.train.tsv`` and ``new_aan_pairs.test.tsv``: label, two names, two texts.
        length: bytes that are kept of a paper.

    Raises:
        FileNotFoundError: a file is missing; the message says where to get it.
        ValueError: a line has not these five columns; the message names it.
    """
    cutting = Cutting(length)
    parts = []
    for name in ("train", "test"):
        one: list[Ids] = []
        other: list[Ids] = []
        labels = []
        for first, second, label in _pairs(folder / f"new_aan_pairs.{name}.tsv"):
            one.append(cutting.cut(byte_ids(first)))
            other.append(cutting.cut(byte_ids(second)))
            labels.append(label)
        parts.append(Sequences(one, labels, other))
    return Split(parts[0], parts[1], _told(cutting, "papers"))


def image_folder(folder: Path) -> Split:
    """CIFAR-10 in grey, 1,024 pixels each; the first 45,000 images to train, the 10,000 test images to test.

    Args:
        folder: holds ``cifar-10-batches-py``, or is it.

    Raises:
        FileNotFoundError: it does not; the message says where to get it.
        ValueError: a file is not the published one.
    """
    import torchvision

    root = folder.parent if folder.name == "cifar-10-batches-py" else folder
    if not (root / "cifar-10-batches-py").is_dir():
        raise FileNotFoundError(f"there is no {root / 'cifar-10-batches-py'}. {CIFAR10}")
    try:
        parts = [torchvision.datasets.CIFAR10(str(root), train=train) for train in (True, False)]
    except RuntimeError as error:  # its checksums
        raise ValueError(f"{root / 'cifar-10-batches-py'}: {error}. {CIFAR10}") from error
    return _grey(*((part.data, np.array(part.targets)) for part in parts))


def image_hub() -> Split:
    """The same from the Hugging Face hub. Raises ConnectionError if it cannot be reached and holds no copy here."""
    loaded = _from_hub(CIFAR10_HUB)
    return _grey(
        *(
            (np.stack([np.asarray(row["img"]) for row in loaded[part]]), np.array(loaded[part]["label"]))
            for part in ("train", "test")
        )
    )


def grey(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """``(n, H, W, 3)`` to ``(n, H, W)``: 0.2989 R + 0.5870 G + 0.1140 B, rounded, as TensorFlow's rgb_to_grayscale.

    >>> grey(np.array([[[[255, 255, 255], [255, 0, 0]]]], np.uint8)).tolist()
    [[[255, 76]]]
    """
    weights = np.array([0.2989, 0.5870, 0.1140])
    return np.stack([np.floor(image @ weights + 0.5).clip(0, 255).astype(np.uint8) for image in images])


def _texts(train: Iterable[Text], test: Iterable[Text], *, length: int) -> Split:
    cutting = Cutting(length)
    parts = []
    for texts in (train, test):
        ids: list[Ids] = []
        labels = []
        for text, label in texts:
            ids.append(cutting.cut(byte_ids(text)))
            labels.append(label)
        parts.append(Sequences(ids, labels))
    return Split(parts[0], parts[1], _told(cutting, "reviews"))


def _told(cutting: Cutting, what: str) -> dict[str, Any]:
    report = cutting.report(what)
    if report is not None:
        warnings.warn(report, stacklevel=3)
    return {f"{what}_cut": cutting.longer}


def _reviews(folder: Path) -> Iterator[Text]:
    for label, name in enumerate(("neg", "pos")):
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise FileNotFoundError(f"there are no reviews (*.txt) in {folder / name}. {IMDB}")
        for path in paths:
            yield path.read_bytes(), label


def _pairs(path: Path) -> Iterator[Pair]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}. {AAN}")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            columns = line.rstrip(b"\r\n").split(b"\t")
            if len(columns) != 5 or columns[0] not in (b"0", b"1", b"0.0", b"1.0") or not all(columns[3:]):
                raise ValueError(
                    f"{path}, line {number}: expected a label 0 or 1, two names and two texts between tabs, got "
                    f"{len(columns)} columns that begin {line[:40]!r}"
                )
            yield columns[3], columns[4], int(float(columns[0]))


def _grey(train: tuple[Any, Any], test: tuple[Any, Any]) -> Split:
    count = CIFAR10_TRAINING
    return Split(Pixels(grey(train[0][:count]), train[1][:count]), Pixels(grey(test[0]), test[1]))


def _from_hub(name: str) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(name)
    except (OSError, ConnectionError) as error:
        raise ConnectionError(
            f"the data set {name} cannot be reached on the Hugging Face hub ({error}); "
            f"take --data-dir with a local copy"
        ) from error

"""Pathfinder on disk: images made here in files of numpy, or the Long Range Arena's folder of PNG files."""

from __future__ import annotations

import dataclasses
import random
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wellcond.data.images import Split
from wellcond.data.lra.generating import agree, write_parts, write_whole
from wellcond.data.lra.pathfinder import PUBLISHED, Drawing, Scene, draw
from wellcond.data.lra.sequences import Pixels

GENERATE = "Generate it: python -m wellcond.data.lra pathfinder FOLDER"
OFFICIAL = "curv_contour_length_14"
"""The folder of the Long Range Arena's hardest Pathfinder-32, below ``lra_release/pathfinder32``."""
Labels = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Images of each part: 200,000 in the proportion 8 : 1 : 1, as in the Long Range Arena."""

    train: int = 160_000
    val: int = 20_000
    test: int = 20_000

    @property
    def total(self) -> int:
        return self.train + self.val + self.test


COUNTS = Counts()


def drawing(scene: Scene, seed: int, index: int) -> Drawing:
    """Image ``index`` of a data set, which depends on these three arguments only."""
    return draw(scene, random.Random(f"pathfinder/{seed}/{index}"))


def drawings(scene: Scene, seed: int, part: range) -> tuple[npt.NDArray[np.uint8], Labels]:
    """Images ``(n, size, size)`` and labels ``(n,)``."""
    made = [drawing(scene, seed, index) for index in part]
    return np.stack([one.image for one in made]), np.array([one.label for one in made], np.uint8)


def pathfinder(scene: Scene, *, train: int, test: int, seed: int = 0) -> Split:
    """Images made in memory; each training image comes in its eight positions, turned and mirrored.

    >>> split = pathfinder(Scene(dashes=4), train=2, test=3)
    >>> len(split.train), len(split.test), split.test[0]["input_ids"].shape
    (16, 3, torch.Size([1024]))
    """
    images, labels = drawings(scene, seed, range(train + test))
    turned = [np.rot90(images[:train], quarter, (1, 2)) for quarter in range(4)]
    eight = np.concatenate([*turned, *(image[:, :, ::-1] for image in turned)])
    return Split(Pixels(eight, np.tile(labels[:train], 8)), Pixels(images[train:], labels[train:]))


def write_pathfinder(
    folder: Path, *, scene: Scene = PUBLISHED, counts: Counts = COUNTS, seed: int = 0, workers: int = 1
) -> None:
    """``train.npz``, ``val.npz`` and ``test.npz`` with ``images`` ``(n, size, size)`` and ``labels`` ``(n,)``, uint8.

    Interrupted, the same call goes on; files that are there already stay as they are.

    Raises:
        ValueError: the folder holds images of another seed, scene or number.
    """
    settings = {"seed": seed, "counts": dataclasses.asdict(counts), "scene": dataclasses.asdict(scene)}
    folder.mkdir(parents=True, exist_ok=True)
    agree(folder / "pathfinder.json", settings)
    files = {name: folder / f"{name}.npz" for name in ("train", "val", "test")}
    if all(path.exists() for path in files.values()):
        return
    parts = folder / "parts"
    paths = write_parts(partial(_write_part, scene, seed), counts.total, parts, settings, workers=workers)
    loaded = [_load(path) for path in paths]
    images, labels = (np.concatenate(arrays) for arrays in zip(*loaded, strict=True))
    if len({image.tobytes() for image in images}) < len(images):
        raise ValueError(
            f"{folder}: an image was drawn twice; draw fewer, larger ones, or choose another seed"
        )
    start = 0
    for name, path in files.items():
        part = slice(start, start + getattr(counts, name))
        write_whole(path, partial(_save, images[part], labels[part]))
        start = part.stop
    shutil.rmtree(parts)


def read_pathfinder(folder: Path, *, size: int) -> Split:
    """Training and test images of a folder: those made here, or the Long Range Arena's ``pathfinder32``.

    Raises:
        FileNotFoundError: it holds neither; the message says how to make it.
        ValueError: a file is broken, or images are not ``size`` pixels wide and high.
    """
    if (folder / "train.npz").is_file():
        train, test = (_load(folder / f"{name}.npz") for name in ("train", "test"))
    else:
        train, test = _official(folder)
    for images, _ in (train, test):
        if images.shape[1:] != (size, size):
            raise ValueError(
                f"{folder} has images of {images.shape[1:]} pixels, and the model reads {size}×{size}"
            )
    return Split(Pixels(*train), Pixels(*test))


def _write_part(scene: Scene, seed: int, part: range, path: Path) -> None:
    _save(*drawings(scene, seed, part), path)


def _save(images: npt.NDArray[np.uint8], labels: Labels, path: Path) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, images=images, labels=labels)


def _load(path: Path) -> tuple[npt.NDArray[np.uint8], Labels]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}. {GENERATE}")
    try:
        with np.load(path) as arrays:
            return arrays["images"], arrays["labels"]
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(
            f"{path} holds no images and labels ({error}); remove it and generate it anew"
        ) from error


def _official(folder: Path) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The first 80 % and the last 10 % of the images in an order shuffled once; the source shuffles without a seed."""
    from PIL import Image, UnidentifiedImageError

    root = next(
        (f for f in (folder, folder / OFFICIAL, folder / "pathfinder32" / OFFICIAL) if _has_tables(f)), None
    )
    if root is None:
        raise FileNotFoundError(
            f"{folder} holds neither train.npz, made here, nor {OFFICIAL}/metadata of the Long Range Arena "
            f"(https://storage.googleapis.com/long-range-arena/lra_release.gz). {GENERATE}"
        )
    images, labels, empty = [], [], 0
    for table in sorted((root / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name)):
        for number, line in enumerate(table.read_text(encoding="ascii").splitlines(), 1):
            words = line.split()
            if len(words) < 4 or words[3] not in ("0", "1"):
                raise ValueError(
                    f"{table}, line {number}: expected folder, file, number and label, got {line!r}"
                )
            path = root / words[0] / words[1]
            if path.is_file() and path.stat().st_size == 0:
                empty += 1
                continue
            try:
                images.append(np.asarray(Image.open(path).convert("L")))
            except (FileNotFoundError, UnidentifiedImageError) as error:
                raise ValueError(
                    f"{path}, named by {table}, is missing or no image; fetch it anew"
                ) from error
            labels.append(int(words[3]))
    if empty:
        # The published preparation leaves them out too; the release has one.
        warnings.warn(
            f"{empty} of {empty + len(images)} images in {root} are empty files and left out", stacklevel=4
        )
    order = list(range(len(images)))
    random.Random(0).shuffle(order)
    stacked, numbers = np.stack(images), np.array(labels, np.uint8)
    train, test = order[: len(order) * 8 // 10], order[len(order) * 9 // 10 :]
    return (stacked[train], numbers[train]), (stacked[test], numbers[test])


def _has_tables(folder: Path) -> bool:
    return any((folder / "metadata").glob("*.npy"))

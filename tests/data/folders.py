"""Generated data on disk: IDX files and folders of images."""

import gzip
from pathlib import Path

import numpy as np
from PIL import Image


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx_folder(
    folder: Path, train: int = 40, test: int = 20, size: int = 28, zipped: bool = False
) -> Path:
    """MNIST's four files with a bright row whose place is the label."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = np.arange(count) % 10
        images = noise.integers(0, 80, (count, size, size))
        images[np.arange(count), 2 * labels + 2] = 255
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx_bytes(array)
            path = folder / f"{part}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(content) if zipped else content)
    return folder


def write_image_folder(
    root: Path,
    classes: tuple[str, ...] = ("ant", "bee", "cat"),
    train: int = 4,
    val: int = 2,
    size: tuple[int, int] = (40, 32),
) -> Path:
    """``root/train/CLASS/*.jpg`` and ``root/val/CLASS/*.png``: noise around a colour that tells the class."""
    noise = np.random.default_rng(0)
    for part, count, ending in (("train", train, "jpg"), ("val", val, "png")):
        for label, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                pixels = noise.integers(0, 100, (size[1], size[0], 3))
                pixels[..., label % 3] += 120
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.{ending}")
    return root

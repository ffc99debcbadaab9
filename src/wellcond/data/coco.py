"""Images with objects in COCO's format: read from a local folder, checked before anything is trained.

Source of the format: https://cocodataset.org/#format-data.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from wellcond.data.folder import Corrupt, CorruptImage, read_rgb
from wellcond.data.images import Split

Transform = Callable[[dict[str, Any]], dict[str, Any]]
"""From an item whose image, boxes and masks are torchvision's tv_tensors to another."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One image's entry: its file, ``height, width`` in pixels, and its objects as the annotations have them."""

    image_id: int
    path: Path
    size: tuple[int, int]
    objects: tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Annotations:
    """A checked annotation file.

    Attributes:
        records: the images that are used, in order of their ids.
        categories: names by COCO's id, in order of the ids; label n is the n-th of them, counted from 1.
        found: what was noticed, with how often, for people.
    """

    records: tuple[Record, ...]
    categories: Mapping[int, str]
    found: Mapping[str, int]


class CocoImages(Dataset[dict[str, Tensor]]):
    """Items of detection, read from files.

    ``image (3, H, W)`` float32 from 0 to 1; for n objects ``boxes (n, 4)`` float32, left, top, right and bottom in
    pixels; ``labels (n,)`` int64 from 1; ``masks (n, H, W)`` uint8, if there are masks; ``iscrowd (n,)`` int64, 1 for
    a region that holds a crowd; ``area (n,)`` float32 as annotated; ``image_id ()`` int64. Boxes are cut at the edges
    of the image.

    Args:
        annotations: checked, see `read_annotations`.
        masks: whether to draw the objects' masks.
        transform: random changes; None: the image as it is.

    Raises:
        CorruptImage: an image cannot be read.
        ValueError: an image has another size than its annotation says, so that boxes would lie elsewhere.
    """

    def __init__(
        self, annotations: Annotations, *, masks: bool = True, transform: Transform | None = None
    ) -> None:
        self.annotations = annotations
        self.masks = masks
        self.transform = transform
        self.label_of = {id: label for label, id in enumerate(annotations.categories, 1)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.annotations.categories.values())

    @property
    def draws(self) -> bool:
        """Whether items are changed at random."""
        return self.transform is not None

    def __len__(self) -> int:
        return len(self.annotations.records)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        record = self.annotations.records[index]
        picture = read_rgb(record.path)
        if picture.size[::-1] != record.size:
            raise ValueError(
                f"{record.path} has {picture.height}×{picture.width} pixels, but its annotation says "
                f"{record.size[0]}×{record.size[1]}; use the images that the annotations were made for"
            )
        objects = record.objects
        item: dict[str, Any] = {
            "image": tv_tensors.Image(picture),
            "boxes": tv_tensors.BoundingBoxes(
                _corners(objects, record.size), format="XYXY", canvas_size=record.size
            ),
            "labels": torch.tensor([self.label_of[o["category_id"]] for o in objects], dtype=torch.int64),
            "iscrowd": torch.tensor([int(o.get("iscrowd", 0)) for o in objects], dtype=torch.int64),
            "area": torch.tensor([_area(o) for o in objects], dtype=torch.float32),
            "image_id": torch.tensor(record.image_id),
        }
        if self.masks:
            drawn = [draw_mask(o["segmentation"], *record.size) for o in objects]
            item["masks"] = tv_tensors.Mask(
                torch.stack(drawn) if drawn else torch.zeros(0, *record.size, dtype=torch.uint8)
            )
        if self.transform is not None:
            item = self.transform(item)
        item["image"] = functional.to_dtype(item["image"], torch.float32, scale=True)
        return {
            key: value.as_subclass(Tensor) if isinstance(value, tv_tensors.TVTensor) else value
            for key, value in item.items()
        }


def coco_folder(
    root: str | os.PathLike[str],
    train: Transform | None,
    *,
    year: str = "2017",
    masks: bool = True,
    corrupt: Corrupt = "fatal",
) -> tuple[Split, tuple[str, ...]]:
    """COCO as it is published, and the names of its classes: label 1 is the first.

    Args:
        root: the folder with ``annotations/instances_train2017.json``, ``annotations/instances_val2017.json``,
            ``train2017/`` and ``val2017/``.
        train: random changes of a training image.
        year: of the data set, in the names of folders and files.
        masks: whether objects must have masks.
        corrupt: ``"skip"`` leaves out training images whose files are missing, and says how many.

    Raises:
        FileNotFoundError, ValueError: a part is missing or wrong; the message says which and what to do.
    """
    folder = Path(root)
    parts = {}
    for part in ("train", "val"):
        file, images = folder / "annotations" / f"instances_{part}{year}.json", folder / f"{part}{year}"
        for path in (file, images):
            if not path.exists():
                raise FileNotFoundError(
                    f"there is no {path}; --data-dir names the folder that holds annotations/, train{year}/ and "
                    f"val{year}/ as https://cocodataset.org/#download has them, unzipped"
                )
        parts[part] = read_annotations(
            file,
            images,
            training=part == "train",
            masks=masks,
            corrupt=corrupt if part == "train" else "fatal",
        )
    first, second = parts["train"].categories, parts["val"].categories
    if first != second:
        differ = sorted(set(first.items()) ^ set(second.items()))[:5]
        raise ValueError(
            f"training and test categories of {folder} differ, first in {differ}: labels would mean two things"
        )
    return (
        Split(
            CocoImages(parts["train"], masks=masks, transform=train), CocoImages(parts["val"], masks=masks)
        ),
        tuple(first.values()),
    )


def read_annotations(
    file: str | os.PathLike[str],
    images: str | os.PathLike[str],
    *,
    training: bool,
    masks: bool = True,
    corrupt: Corrupt = "fatal",
) -> Annotations:
    """Read and check a file of COCO's instances against its folder of images.

    What makes no sense together is an error. What single objects or images lack is counted, and a warning says how
    often and what was done: an object whose box has no area, or that has no mask where masks are needed, is left out;
    in training an image without an object is left out, as in the recipes whose results are published.

    Args:
        file: the annotations, JSON.
        images: the folder that ``file_name`` is relative to.
        training: leave out images without an object (a crowd is none); test images all count.
        masks: whether objects must have masks.
        corrupt: ``"skip"`` leaves out images whose files are missing.

    Raises:
        ValueError: not JSON or not COCO's format; ids that occur twice; objects of unknown images or categories;
            no object at all; test objects without a mask, since leaving them out would change the score.
        FileNotFoundError: files are missing and ``corrupt`` is ``"fatal"``.
    """
    path, folder = Path(file), Path(images)
    content = _parsed(path)
    categories = {int(c["id"]): str(c["name"]) for c in sorted(content["categories"], key=lambda c: c["id"])}
    by_id = {int(image["id"]): image for image in content["images"]}
    for name, count, unique in (
        ("categories", len(content["categories"]), len(categories)),
        ("images", len(content["images"]), len(by_id)),
        ("annotations", len(content["annotations"]), len({o["id"] for o in content["annotations"]})),
    ):
        if count != unique:
            raise ValueError(f"{path}: ids of {name} occur more than once ({count} entries, {unique} ids)")
    _refuse_strangers(path, content["annotations"], by_id, categories)

    found: collections.Counter[str] = collections.Counter()
    objects: dict[int, list[Mapping[str, Any]]] = {id: [] for id in by_id}
    for entry in content["annotations"]:
        image = by_id[entry["image_id"]]
        fault = _fault(entry, (int(image["height"]), int(image["width"])), masks)
        if fault is not None:
            found[fault] += 1
            continue
        found["crowd regions, no objects to learn from"] += int(entry.get("iscrowd", 0))
        objects[entry["image_id"]].append(entry)
    if not any(objects.values()):
        raise ValueError(f"{path} holds no object that can be used{_listed(found)}")
    if not training and found[NO_MASK]:
        raise ValueError(
            f"{path}: {found[NO_MASK]} test objects have no mask, so that masks cannot be scored; give them one, or "
            f"score boxes only (masks=False)"
        )
    missing = _missing(folder, [str(image["file_name"]) for image in by_id.values()])
    if missing and corrupt == "fatal":
        raise FileNotFoundError(
            f"{len(missing)} of {len(by_id)} images of {path.name} are not in {folder} ({sorted(missing)[0]}, ...); "
            f"fetch them, or leave out training images that are missing with --corrupt skip"
        )
    records = []
    for id, image in sorted(by_id.items()):
        if image["file_name"] in missing:
            found["images without a file, left out"] += 1
        elif training and not any(not o.get("iscrowd", 0) for o in objects[id]):
            found["images without an object, left out of training"] += 1
        else:
            size = (int(image["height"]), int(image["width"]))
            records.append(Record(id, folder / image["file_name"], size, tuple(objects[id])))
    if not records:
        raise ValueError(f"{path} and {folder} have no image that can be used{_listed(found)}")
    found = collections.Counter({what: count for what, count in found.items() if count})
    if found:
        warnings.warn(f"{path.name}{_listed(found)}", stacklevel=2)
    return Annotations(tuple(records), categories, dict(found))


NO_AREA = "objects whose box has no area inside the image, left out"
NO_MASK = "objects without a mask, left out"


def _fault(entry: Mapping[str, Any], size: tuple[int, int], masks: bool) -> str | None:
    """Why an object cannot be used; None if it can."""
    (corners,) = _corners([entry], size).tolist()
    if corners[2] <= corners[0] or corners[3] <= corners[1]:
        return NO_AREA
    if masks and not _has_mask(entry.get("segmentation")):
        return NO_MASK
    return None


def _has_mask(segmentation: Any) -> bool:
    """Polygons of three corners or more, or runs."""
    if isinstance(segmentation, Mapping):
        return bool(segmentation.get("counts"))
    return bool(segmentation) and all(len(polygon) >= 6 for polygon in segmentation)


def _area(entry: Mapping[str, Any]) -> float:
    _, _, width, height = entry["bbox"]
    return float(entry.get("area", width * height))


def _corners(objects: Sequence[Mapping[str, Any]], size: tuple[int, int]) -> Tensor:
    """Boxes ``(n, 4)`` as corners, cut at the edges of an image of this height and width."""
    boxes = torch.tensor([o["bbox"] for o in objects], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    height, width = size
    return torch.minimum(boxes.clamp(min=0), torch.tensor([width, height, width, height]).float())


def draw_mask(segmentation: Any, height: int, width: int) -> Tensor:
    """A mask ``(H, W)`` uint8 from COCO's polygons, or from its runs, compressed or not.

    >>> draw_mask([[1, 0, 3, 0, 3, 2, 1, 2]], 3, 4).tolist()
    [[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    >>> draw_mask({"size": [2, 3], "counts": [2, 2, 2]}, 2, 3).tolist()
    [[0, 1, 0], [0, 1, 0]]
    """
    from faster_coco_eval.core import mask as runs

    if isinstance(segmentation, Mapping):
        plain = isinstance(segmentation["counts"], list)
        drawn = runs.frPyObjects(segmentation, height, width) if plain else segmentation
    else:
        drawn = runs.merge(runs.frPyObjects(segmentation, height, width))
    if list(drawn["size"]) != [height, width]:
        raise ValueError(f"a mask of size {drawn['size']} does not fit an image of {height}×{width} pixels")
    return torch.from_numpy(runs.decode(drawn))


def _parsed(path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); fetch it anew") from error
    missing = [
        key
        for key in ("images", "annotations", "categories")
        if not isinstance(content, dict) or not isinstance(content.get(key), list)
    ]
    if missing:
        raise ValueError(f"{path} is not COCO's format of instances: it has no list of {', '.join(missing)}")
    for key, fields in (
        ("images", ("id", "file_name", "height", "width")),
        ("annotations", ("id", "image_id", "category_id", "bbox")),
        ("categories", ("id", "name")),
    ):
        for entry in content[key]:
            lacking = [field for field in fields if field not in entry]
            if lacking:
                raise ValueError(f"{path}: an entry of {key} has no {', '.join(lacking)}: {str(entry)[:200]}")
    checked: dict[str, Any] = content
    return checked


def _refuse_strangers(
    path: Path,
    annotations: Sequence[Mapping[str, Any]],
    images: Mapping[int, Any],
    categories: Mapping[int, str],
) -> None:
    for field, known, what in (("image_id", images, "image"), ("category_id", categories, "category")):
        strange = [entry for entry in annotations if entry[field] not in known]
        if strange:
            raise ValueError(
                f"{path}: {len(strange)} objects are of an unknown {what}, first {field} {strange[0][field]} of "
                f"annotation {strange[0]['id']}; the file was put together from two, or cut"
            )


def _missing(folder: Path, names: Sequence[str]) -> set[str]:
    """Names without a file. One listing per folder, for a look-up of each file is slow over a network."""
    listed = {
        parent: {entry.name for entry in os.scandir(folder / parent)} if (folder / parent).is_dir() else set()
        for parent in {os.path.dirname(name) for name in names}
    }
    return {name for name in names if os.path.basename(name) not in listed[os.path.dirname(name)]}


def _listed(found: Mapping[str, int]) -> str:
    return "".join(f"; {count} {what}" for what, count in found.items() if count)


__all__ = [
    "Annotations",
    "CocoImages",
    "CorruptImage",
    "Record",
    "coco_folder",
    "draw_mask",
    "read_annotations",
]

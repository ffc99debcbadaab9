"""COCO's format: what is read is what is there, and what is wrong is said before anything is trained."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as reference
from torchvision.ops import masks_to_boxes

from tests.data.coco_folders import CATEGORIES, content, entry, nuclei, street, trees, write_coco, write_part
from wellcond.data.coco import NO_AREA, NO_MASK, CocoImages, coco_folder, draw_mask, read_annotations
from wellcond.data.detection_transforms import augmentation
from wellcond.data.folder import CorruptImage


def read(
    root: Path, annotations: dict[str, Any] | None = None, part: str = "train", **options: Any
) -> CocoImages:
    """A part of a folder, its annotation file written anew if given; the images stay."""
    file = root / "annotations" / f"instances_{part}2017.json"
    if annotations is not None:
        file.write_text(json.dumps(annotations))
    options = {"training": part == "train"} | options
    return CocoImages(
        read_annotations(file, root / f"{part}2017", **options), masks=options.get("masks", True)
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_coco(tmp_path)


# ------------------------------------------------------------------------------------------------ what is read


def test_an_item_has_what_the_annotations_say(root: Path) -> None:
    item = read(root)[0]
    assert item["image"].shape == (3, 48, 64)
    assert item["image"].dtype == torch.float32
    assert 0 <= item["image"].min() <= item["image"].max() <= 1
    assert item["boxes"].tolist() == [[5, 6, 21, 22], [32, 24, 48, 36]]
    assert item["labels"].tolist() == [1, 2]  # ids 1 and 7
    assert item["iscrowd"].tolist() == [0, 0]
    assert item["area"].tolist() == [256, 96]
    assert item["masks"].dtype == torch.uint8
    assert item["masks"][0].sum() == 256
    assert torch.equal(masks_to_boxes(item["masks"][:1]), torch.tensor([[5.0, 6.0, 20.0, 21.0]]))
    assert all(type(value) is torch.Tensor for value in item.values())


@pytest.mark.parametrize("kind", ["polygons", "runs", "compressed runs"])
def test_masks_are_those_of_the_reference(kind: str) -> None:
    polygons = [[3.3, 2.0, 30.9, 5.5, 20.1, 25.2], [40.0, 10.0, 45.0, 10.0, 45.0, 30.0]]
    run = reference.merge(reference.frPyObjects(polygons, 40, 50))
    mask = reference.decode(run)
    plain = np.flatnonzero(np.diff(np.concatenate([[0], mask.T.flatten(), [2]])))
    counts = np.diff(np.concatenate([[0], plain])).tolist()
    given = {
        "polygons": polygons,
        "runs": {"size": [40, 50], "counts": counts},
        "compressed runs": {"size": [40, 50], "counts": run["counts"].decode()},
    }[kind]
    assert np.array_equal(draw_mask(given, 40, 50).numpy(), mask)


def test_a_mask_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"size \[2, 3\] does not fit an image of 4×4"):
        draw_mask({"size": [2, 3], "counts": [2, 2, 2]}, 4, 4)


def test_both_parts_and_the_names(root: Path) -> None:
    split, names = coco_folder(root, None)
    assert names == ("square", "triangle")
    assert [len(part) for part in (split.train, split.test)] == [4, 2]  # type: ignore[arg-type]
    assert split.test.names == names  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------ what single objects lack


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ({"bbox": [5, 5, 0, 8]}, NO_AREA),
        ({"bbox": [5, 5, 8, 0]}, NO_AREA),
        ({"bbox": [5, 5, -3, 8]}, NO_AREA),
        ({"bbox": [70, 5, 8, 8]}, NO_AREA),  # beyond the right edge
        ({"segmentation": []}, NO_MASK),
        ({"segmentation": [[1, 1, 5, 5]]}, NO_MASK),  # two corners
        ({"segmentation": None}, NO_MASK),
        ({"segmentation": {"size": [48, 64], "counts": []}}, NO_MASK),
    ],
)
def test_such_an_object_is_left_out_and_counted(root: Path, fault: dict[str, Any], what: str) -> None:
    annotations = content(4)
    annotations["annotations"][0] |= fault
    with pytest.warns(UserWarning, match=f"1 {what}"):
        images = read(root, annotations)
    assert images.annotations.found == {what: 1}
    assert [len(images[i]["labels"]) for i in range(4)] == [1, 2, 2, 2]


def test_without_masks_only_boxes_must_be_there(root: Path) -> None:
    annotations = content(4)
    for o in annotations["annotations"]:
        del o["segmentation"]
    images = read(root, annotations, masks=False)
    assert "masks" not in images[0]
    assert images.annotations.found == {}


def test_boxes_are_cut_at_the_edges(root: Path) -> None:
    annotations = content(4)
    annotations["annotations"][0]["bbox"] = [-3.5, -1, 90, 20]
    assert read(root, annotations)[0]["boxes"][0].tolist() == [0, 0, 64, 19]


def test_a_crowd_is_kept_and_marked(root: Path) -> None:
    annotations = content(4)
    annotations["annotations"][0] |= {
        "iscrowd": 1,
        "segmentation": {"size": [48, 64], "counts": [100, 50, 2922]},
    }
    with pytest.warns(UserWarning, match="1 crowd regions"):
        item = read(root, annotations)[0]
    assert item["iscrowd"].tolist() == [1, 0]
    assert item["masks"][0].sum() == 50


@pytest.mark.parametrize("left", [[], [{"iscrowd": 1}]])
def test_images_without_an_object_are_left_out_of_training_only(
    root: Path, left: list[dict[str, Any]]
) -> None:
    annotations = content(4)
    annotations["annotations"] = annotations["annotations"][2:]
    annotations["annotations"] += [entry(99, 1, (1, 1, 9, 9), **change) for change in left]
    with pytest.warns(UserWarning, match="1 images without an object, left out of training"):
        assert [r.image_id for r in read(root, annotations).annotations.records] == [2, 3, 4]
    write_part(root, "val", annotations)
    images = CocoImages(
        read_annotations(root / "annotations/instances_val2017.json", root / "val2017", training=False)
    )
    assert len(images) == 4
    assert images[0]["boxes"].shape == (len(left), 4)
    assert images[0]["masks"].shape == (len(left), 48, 64)


def test_missing_images(root: Path) -> None:
    (root / "train2017" / "000000000002.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 4 images .* --corrupt skip"):
        coco_folder(root, None)
    with pytest.warns(UserWarning, match="1 images without a file, left out"):
        split, _ = coco_folder(root, None, corrupt="skip")
    assert len(split.train) == 3  # type: ignore[arg-type]
    (root / "val2017" / "000000000001.jpg").unlink()
    with (
        pytest.warns(UserWarning, match="1 images without a file"),
        pytest.raises(FileNotFoundError, match="1 of 2"),
    ):
        coco_folder(root, None, corrupt="skip")


# --------------------------------------------------------------------------------------- what makes no sense together


def changed(**changes: Any) -> dict[str, Any]:
    return content(4) | changes


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        (changed(annotations=[entry(1, 77, (1, 1, 5, 5))]), "1 objects are of an unknown image, first image_id 77"),
        (
            changed(annotations=[entry(1, 1, (1, 1, 5, 5), category_id=3)]),
            "1 objects are of an unknown category, first category_id 3",
        ),
        (changed(annotations=[]), "holds no object that can be used"),
        (changed(annotations=[entry(1, 1, (1, 1, 0, 5))]), f"no object that can be used; 1 {NO_AREA}"),
        (changed(categories=[*CATEGORIES, CATEGORIES[0]]), "ids of categories occur more than once"),
        (changed(images=content(4)["images"] * 2), "ids of images occur more than once"),
        (changed(annotations=[entry(1, 1, (1, 1, 5, 5))] * 2), "ids of annotations occur more than once"),
        (changed(annotations=[{"id": 1, "image_id": 1}]), "an entry of annotations has no category_id, bbox"),
        (changed(categories=None), "has no list of categories"),
        ([1, 2], "has no list of images, annotations, categories"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(root: Path, annotations: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(root, annotations)


def test_no_json(root: Path) -> None:
    (root / "annotations" / "instances_train2017.json").write_text('{"images": [')
    with pytest.raises(ValueError, match="is no JSON"):
        coco_folder(root, None)


@pytest.mark.parametrize("missing", ["annotations/instances_val2017.json", "train2017"])
def test_missing_parts_say_where_they_belong(root: Path, missing: str) -> None:
    (root / missing).rename(root / "elsewhere")
    with pytest.raises(FileNotFoundError, match=f"there is no .*{missing}; --data-dir names the folder"):
        coco_folder(root, None)


def test_other_categories_in_the_test_part(root: Path) -> None:
    write_part(root, "val", content(2) | {"categories": [CATEGORIES[0], {"id": 7, "name": "circle"}]})
    with pytest.raises(
        ValueError, match=r"categories .* differ, first in \[\(7, 'circle'\), \(7, 'triangle'\)\]"
    ):
        coco_folder(root, None)


def test_test_objects_without_a_mask_would_change_the_score(root: Path) -> None:
    annotations = content(2)
    annotations["annotations"][0]["segmentation"] = []
    with pytest.raises(ValueError, match="1 test objects have no mask"):
        read(root, annotations, part="val")


def test_an_image_of_another_size_or_none_at_all(root: Path) -> None:
    annotations = content(4)
    annotations["images"][0]["width"] = 65
    with pytest.raises(ValueError, match=r"has 48×64 pixels, but its annotation says 48×65"):
        read(root, annotations)[0]
    (root / "train2017" / "000000000001.jpg").write_bytes(b"no image")
    with pytest.raises(CorruptImage, match=r"000000000001\.jpg"):
        read(root, content(4))[0]


# --------------------------------------------------------------------------------------------------- random changes


@pytest.mark.parametrize("seed", range(6))
def test_boxes_follow_their_masks_through_the_augmentation(root: Path, seed: int) -> None:
    images = read(root)
    images.transform = augmentation((24, 40, 56), 80, (30, 36), (20, 28))
    torch.manual_seed(seed)
    for index in range(4):
        item = images[index]
        height, width = item["image"].shape[-2:]
        assert min(height, width) in (24, 40, 56) or max(height, width) == 80
        assert max(height, width) <= 80
        count = len(item["labels"])
        assert [len(item[key]) for key in ("boxes", "masks", "iscrowd", "area")] == [count] * 4
        assert item["masks"].shape[-2:] == (height, width)
        squares = item["labels"] == 1  # a triangle that is cut does not fill its box
        for box, mask in zip(item["boxes"][squares], item["masks"][squares], strict=True):
            drawn = masks_to_boxes(mask[None])[0] + torch.tensor([0, 0, 1, 1])
            # A pixel of each resizing, the first one enlarged.
            assert (drawn - box).abs().max() <= 1 + 56 / 20


def test_a_crop_without_an_object_has_none(root: Path) -> None:
    images = read(root)
    images.transform = augmentation((40,), 80, (400,), (5, 5))
    torch.manual_seed(0)
    counts = [len(images[i % 4]["labels"]) for i in range(30)]
    assert 0 in counts
    assert 2 in counts


def test_workers_can_be_sent_the_data(root: Path) -> None:
    images = read(root)
    images.transform = augmentation()
    assert len(pickle.loads(pickle.dumps(images))) == 4


# ------------------------------------------------------------------------------------- real photographs, if installed


def test_trees_from_above(tmp_path: Path) -> None:
    images = read(trees(tmp_path), masks=False)
    assert len(images) == 4
    assert sum(len(record.objects) for record in images.annotations.records) == 951
    item = images[2]
    assert item["image"].shape == (3, 400, 400)
    assert (item["boxes"][:, 2:] > item["boxes"][:, :2]).all()


@pytest.mark.parametrize(("source", "count"), [(street, 19), (nuclei, 125)])
def test_photographs_with_masks(source: Any, count: int, tmp_path: Path) -> None:
    item = read(source(tmp_path))[0]
    assert len(item["masks"]) == count
    drawn = masks_to_boxes(item["masks"])
    drawn[:, 2:] += 1
    assert torch.allclose(drawn, item["boxes"])
    assert torch.equal(item["masks"].flatten(1).sum(1).float(), item["area"])

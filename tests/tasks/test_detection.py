"""Detection: COCO's own evaluation on the same predictions gives the same scores, and nothing found is 0."""

import base64
import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as runs
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn
from torch.utils.data import Subset

from wellcond.data.canvases import as_item, digit_canvases
from wellcond.tasks import Detection
from wellcond.tasks.detection import AveragePrecision, Judged, class_names, compressed
from wellcond.training.engine import RecipeTrainer

CLASSES = 3
SIZE = (160, 200)
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
"""The first six numbers of COCOeval, in its order."""


# --------------------------------------------------------------------------------------- scores against the reference


def ellipses(boxes: Tensor) -> Tensor:
    """Masks ``(n, H, W)`` bool: an ellipse in each box."""
    rows, columns = torch.meshgrid(torch.arange(SIZE[0]) + 0.5, torch.arange(SIZE[1]) + 0.5, indexing="ij")
    left, top, right, bottom = (edge[:, None, None] for edge in boxes.unbind(1))
    across = (columns - (left + right) / 2) / ((right - left) / 2)
    along = (rows - (top + bottom) / 2) / ((bottom - top) / 2)
    return across.square() + along.square() <= 1


def judged(seed: int) -> Judged:
    """An image with objects of all three sizes, some crowds; most are found, not quite, some twice, some invented."""
    torch.manual_seed(seed)
    count = 8
    edges = torch.tensor([12.0, 20.0, 40.0, 60.0, 90.0, 110.0])[torch.randint(6, (count, 2))]
    starts = torch.rand(count, 2) * (torch.tensor([SIZE[1], SIZE[0]]) - edges - 8) + 4
    boxes = torch.cat([starts, starts + edges], 1)
    masks = ellipses(boxes)
    labels = torch.randint(1, CLASSES + 1, (count,))
    there = {
        "boxes": boxes,
        "labels": labels,
        "iscrowd": (torch.rand(count) < 0.2).long(),
        "area": masks.flatten(1).sum(1).float(),
        "masks": compressed(masks),
    }
    which = torch.cat([torch.randperm(count)[:6], torch.randint(count, (4,))])
    moved = boxes[which] + torch.randn(len(which), 4) * edges[which].repeat(1, 2) * 0.07
    moved[:, 2:] = torch.maximum(moved[:, 2:], moved[:, :2] + 3)
    moved[-1] += 500  # found where nothing is
    guessed = torch.where(
        torch.rand(len(which)) < 0.85, labels[which], torch.randint(1, CLASSES + 1, (len(which),))
    )
    found = {
        "boxes": moved,
        "labels": guessed,
        "scores": torch.rand(len(which)),
        "masks": compressed(ellipses(moved)),
    }
    return Judged(found, there)


def by_the_reference(images: list[Judged], kind: str) -> dict[str, float]:
    """COCO's own evaluation, from COCO's own files."""

    def described(objects: dict[str, Any], i: int) -> dict[str, Any]:
        left, top, right, bottom = objects["boxes"][i].double().tolist()
        run = objects["masks"][i]
        return {
            "category_id": int(objects["labels"][i]),
            "bbox": [left, top, right - left, bottom - top],
            "segmentation": {"size": run["size"], "counts": run["counts"]},
        }

    annotations, results = [], []
    for number, image in enumerate(images):
        for i in range(len(image.there["labels"])):
            annotations.append(
                described(image.there, i)
                | {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "iscrowd": int(image.there["iscrowd"][i]),
                    "area": float(image.there["area"][i]),
                }
            )
        for i in range(len(image.found["labels"])):
            result = described(image.found, i) | {
                "image_id": number,
                "score": float(image.found["scores"][i]),
            }
            # With a mask its area would count for boxes too, as in COCO.loadRes: results come as boxes or as masks.
            del result["bbox" if kind == "segm" else "segmentation"]
            results.append(result)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "info": {},
            "images": [{"id": i, "height": SIZE[0], "width": SIZE[1]} for i in range(len(images))],
            "annotations": annotations,
            "categories": [{"id": i, "name": str(i)} for i in range(1, CLASSES + 1)],
        }
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: 100 * float(value) for name, value in zip(NAMES, evaluation.stats[:6], strict=True)}


def scores(images: list[Judged], *, masks: bool = True) -> dict[str, float]:
    scorer = AveragePrecision(masks=masks)
    for image in images:
        scorer.update([image])
    return scorer.compute()


def test_scores_are_those_of_cocos_own_evaluation() -> None:
    images = [judged(seed) for seed in range(12)]
    assert sum(int(image.there["iscrowd"].sum()) for image in images) > 5
    found = scores(images)
    for kind, name in (("bbox", "box"), ("segm", "mask")):
        expected = {f"{name}_{key}": value for key, value in by_the_reference(images, kind).items()}
        assert all(5 < value < 95 for value in expected.values()), expected
        assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-4)
    boxes_only = scores(images, masks=False)
    assert boxes_only["box_ap"] == pytest.approx(found["box_ap"], abs=1e-4)
    assert not any(key.startswith("mask") for key in boxes_only)


def without(image: Judged) -> Judged:
    """The same image with nothing found."""
    nothing = {key: value[:0] for key, value in image.found.items()}
    return Judged(nothing, image.there)


def test_nothing_found_is_zero() -> None:
    found = scores([without(judged(seed)) for seed in range(3)])
    assert set(found) == {f"{kind}_{name}" for kind in ("box", "mask") for name in NAMES}
    assert set(found.values()) == {0.0}


def test_a_size_that_no_object_has_is_left_out() -> None:
    image = judged(0)
    small = image.there["area"] < 32**2
    masks = [mask for mask, kept in zip(image.there["masks"], small, strict=True) if kept]
    there = {key: value[small] for key, value in image.there.items() if key != "masks"} | {"masks": masks}
    assert {key.removeprefix("box_") for key in scores([Judged(image.found, there)]) if key.startswith("box")} == {
        "ap", "ap50", "ap75", "ap_small"
    }  # fmt: skip


def test_an_image_without_objects_counts_only_with_others() -> None:
    image = judged(1)
    empty = {key: value[:0] for key, value in image.there.items()}
    with pytest.raises(ValueError, match="none of 1 test images holds an object"):
        scores([Judged(image.found, empty)])
    with pytest.raises(ValueError, match="no image to score"):
        scores([])
    both = scores([image, Judged(image.found, empty)])
    assert 0 < both["box_ap"] < scores([image])["box_ap"]  # what is found on it is wrong


def test_scores_are_of_a_list() -> None:
    with pytest.raises(TypeError, match="list of Judged"):
        AveragePrecision(masks=True).update({"loss": torch.ones(1)})


def test_the_headline_is_one_of_the_scores() -> None:
    with pytest.raises(ValueError, match="no score 'mask_ap'; choose among box_ap, box_ap50"):
        Detection(masks=False, headline="mask_ap")


# ------------------------------------------------------------------------------------------------- batches and examples


def item(crowds: list[int], size: tuple[int, int] = (30, 40)) -> dict[str, Tensor]:
    masks = torch.zeros(len(crowds), *size, dtype=torch.bool)
    for i in range(len(crowds)):
        masks[i, 5 * i : 5 * i + 5, 3:20] = True
    made = as_item(torch.rand(3, *size), masks, torch.arange(1, len(crowds) + 1), 7)
    return made | {"iscrowd": torch.tensor(crowds)}


def test_crowds_are_no_objects_to_learn_from() -> None:
    task = Detection()
    batch = task.collate([item([0, 1, 0]), item([1])])
    images, learnt = task.inputs(batch, training=True)
    assert [tuple(image.shape) for image in images] == [(3, 30, 40)] * 2
    assert [target["labels"].tolist() for target in learnt] == [[1, 3], []]
    assert [len(target["masks"]) for target in learnt] == [2, 0]
    (alone,) = task.inputs(batch, training=False)
    assert len(alone) == 2
    assert "masks" not in Detection(masks=False).inputs(batch, training=True)[1][0]
    with pytest.raises(ValueError, match="returns detections and no loss"):
        task.loss([{}], batch, training=False)


class Finds(nn.Module):
    """A "detector" that finds what it is told to, at two scores."""

    def __init__(self, found: list[dict[str, Tensor]]) -> None:
        super().__init__()
        self.found = found
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self.found.pop(0) for _ in images]


def test_examples_show_what_is_certain_and_what_is_there() -> None:
    test = digit_canvases(train=1, test=6).test
    found = []
    for i in range(4):
        sample = test[i]
        n = len(sample["labels"])
        found.append(
            {
                "boxes": sample["boxes"],
                "labels": sample["labels"],
                "scores": torch.tensor([0.9, *[0.3] * (n - 1)]),
                "masks": sample["masks"][:, None].float(),
            }
        )
    shown = Detection().examples(Finds(found), Subset(test, range(6)))
    assert len(shown) == 4
    for i, example in enumerate(shown):
        sample = test[i]
        picture = np.array(Image.open(io.BytesIO(base64.b64decode(example["image"])))) / 255
        assert np.abs(picture - sample["image"][0].numpy()).max() < 0.01
        assert [o["name"] for o in example["there"]] == [
            str(label - 1) for label in sample["labels"].tolist()
        ]
        (certain,) = example["found"]
        assert certain["score"] == 0.9
        assert certain["box"] == sample["boxes"][0].tolist()
        drawn = runs.decode({**certain["mask"], "counts": certain["mask"]["counts"].encode()})
        assert np.array_equal(drawn, sample["masks"][0].numpy())


def test_names_of_a_part_are_those_of_the_whole() -> None:
    assert class_names(Subset(digit_canvases(train=1, test=2).test, [1])) == tuple("0123456789")


def test_micro_batches_weigh_as_many_images_as_they_have() -> None:
    """Three images in micro-batches of two and one give the mean over three, not the mean of two means."""
    task = Detection()
    trainer: Any = object.__new__(RecipeTrainer)
    trainer.task, trainer.current_gradient_accumulation_steps = task, 2
    parts = [task.collate([item([0]), item([0])]), task.collate([item([0])])]

    class Loss(nn.Module):
        """As detectors have it: the mean over the images of a batch, here of their labels' numbers."""

        def forward(self, images: list[Tensor], targets: Any) -> dict[str, Tensor]:
            return {"loss": torch.stack([image.mean() for image in images]).mean()}

    trainer._batch_samples = 3
    losses = [trainer.compute_loss(Loss(), part) for part in parts]
    expected = torch.stack([image.mean() for part in parts for image in part["images"]]).mean()
    assert torch.allclose(sum(losses) / 2, expected)  # type: ignore[arg-type]

"""Mask R-CNN with XCiT-S12/16 and XCiT-M24/16 on COCO 2017: boxes and masks, the 3× schedule.

Numbers are of https://github.com/facebookresearch/xcit, folder detection/ ("[config]": configs/xcit/
mask_rcnn_xcit_small_12_p16_3x_coco.py and _medium_24_p16_, "[base]": configs/_base_/), unless another source is named.
The published models have 45.3 box AP and 40.8 mask AP (S12/16) and 46.7 and 42.0 (M24/16) there (README.md); the paper
on conditioned tokens reports 44.9 and 40.1, and 45.7 and 40.8, for its baselines.

Training starts from ImageNet weights: `--pretrained FILE` names a local one. docs/detection.md lists what differs.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from pathlib import Path

from torch import nn

from wellcond.data import Split
from wellcond.data.coco import coco_folder
from wellcond.data.detection_transforms import augmentation
from wellcond.recipes.ingredients import Drops
from wellcond.recipes.recipe import Paper, Recipe, Source
from wellcond.tasks import Detection

CLASSES = 80
EPOCHS = 36
IMAGES = 117_266
"""Training images of COCO 2017 with an object, https://cocodataset.org."""


@dataclasses.dataclass(frozen=True)
class Backbone:
    """An XCiT and where its feature maps are taken.

    Attributes:
        name: timm's.
        blocks: for strides 4, 8, 16 and 32.
        drop_path: stochastic depth, the same in every block.
    """

    name: str
    blocks: tuple[int, int, int, int]
    drop_path: float


SMALL = Backbone("xcit_small_12_p16_224", (3, 5, 7, 11), 0.05)  # [config] out_indices, drop_path_rate
# [config] says patch_size 8 for the model with patches of 16, which can only be a slip: its file of weights has 16.
MEDIUM = Backbone("xcit_medium_24_p16_224", (7, 11, 15, 23), 0.15)


def coco_mask_rcnn(backbone: Backbone, weights: Path | None = None) -> nn.Module:
    """Mask R-CNN for COCO's 80 classes, the backbone's weights from a file or fresh.

    Raises FileNotFoundError or ValueError if the file is missing or of another model.
    """
    from wellcond.models.mask_rcnn import mask_rcnn
    from wellcond.models.xcit_pyramid import TokenPyramid, xcit_body

    body = xcit_body(backbone.name, weights=weights, drop_path_rate=backbone.drop_path)
    return mask_rcnn(
        TokenPyramid(body, backbone.blocks),  # [base]/models: FPN of 256 channels and five levels
        CLASSES,
        min_size=800,  # [base]/datasets test_pipeline: img_scale (1333, 800)
        max_size=1333,
        rpn_post_nms_top_n_train=1000,  # [base]/models rpn_proposal max_per_img; torchvision has 2000
    )


def read_coco(source: Source) -> Split:
    """COCO 2017 from a folder, with what was found in its annotations.

    Raises FileNotFoundError or ValueError if no folder is given or its content is wrong; messages say how to mend it.
    """
    if source.hub:
        raise ValueError("COCO is read from a local folder and not streamed: leave --hub out")
    if source.folder is None:
        raise FileNotFoundError(
            "COCO has no usual place: --data-dir names the folder that holds annotations/, train2017/ and val2017/ "
            "as https://cocodataset.org/#download has them, unzipped"
        )
    split, names = coco_folder(source.folder, augmentation(), corrupt=source.corrupt)
    if len(names) > CLASSES:
        raise ValueError(f"there are {len(names)} categories, but the model has {CLASSES} classes")
    if len(names) < CLASSES:
        warnings.warn(
            f"{len(names)} categories for {CLASSES} classes: good for a smoke run, but this is not COCO",
            stacklevel=2,
        )
    return split


def from_random_weights(backbone: Backbone) -> nn.Module:
    """The model without a file of weights, which is said: nothing published starts like that."""
    warnings.warn(
        "the backbone starts from random weights, but the published results start from weights of ImageNet: "
        "--pretrained FILE names those of XCiT's authors or of timm",
        stacklevel=2,
    )
    return coco_mask_rcnn(backbone)


def started(recipe: Recipe, backbone: Backbone, file: Path) -> Recipe:
    """The recipe on a backbone whose weights are in ``file``; FileNotFoundError if it is not there."""
    from wellcond.models.xcit_pyramid import weights_file

    return dataclasses.replace(recipe, model=partial(coco_mask_rcnn, backbone, weights_file(file)))


def coco_recipe(name: str, title: str, backbone: Backbone, paper: Paper) -> Recipe:
    """Mask R-CNN with this backbone; both sizes share every other number."""
    recipe = Recipe(
        name=name,
        title=title,
        model=partial(from_random_weights, backbone),
        data=partial(read_coco, Source()),
        read=read_coco,
        task=Detection(),
        epochs=EPOCHS,  # [config] runner max_epochs
        batch_size=16,  # [base]/datasets samples_per_gpu 2, README.md on 8 GPUs
        micro_batch=2,
        learning_rate=1e-4,  # [config] optimizer AdamW, betas 0.9 and 0.999
        weight_decay=0.05,
        # [config] spares what has "norm" in its name. Positions are named there as other models call them; spared here
        exempt=("backbone.body.pos_embed.*",),
        schedule=Drops(
            after_epochs=(27, 33),  # [config] lr_config step
            warmup_steps=500,  # [base]/schedules warmup_iters
            warmup_ratio=0.001,  # warmup_ratio
        ),
        max_gradient_norm=None,  # [config] grad_clip None
        drop_last=True,
        mixed_precision=True,  # float16 there (apex), bfloat16 here
        synchronise_norms=True,  # backbone/xcit.py: SyncBatchNorm
        workers=2,  # [base]/datasets workers_per_gpu
        evaluations=EPOCHS,  # mmdet scores once an epoch
        measurements=EPOCHS,  # ours: every epoch, as the paper averages over epochs
        evaluation_batch=2,
        arms=("baseline", "conditioned", "rescaled", "scaled"),
        paper=paper,
        cost="not measured; the source trains on 8 GPUs",
    )
    return dataclasses.replace(recipe, pretrained=partial(started, recipe, backbone))


MASKRCNN_XCIT_S_COCO = coco_recipe(
    "maskrcnn-xcit-s-coco", "Mask R-CNN with XCiT-S12/16 on COCO 2017", SMALL, Paper(44.9, 45.7)
)
MASKRCNN_XCIT_M_COCO = coco_recipe(
    "maskrcnn-xcit-m-coco", "Mask R-CNN with XCiT-M24/16 on COCO 2017", MEDIUM, Paper(45.7, 46.2)
)
MASKRCNN_COCO = (MASKRCNN_XCIT_S_COCO, MASKRCNN_XCIT_M_COCO)

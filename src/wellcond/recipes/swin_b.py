"""Swin-B on ImageNet-1k, as in "Swin Transformer", arXiv 2103.14030.

Every number is of https://github.com/microsoft/Swin-Transformer: config.py, unless another file is named. The published
model has 83.5 % (get_started.md).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from wellcond.recipes.imagenet import CLASSES, Augmentation, cost, read_imagenet
from wellcond.recipes.ingredients import Schedule
from wellcond.recipes.recipe import WITHOUT_POSITIONS, Paper, Recipe, Source
from wellcond.tasks import ImageClassification, Mixing

EPOCHS = 300  # TRAIN.EPOCHS
BATCH_SIZE = 1024  # get_started.md, Swin-B: 8 GPUs, --batch-size 64 --accumulation-steps 2

AUGMENTATION = Augmentation(
    color_jitter=0.4,  # AUG.COLOR_JITTER; timm leaves it out where RandAugment is on, there as here
    auto_augment="rand-m9-mstd0.5-inc1",  # AUG.AUTO_AUGMENT
    erase=0.25,  # AUG.REPROB, REMODE pixel, RECOUNT 1
    interpolation="bicubic",  # DATA.INTERPOLATION
    crop_share=224 / 256,  # data/build.py build_transform: resize to 256 and crop (TEST.CROP)
)


def swin_b(**changes: Any) -> nn.Module:
    """timm's swin_base_patch4_window7_224 with stochastic depth; ``changes`` are further arguments."""
    import timm

    # configs/swin/swin_base_patch4_window7_224.yaml: DROP_PATH_RATE; MODEL.DROP_RATE 0
    options = {"num_classes": CLASSES, "drop_path_rate": 0.5}
    model: nn.Module = timm.create_model("swin_base_patch4_window7_224", **(options | changes))
    return model


read = partial(read_imagenet, augmentation=AUGMENTATION)

SWIN_B_IMAGENET = Recipe(
    name="swin-b-imagenet",
    title="Swin-B on ImageNet-1k",
    model=swin_b,
    data=partial(read, Source()),
    read=read,
    task=ImageClassification(
        classes=CLASSES,
        label_smoothing=0.1,  # MODEL.LABEL_SMOOTHING
        mixing=Mixing(
            mixup=0.8,  # AUG.MIXUP
            cutmix=1.0,  # AUG.CUTMIX
            probability=1.0,  # AUG.MIXUP_PROB
            switch=0.5,  # AUG.MIXUP_SWITCH_PROB, MIXUP_MODE batch
        ),
    ),
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    # TRAIN.BASE_LR, scaled in main.py with the batch of all GPUs and accumulation steps, as are WARMUP_LR and MIN_LR
    learning_rate=5e-4 * BATCH_SIZE / 512,
    weight_decay=0.05,  # TRAIN.WEIGHT_DECAY, AdamW with TRAIN.OPTIMIZER.BETAS 0.9 and 0.999, EPS 1e-8
    # optimizer.py set_weight_decay: biases, what has one dimension, and names with no_weight_decay_keywords(), which
    # is relative_position_bias_table (models/swin_transformer.py, not verified here; timm's class says the same)
    exempt=("*relative_position_bias_table",),
    schedule=Schedule(
        warmup_epochs=20,  # TRAIN.WARMUP_EPOCHS
        warmup_start=5e-7 * BATCH_SIZE / 512,  # TRAIN.WARMUP_LR, scaled
        floor=5e-6 * BATCH_SIZE / 512,  # TRAIN.MIN_LR, scaled
        by_epoch=False,  # lr_scheduler.py: t_in_epochs=False
        # lr_scheduler.py has since got WARMUP_PREFIX, which starts the cosine after the warm-up; config.py of the time
        # of the published model has no such option
        cosine_from_warmup=False,
    ),
    max_gradient_norm=5.0,  # TRAIN.CLIP_GRAD
    drop_last=True,  # data/build.py data_loader_train
    mixed_precision=True,  # AMP_ENABLE; float16 there, bfloat16 here
    workers=8,  # DATA.NUM_WORKERS
    evaluations=300,  # ours: every epoch
    measurements=300,  # ours: every epoch, as the paper averages over epochs
    arms=WITHOUT_POSITIONS,
    paper=Paper(83.1, 83.9),
    # timm, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv, swin_base_patch4_window7_224
    cost=cost(EPOCHS, 279.66, "timm's benchmark, AMP"),
)

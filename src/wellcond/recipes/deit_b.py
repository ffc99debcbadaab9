"""DeiT-B/16 on ImageNet-1k without distillation, as in "Training data-efficient image transformers", arXiv 2012.12877.

Every number is of https://github.com/facebookresearch/deit: the defaults of main.py, unless another file is named.
The published model has 81.8 % (README_deit.md, 81.846 in its evaluation).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from wellcond.recipes.imagenet import CLASSES, Augmentation, cost, read_imagenet
from wellcond.recipes.ingredients import Schedule
from wellcond.recipes.recipe import Paper, Recipe, Source
from wellcond.tasks import ImageClassification, Mixing

EPOCHS = 300  # --epochs
BATCH_SIZE = 1024  # README_deit.md: 2 nodes of 8 GPUs, --batch-size 64 each

AUGMENTATION = Augmentation(
    color_jitter=0.4,  # --color-jitter; timm leaves it out where RandAugment is on, there as here
    auto_augment="rand-m9-mstd0.5-inc1",  # --aa
    erase=0.25,  # --reprob, --remode pixel, --recount 1
    interpolation="bicubic",  # --train-interpolation
    crop_share=224 / 256,  # datasets.py build_transform: resize to 256, bicubic, and crop
)


def deit_b(**changes: Any) -> nn.Module:
    """timm's deit_base_patch16_224 with stochastic depth; ``changes`` are further arguments."""
    import timm

    # --drop-path 0.1, --drop 0
    options = {"num_classes": CLASSES, "drop_path_rate": 0.1}
    model: nn.Module = timm.create_model("deit_base_patch16_224", **(options | changes))
    return model


read = partial(read_imagenet, augmentation=AUGMENTATION)

DEIT_B_IMAGENET = Recipe(
    name="deit-b-imagenet",
    title="DeiT-B/16 on ImageNet-1k",
    model=deit_b,
    data=partial(read, Source()),
    read=read,
    task=ImageClassification(
        classes=CLASSES,
        label_smoothing=0.1,  # --smoothing
        mixing=Mixing(
            mixup=0.8,  # --mixup
            cutmix=1.0,  # --cutmix
            probability=1.0,  # --mixup-prob
            switch=0.5,  # --mixup-switch-prob, --mixup-mode batch
        ),
    ),
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    learning_rate=5e-4 * BATCH_SIZE / 512,  # --lr, and linear_scaled_lr in main()
    weight_decay=0.05,  # --weight-decay, AdamW (--opt) with timm's defaults: betas 0.9 and 0.999, eps 1e-8
    # timm's create_optimizer: biases, what has one dimension, and the model's no_weight_decay()
    exempt=("pos_embed", "cls_token"),
    schedule=Schedule(
        warmup_epochs=5,  # --warmup-epochs
        warmup_start=1e-6,  # --warmup-lr
        floor=1e-5,  # --min-lr
        by_epoch=True,  # main(): lr_scheduler.step(epoch), after each epoch ...
        delay=1,  # ... with the number of the one that just ended
        # --cooldown-epochs 10 has no effect: main() does not use the number of epochs that create_scheduler returns
    ),
    average_decay=0.99996,  # --model-ema (on), --model-ema-decay; accuracy is reported of the model itself, as here
    max_gradient_norm=None,  # --clip-grad None
    repeats=3,  # --repeated-aug (on), samplers.py RASampler
    drop_last=True,  # data_loader_train
    mixed_precision=True,  # engine.py, torch.cuda.amp; float16 there, bfloat16 here
    workers=10,  # --num_workers
    evaluations=300,  # main(): every epoch
    measurements=300,  # ours: every epoch, as the paper averages over epochs
    paper=Paper(81.6, 82.5),
    # timm, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv, deit_base_patch16_224
    cost=cost(EPOCHS, 390.88, "timm's benchmark, AMP"),
)

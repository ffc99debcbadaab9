"""ViT-B/16 on ImageNet-1k from scratch, as in "An Image is Worth 16x16 Words", arXiv 2010.11929.

Sources of the numbers below:
  [paper]  appendix B.1 with Table 3 of arXiv 2010.11929, row "ViT-*, ImageNet". It was not at hand when this file was
           written; where the two below repeat it, they are named.
  [classy] https://github.com/facebookresearch/ClassyVision, examples/vit/vit_b16_in.json and README.md:
           "hyperparameters here are borrowed from the paper", with label smoothing, mixup and AutoAugment added, which
           are left out here. It reports 78.98 %.
  [big_vision] https://github.com/google-research/big_vision, big_vision/configs/vit_i1k.py, by the authors, for a
           later paper (arXiv 2106.10270): batch, epochs, crops, warm-up and clipping agree, rate and decay differ.
The paper on conditioned tokens reports 80.3 % for its baseline. Which recipe that was is not known here; this
one is expected to end below it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from wellcond.recipes.imagenet import CLASSES, IMAGES, Augmentation, cost, read_imagenet
from wellcond.recipes.ingredients import Schedule
from wellcond.recipes.recipe import Paper, Recipe, Source
from wellcond.tasks import ImageClassification

BATCH_SIZE = 4096  # [classy] simulated_global_batchsize, [big_vision] batch_size
EPOCHS = 300  # [classy] num_epochs, [big_vision] total_epochs
WARMUP_STEPS = 10_000  # [big_vision] warmup_steps; [classy] has a tenth of the training, 9,400 steps

AUGMENTATION = Augmentation(
    # [big_vision] decode_jpeg_and_inception_crop(224)|flip_lr, and nothing more in [paper]
    interpolation="bilinear",  # not verified: the interpolation of the random crops
    crop_share=0.875,  # [big_vision] resize_small(256)|central_crop(224)
)


def vit_b(**changes: Any) -> nn.Module:
    """timm's vit_base_patch16_224 with dropout; ``changes`` are further arguments."""
    import timm

    options = {
        "num_classes": CLASSES,
        # [classy] dropout_rate 0.1, attention_dropout_rate 0: after positions are added and in every MLP and projection
        "pos_drop_rate": 0.1,
        "proj_drop_rate": 0.1,
    }
    model: nn.Module = timm.create_model("vit_base_patch16_224", **(options | changes))
    return model


read = partial(read_imagenet, augmentation=AUGMENTATION)

VIT_B_IMAGENET = Recipe(
    name="vit-b-imagenet",
    title="ViT-B/16 on ImageNet-1k",
    model=vit_b,
    data=partial(read, Source()),
    read=read,
    task=ImageClassification(classes=CLASSES),
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    learning_rate=3e-3,  # [classy] end_value of the warm-up
    weight_decay=0.3,  # [classy] weight_decay, AdamW with betas 0.9 and 0.999
    # [big_vision] decays kernels only (its default wd_mults, not verified here): neither positions nor class token
    exempt=("pos_embed", "cls_token"),
    schedule=Schedule(
        warmup_epochs=WARMUP_STEPS * BATCH_SIZE / IMAGES,
        warmup_start=0.0,  # [classy] start_value
        floor=0.0,  # [classy] cosine end_value
        cosine_from_warmup=True,  # [classy] a linear and a cosine part, one after the other
    ),
    max_gradient_norm=1.0,  # [classy] clip_grad_norm, [big_vision] grad_clip_norm
    drop_last=True,  # not verified: both loaders repeat the data without end
    mixed_precision=True,  # [classy] amp_args O1; float16 there, bfloat16 here
    workers=8,  # ours
    evaluations=300,  # ours: every epoch
    measurements=300,  # ours: every epoch, as the paper averages over epochs
    paper=Paper(80.3, 81.3),
    # timm, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv, vit_base_patch16_224
    cost=cost(EPOCHS, 390.86, "timm's benchmark, AMP"),
)

"""The smallest honest detection: scikit-learn's digits on canvases, found and outlined by Mask R-CNN on a tiny XCiT."""

from __future__ import annotations

from functools import partial

from torch import nn

from wellcond.data.canvases import digit_canvases
from wellcond.recipes.recipe import Recipe
from wellcond.tasks import Detection

EDGE = 64
"""Shorter edge of a canvas: test images are resized to it, which leaves these as they are."""


def tiny_mask_rcnn() -> nn.Module:
    """Mask R-CNN of 630,000 parameters on ``(1, H, W)``: an XCiT of four blocks whose tokens cover 8×8 pixels."""
    import timm
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    from wellcond.models.mask_rcnn import mask_rcnn, roi_pool
    from wellcond.models.xcit_pyramid import TokenPyramid

    body = timm.models.xcit.Xcit(
        img_size=EDGE,
        patch_size=8,
        in_chans=1,
        embed_dim=64,
        depth=4,
        num_heads=4,
        mlp_ratio=2.0,
        cls_attn_layers=1,
    )
    pyramid = TokenPyramid(body, blocks=(1, 2, 3), strides=(4, 8, 16), channels=48)
    return mask_rcnn(
        pyramid,
        classes=10,
        box_features=128,
        mask_widths=(32, 32),
        # Digits have frames of 16 to 32 pixels and are as high as wide; four boxes at most are in an image.
        rpn_anchor_generator=AnchorGenerator(((12,), (20,), (32,), (64,)), ((1.0,),) * 4),
        box_roi_pool=roi_pool(pyramid, 7, sampling_ratio=2),
        mask_roi_pool=roi_pool(pyramid, 14, sampling_ratio=2),
        rpn_pre_nms_top_n_train=200,
        rpn_post_nms_top_n_train=60,
        rpn_pre_nms_top_n_test=200,
        rpn_post_nms_top_n_test=60,
        rpn_batch_size_per_image=64,
        box_batch_size_per_image=32,
        box_detections_per_img=20,
        image_mean=[0.2],
        image_std=[0.25],
        min_size=EDGE,
        max_size=10 * EDGE,
    )


MASKRCNN_DIGITS = Recipe(
    name="maskrcnn-digits",
    title="Mask R-CNN with a tiny XCiT on digits on canvases",
    model=tiny_mask_rcnn,
    data=partial(digit_canvases, train=512, test=200),
    task=Detection(),
    epochs=5,
    batch_size=8,
    learning_rate=2e-3,
    evaluations=5,
    evaluation_batch=16,
    arms=("baseline", "conditioned", "rescaled", "scaled"),
    cost="about 2 minutes of one CPU core",
)

"""Mask R-CNN and Faster R-CNN of torchvision on a `TokenPyramid`, with what the library gets wrong at small sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from wellcond.models.xcit_positions import use_own_positions_
from wellcond.models.xcit_pyramid import TokenPyramid


def mask_rcnn(
    backbone: TokenPyramid,
    classes: int,
    *,
    box_features: int = 1024,
    mask_widths: Sequence[int] = (256, 256, 256, 256),
    own_positions: bool = True,
    **options: Any,
) -> nn.Module:
    """torchvision's `MaskRCNN` on the pyramid's levels.

    Training images are taken at the size they come in, since augmentation has chosen it; in eval mode the model
    resizes them to ``min_size`` and ``max_size`` and returns boxes and masks at the size they came in.

    Args:
        backbone: the feature pyramid; regions are pooled from all levels but the last.
        classes: of objects, the background not counted; labels go from 1 to ``classes``.
        box_features: width of the two layers of the box head.
        mask_widths: channels of the convolutions of the mask head.
        own_positions: an XCiT counts positions over each image's own size, see `OwnPositions`; False: over the
            padded batch, as XCiT's own detectors do. Other models are left alone.
        options: further arguments of `torchvision.models.detection.MaskRCNN`. Unless given: one anchor size a level,
            8 strides long, in three shapes; pooling with as many samples as a bin has pixels.

    Raises:
        ValueError: the pyramid's strides do not double from level to level.

    >>> import timm, torch
    >>> body = timm.create_model("xcit_nano_12_p16_224", depth=4, embed_dim=32, num_heads=2)
    >>> model = mask_rcnn(TokenPyramid(body, (0, 1, 2, 3), channels=16), classes=10, min_size=64, max_size=96).eval()
    >>> with torch.no_grad():
    ...     (found,) = model([torch.rand(3, 50, 70)])
    >>> sorted(found), found["masks"].shape[1:]
    (['boxes', 'labels', 'masks', 'scores'], torch.Size([1, 50, 70]))
    """
    from torchvision.models.detection.mask_rcnn import MaskRCNN, MaskRCNNHeads, MaskRCNNPredictor

    given = _for_boxes(backbone, classes, box_features) | {"mask_roi_pool": roi_pool(backbone, 14)} | options
    width = mask_widths[-1]
    model: nn.Module = MaskRCNN(
        backbone,
        mask_head=MaskRCNNHeads(backbone.out_channels, tuple(mask_widths), 1),
        mask_predictor=MaskRCNNPredictor(width, width, classes + 1),
        **given,
    )
    return _positioned(model, backbone, own_positions)


def faster_rcnn(
    backbone: TokenPyramid,
    classes: int,
    *,
    box_features: int = 1024,
    own_positions: bool = True,
    **options: Any,
) -> nn.Module:
    """torchvision's `FasterRCNN`, for data with boxes and no masks; arguments and errors as of `mask_rcnn`."""
    from torchvision.models.detection import FasterRCNN

    model: nn.Module = FasterRCNN(backbone, **(_for_boxes(backbone, classes, box_features) | options))
    return _positioned(model, backbone, own_positions)


def roi_pool(backbone: TokenPyramid, output_size: int, **options: Any) -> nn.Module:
    """torchvision's pooling of regions, with the strides that the pyramid really has.

    `MultiScaleRoIAlign` guesses them once, from the sizes of the first feature maps and of the largest image before
    padding. An image of 65 pixels in a batch padded to 96 makes it guess 1/2 for 1/4, and every later region is
    pooled from the wrong place.

    Raises ValueError if the strides do not double from level to level, which its choice of a level assumes.

    >>> import timm
    >>> body = timm.create_model("xcit_nano_12_p16_224", depth=4, embed_dim=32, num_heads=2)
    >>> roi_pool(TokenPyramid(body, (0, 1, 2, 3), channels=16), 7).scales
    [0.25, 0.125, 0.0625, 0.03125]
    """
    from torchvision.ops import MultiScaleRoIAlign
    from torchvision.ops.poolers import initLevelMapper

    strides = backbone.strides
    if any(coarse != 2 * fine for fine, coarse in itertools.pairwise(strides)):
        raise ValueError(f"regions are pooled from levels whose strides double, but these are {strides}")
    names = [str(i) for i in range(len(strides))]
    pool = MultiScaleRoIAlign(names, output_size, **({"sampling_ratio": 0} | options))
    pool.scales = [1 / stride for stride in strides]
    finest = strides[0].bit_length() - 1
    pool.map_levels = initLevelMapper(
        finest,
        finest + len(strides) - 1,
        canonical_scale=pool.canonical_scale,
        canonical_level=pool.canonical_level,
    )
    module: nn.Module = pool
    return module


def _positioned(model: nn.Module, backbone: TokenPyramid, own: bool) -> nn.Module:
    from timm.models.xcit import Xcit

    if own and isinstance(backbone.body, Xcit) and backbone.body.pos_embed is not None:
        use_own_positions_(model, backbone.body)
    return model


def _for_boxes(backbone: TokenPyramid, classes: int, features: int) -> dict[str, Any]:
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead

    strides = (*backbone.strides, 2 * backbone.strides[-1])
    shapes = ((0.5, 1.0, 2.0),) * len(strides)
    return {
        "rpn_anchor_generator": AnchorGenerator(tuple((8 * stride,) for stride in strides), shapes),
        "box_roi_pool": roi_pool(backbone, 7),
        "box_head": TwoMLPHead(backbone.out_channels * 7 * 7, features),
        "box_predictor": FastRCNNPredictor(features, classes + 1),
        "size_divisible": backbone.strides[-1],
        "_skip_resize": True,  # in training only; torchvision's own scripts pass it when images come resized
    }

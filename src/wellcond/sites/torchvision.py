"""torchvision: its own vision transformers, and detectors around a transformer of any library."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.sites.registry import Registry
from wellcond.sites.site import ModelSites, Site

DETECTORS = (
    "torchvision.models.detection.generalized_rcnn.GeneralizedRCNN",
    "torchvision.models.detection.retinanet.RetinaNet",
    "torchvision.models.detection.fcos.FCOS",
)


def register(registry: Registry) -> None:
    """Enter torchvision's models and attention modules."""
    registry.model("torchvision.models.vision_transformer.VisionTransformer")(vision_transformer)
    registry.model("torchvision.models.swin_transformer.SwinTransformer")(swin_transformer)
    registry.attention(
        "torchvision.models.swin_transformer.ShiftedWindowAttention", heads="num_heads", outputs="proj"
    )

    @registry.model(*DETECTORS)
    def detector(model: Any) -> ModelSites | None:
        """The backbone's own sites; pixels that only fill up the batch are no tokens."""
        found = registry.known_models(model.backbone)
        if len(found) != 1:
            return None
        prefix = ".".join(part for part in ("backbone", found[0].path) if part)
        sites = found[0].sites
        return dataclasses.replace(
            sites,
            input=sites.input.below(prefix),
            tokens=sites.tokens.below(prefix) if sites.tokens is not None else None,
            positions=f"{prefix}.{sites.positions}" if sites.positions is not None else None,
            output_of=("transform", real_pixels),
            mask=pixel_mask,
        )


def vision_transformer(model: Any) -> ModelSites:
    """``vit_b_16`` and its kin. ``encoder.dropout`` returns what the first block receives."""
    patch = (int(model.patch_size), int(model.patch_size))
    return ModelSites(
        input=Site("encoder.dropout", prefix=1, patch=patch),
        tokens=Site("conv_proj", layout="NCHW", patch=patch),
        positions="encoder.pos_embedding",
        folds={"input": 0, "tokens": 1},
    )


def swin_transformer(model: nn.Module) -> ModelSites:
    """``swin_*`` and ``swin_v2_*``: tokens in their grid; positions exist only as biases inside the windows."""
    convolution: Any = model.get_submodule("features.0.0")
    return ModelSites(Site("features.0", layout="NHWC", patch=tuple(convolution.stride)))


def real_pixels(transformed: tuple[Any, Any]) -> dict[str, Tensor]:
    """Which pixels of an ``ImageList`` belong to its images, ``(B, H, W)``; the rest was added to fill the batch.

    Made where the list is, because the sizes are Python numbers, and a compiled backbone would be compiled again
    for every new one.
    """
    images, _ = transformed
    height, width = images.tensors.shape[-2:]
    device = images.tensors.device
    heights, widths = torch.tensor(images.image_sizes, device=device).unbind(-1)
    rows = torch.arange(height, device=device) < heights[:, None]
    columns = torch.arange(width, device=device) < widths[:, None]
    return {"pixels": rows[:, :, None] & columns[:, None, :]}


def pixel_mask(call: Mapping[str, Any]) -> Tensor:
    """The mask that `real_pixels` made."""
    mask: Tensor = call["pixels"]
    return mask

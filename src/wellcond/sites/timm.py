"""timm: where the tokens of its vision transformers are."""

from __future__ import annotations

from torch import nn

from wellcond.sites.registry import Registry
from wellcond.sites.site import ModelSites, Site


def register(registry: Registry) -> None:
    """Enter timm's models and attention modules."""
    registry.model("timm.models.vision_transformer.VisionTransformer")(vision_transformer)

    registry.attention("timm.layers.attention.Attention", heads="num_heads", outputs="proj")
    registry.attention("timm.layers.attention.AttentionRope", heads="num_heads", outputs="proj")


def vision_transformer(model: nn.Module) -> ModelSites:
    """ViT and DeiT, distilled, with register tokens, of dynamic size.

    ``norm_pre`` (an identity in most) returns exactly what the first block receives; unlike the block it is
    never inside a gradient checkpoint.
    """
    grid = getattr(model, "dynamic_img_size", False)
    return ModelSites(
        input=Site("norm_pre"),
        tokens=Site("patch_embed", layout="NHWC" if grid else "NLC"),
        positions="pos_embed" if getattr(model, "pos_embed", None) is not None else None,
    )

"""timm: where the tokens of its vision transformers are.

A site is, where there is a choice, a module that is never inside a gradient checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from wellcond.sites.registry import Registry, class_paths
from wellcond.sites.site import ModelSites, Placement, Site


def register(registry: Registry) -> None:
    """Enter timm's models and attention modules."""
    models = "timm.models."
    registry.model(models + "vision_transformer.VisionTransformer", models + "eva.Eva")(vision_transformer)
    registry.model(
        models + "swin_transformer.SwinTransformer", models + "swin_transformer_v2.SwinTransformerV2"
    )(swin_transformer)
    registry.model(models + "xcit.Xcit")(xcit)
    registry.model(models + "davit.DaVit")(davit)
    registry.model(models + "volo.VOLO")(volo)
    registry.model(models + "_features.FeatureDictNet", models + "_features.FeatureHookNet")(rebuilt_features)

    # The input of ``norm`` (an identity in most) is the heads' outputs; that of ``proj`` may be normed or gated.
    for name in ("layers.attention.Attention", "layers.attention.AttentionRope", "models.eva.EvaAttention"):
        registry.attention("timm." + name, heads="num_heads", outputs="norm")
    for name in ("swin_transformer", "swin_transformer_v2", "davit"):
        registry.attention(models + name + ".WindowAttention", heads="num_heads", outputs="proj")
    registry.attention(models + "xcit.XCA", heads="num_heads", outputs="proj", over_channels=True)
    registry.attention(
        models + "davit.ChannelAttention", heads="num_heads", outputs="proj", over_channels=True
    )
    registry.attention(
        models + "davit.ChannelAttentionV2", heads="groups", outputs="proj", over_channels=True
    )
    registry.attention(
        models + "vision_transformer.ParallelScalingBlock", heads="num_heads", outputs="attn_out_proj"
    )
    registry.attention(models + "volo.Attention", heads="num_heads", outputs="proj", layout="NHWC")
    # Not entered: class attention (XCiT, VOLO), whose weights are a single row per head, so that κ is 1 always
    # and would flatter every average; VOLO's outlook attention, which is not softmax(QKᵀ) of the tokens;
    # differential attention, whose weights are a difference of two softmaxes.


def vision_transformer(model: Any) -> ModelSites:
    """ViT, DeiT (distilled or not), DINOv2, EVA and DINOv3: class and register tokens, any size, rotary or not.

    ``norm_pre`` (an identity in most) returns exactly what the first block receives.
    """
    embed, prefix, grid = model.patch_embed, int(model.num_prefix_tokens), bool(model.dynamic_img_size)
    patch = edges(getattr(embed, "patch_size", None))
    at_blocks = Site("norm_pre", prefix=prefix, patch=patch)
    if getattr(model, "pos_embed", None) is None:
        return ModelSites(at_blocks)
    shared = 0 if model.no_embed_class else prefix  # rows of the position embedding that prefix tokens have
    folds: dict[Placement, int] = {}
    if not grid:  # else rows are resampled to the size of each image
        folds["tokens"] = shared
        if isinstance(model.norm_pre, nn.Identity) and shared == prefix:
            folds["input"] = 0
    return ModelSites(
        input=at_blocks,
        tokens=Site("patch_embed", layout="NHWC" if grid else "NLC", patch=patch),
        positions="pos_embed",
        folds=folds,
    )


def swin_transformer(model: Any) -> ModelSites:
    """Swin and SwinV2: tokens in their grid; positions exist only as biases inside the windows."""
    return ModelSites(Site("patch_embed", layout="NHWC", patch=edges(model.patch_embed.patch_size)))


def xcit(model: Any) -> ModelSites:
    """XCiT: the class token joins after the last of these blocks, so it is not among the tokens."""
    patch = edges(model.patch_embed.patch_size)
    return ModelSites(
        input=Site("pos_drop", patch=patch),
        tokens=Site("patch_embed", key=0, patch=patch) if model.pos_embed is not None else None,
    )


def davit(model: Any) -> ModelSites:
    """DaViT: the stem is a convolution; positions come from convolutions inside every block."""
    return ModelSites(Site("stem", layout="NCHW", patch=edges(model.stem.stride)))


def volo(model: Any) -> ModelSites:
    """VOLO: convolution-like outlookers, then positions, then self-attention.

    ``input`` is what the first self-attention block receives. Features cut off before it have no such place:
    there, and only there, the patch embeddings are the input.
    """
    stem = model.patch_embed
    patch = tuple(a * b for a, b in zip(stem.conv[0].stride, stem.proj.stride, strict=True))
    embedded = Site("patch_embed", layout="NCHW", patch=patch)
    if model.pos_embed is None or len(model.network) <= 2:
        return ModelSites(embedded)
    coarse = tuple(edge * model.pooling_scale for edge in patch)
    return ModelSites(
        input=Site("pos_drop", layout="NHWC", patch=coarse),
        tokens=embedded,
        positions="pos_embed",
        folds={"input": 0},
    )


HIERARCHIES: dict[str, Callable[[Any], ModelSites]] = {
    "timm.models.swin_transformer.SwinTransformerStage": swin_transformer,
    "timm.models.swin_transformer_v2.SwinTransformerV2Stage": swin_transformer,
    "timm.models.davit.DaVitStage": davit,
}


def rebuilt_features(model: nn.Module) -> ModelSites | None:
    """``features_only=True`` takes hierarchical models apart; the stem keeps its name, the model its stages."""
    for child in model.children():
        for name in class_paths(child):
            if name in HIERARCHIES:
                return HIERARCHIES[name](model)
    return None


def edges(size: Any) -> tuple[int, int] | None:
    """A patch size, int or pair, as a pair; None where the embedding does not say.

    >>> edges(16), edges((4, 8)), edges(None)
    ((16, 16), (4, 8), None)
    """
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)

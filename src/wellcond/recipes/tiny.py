"""The paper's architectures at a size that trains on two cores: timm's classes on small grey images.

Each turns an image into 16 or 49 tokens. Hierarchical models have two stages in place of four.
"""

from __future__ import annotations

from torch import nn


def tiny_vit(size: int, patch: int) -> nn.Module:
    """A ViT of about 137,000 parameters on ``(1, size, size)`` and a class token."""
    import timm

    return timm.models.vision_transformer.VisionTransformer(
        img_size=size,
        patch_size=patch,
        in_chans=1,
        num_classes=10,
        embed_dim=64,
        depth=4,
        num_heads=4,
        mlp_ratio=2.0,
    )


def tiny_swin(size: int, patch: int, window: int) -> nn.Module:
    """A Swin of two stages on ``(1, size, size)``; every second block's windows are shifted."""
    import timm

    return timm.models.swin_transformer.SwinTransformer(
        img_size=size,
        patch_size=patch,
        in_chans=1,
        num_classes=10,
        embed_dim=32,
        depths=(2, 2),
        num_heads=(2, 4),
        window_size=window,
        mlp_ratio=2.0,
        drop_path_rate=0.0,
    )


def tiny_xcit() -> nn.Module:
    """An XCiT on ``(1, 32, 32)``: its convolutional stem makes 16 tokens of 8×8."""
    import timm

    return timm.models.xcit.Xcit(
        img_size=32,
        patch_size=8,
        in_chans=1,
        num_classes=10,
        embed_dim=64,
        depth=4,
        num_heads=4,
        mlp_ratio=2.0,
        cls_attn_layers=1,
    )


def tiny_davit(window: int) -> nn.Module:
    """A DaViT of two stages; its stem makes a token every four pixels, at any size."""
    import timm

    return timm.models.davit.DaVit(
        in_chans=1,
        num_classes=10,
        depths=(1, 1),
        embed_dims=(32, 64),
        num_heads=(2, 4),
        window_size=window,
        mlp_ratio=2.0,
    )

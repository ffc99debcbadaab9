"""The smallest honest experiment: a ViT on scikit-learn's digits, seconds a run on two cores."""

from __future__ import annotations

from torch import nn

from wellcond.data import digits
from wellcond.recipes.recipe import Recipe


def small_vit() -> nn.Module:
    """A timm ViT of 137,000 parameters: 8×8 pixels as 16 tokens of 2×2, and a class token."""
    import timm

    return timm.models.vision_transformer.VisionTransformer(
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=64,
        depth=4,
        num_heads=4,
        mlp_ratio=2.0,
    )


DIGITS_VIT = Recipe(
    name="digits-vit",
    title="A small ViT on scikit-learn's digits",
    model=small_vit,
    data=digits,
    epochs=14,
    batch_size=64,
    learning_rate=1e-3,
)

"""The four small models on 28×28 grey images, which MNIST and Fashion-MNIST share.

The ViT, Swin and DaViT see 49 tokens that each cover 4×4 pixels; XCiT's stem makes 16 of 8×8, with a border around
the image because 28 is no multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from wellcond.data.images import Split
from wellcond.recipes.recipe import WITHOUT_POSITIONS, Recipe, Source
from wellcond.recipes.tiny import tiny_davit, tiny_swin, tiny_vit, tiny_xcit


def grey28_recipes(name: str, title: str, read: Callable[..., Split]) -> tuple[Recipe, ...]:
    """``NAME-vit``, ``-swin``, ``-xcit`` and ``-davit`` on images from ``read(source, border=0)``."""
    recipe = partial(Recipe, epochs=10, batch_size=128, learning_rate=1e-3)
    return (
        recipe(
            name=f"{name}-vit",
            title=f"A small ViT on {title}",
            model=partial(tiny_vit, size=28, patch=4),
            cost="about 15 min of one CPU core",
            data=partial(read, Source()),
            read=read,
        ),
        recipe(
            name=f"{name}-swin",
            title=f"A tiny Swin on {title}",
            model=partial(tiny_swin, size=28, patch=4, window=4),
            arms=WITHOUT_POSITIONS,
            cost="about 5 min of one CPU core",
            data=partial(read, Source()),
            read=read,
        ),
        recipe(
            name=f"{name}-xcit",
            title=f"A tiny XCiT on {title}",
            model=tiny_xcit,
            arms=WITHOUT_POSITIONS,
            cost="about 10 min of one CPU core",
            data=partial(read, Source(), border=2),
            read=partial(read, border=2),
        ),
        recipe(
            name=f"{name}-davit",
            title=f"A tiny DaViT on {title}",
            model=partial(tiny_davit, window=4),
            arms=WITHOUT_POSITIONS,
            cost="about 7 min of one CPU core",
            data=partial(read, Source()),
            read=read,
        ),
    )

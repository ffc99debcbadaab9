"""The smallest honest experiments: scikit-learn's 8×8 digits, seconds a run on two cores.

Every model sees 16 tokens that each cover 2×2 pixels. XCiT's and DaViT's stems have fixed strides, 8 and 4, so the
pixels are repeated for them.
"""

from __future__ import annotations

from functools import partial

from wellcond.data import digits
from wellcond.data.images import Split, enlarged
from wellcond.recipes.recipe import WITHOUT_POSITIONS, Recipe
from wellcond.recipes.tiny import tiny_davit, tiny_swin, tiny_vit, tiny_xcit


def large_digits(times: int) -> Split:
    """The digits with every pixel repeated ``times``."""
    return enlarged(digits(), times)


DIGITS_VIT = Recipe(
    name="digits-vit",
    title="A small ViT on scikit-learn's digits",
    model=partial(tiny_vit, size=8, patch=2),
    data=digits,
    epochs=11,
    batch_size=64,
    learning_rate=2e-3,
    cost="about 10 s of one CPU core",
)

DIGITS_SWIN = Recipe(
    name="digits-swin",
    title="A tiny Swin on scikit-learn's digits",
    model=partial(tiny_swin, size=8, patch=2, window=2),
    data=digits,
    epochs=14,
    batch_size=64,
    learning_rate=1e-3,
    arms=WITHOUT_POSITIONS,
    cost="about 7 s of one CPU core",
)

DIGITS_XCIT = Recipe(
    name="digits-xcit",
    title="A tiny XCiT on scikit-learn's digits",
    model=tiny_xcit,
    data=partial(large_digits, 4),
    epochs=14,
    batch_size=64,
    learning_rate=1e-3,
    arms=WITHOUT_POSITIONS,
    cost="about 25 s of one CPU core",
)

DIGITS_DAVIT = Recipe(
    name="digits-davit",
    title="A tiny DaViT on scikit-learn's digits",
    model=partial(tiny_davit, window=2),
    data=partial(large_digits, 2),
    epochs=14,
    batch_size=64,
    learning_rate=1e-3,
    arms=WITHOUT_POSITIONS,
    cost="about 7 s of one CPU core",
)

DIGITS = (DIGITS_VIT, DIGITS_SWIN, DIGITS_XCIT, DIGITS_DAVIT)

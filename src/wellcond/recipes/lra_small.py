"""The Long Range Arena at a size for one CPU core: short expressions, small images, digits pixel by pixel.

All numbers are ours. Short expressions and digits are learned within a minute; small Pathfinder is not within minutes.
"""

from __future__ import annotations

from functools import partial

from wellcond.data import Split
from wellcond.data.lra.listops import TOKENS, Grammar
from wellcond.data.lra.listops_files import listops
from wellcond.data.lra.pathfinder import Scene
from wellcond.data.lra.pathfinder_files import pathfinder
from wellcond.data.lra.sequences import BYTES, Pixels
from wellcond.recipes.lra import nystrom_classifier
from wellcond.recipes.recipe import WITHOUT_POSITIONS, Recipe
from wellcond.tasks.sequences import SequenceClassification

SHORT = Grammar(max_depth=3, max_arguments=5, min_length=4, max_length=33)
SMALL_SCENE = Scene(
    size=16, dashes=4, distractors=2, distractor_dashes=2, seed_distance=4, marker_radius=0.75
)
GREYS = 17
"""scikit-learn's digits have values from 0 to 16."""


def digit_pixels() -> Split:
    """scikit-learn's digits row by row, 64 tokens each; split as `wellcond.data.digits`.

    >>> split = digit_pixels()
    >>> len(split.train), split.train[0]["input_ids"].shape, int(split.train[0]["input_ids"].max())
    (1347, torch.Size([64]), 17)
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images, labels = data.images.astype("uint8"), data.target
    train, test = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=labels)
    return Split(Pixels(images[train], labels[train]), Pixels(images[test], labels[test]))


LISTOPS_SHORT = Recipe(
    name="listops-short",
    title="A small Nyströmformer on short ListOps",
    model=partial(
        nystrom_classifier,
        len(TOKENS),
        32,
        10,
        hidden_size=32,
        intermediate_size=64,
        num_landmarks=8,
        conv_kernel_size=5,
        hidden_dropout_prob=0.0,
    ),
    data=partial(listops, SHORT, train=20_000, test=1_000),
    task=SequenceClassification(length=32),
    steps=800,
    batch_size=32,
    learning_rate=3e-3,
    weight_decay=0.01,
    evaluations=8,
    measurements=8,
    arms=WITHOUT_POSITIONS,
    cost="about 20 s of one CPU core",
)

PATHFINDER_16 = Recipe(
    name="pathfinder-16",
    title="A small Nyströmformer on Pathfinder of 16×16 pixels",
    model=partial(
        nystrom_classifier, BYTES, 256, 2, num_landmarks=32, conv_kernel_size=35, hidden_dropout_prob=0.0
    ),
    data=partial(pathfinder, SMALL_SCENE, train=500, test=400),
    task=SequenceClassification(length=256),
    steps=400,
    batch_size=32,
    learning_rate=2e-3,
    weight_decay=0.01,
    arms=WITHOUT_POSITIONS,
    # Seen: baseline and conditioned, seed 0, 2 min of user CPU time each: a constant answer, loss 0.69. So did two
    # dashes a path and no distractors, learning rates 1e-3 to 3e-3, for up to 1,100 steps.
    cost="about 2 min of one CPU core, in which it learns nothing",
)

PIXEL_DIGITS = Recipe(
    name="pixel-digits",
    title="A small Nyströmformer on scikit-learn's digits, pixel by pixel",
    model=partial(
        nystrom_classifier,
        GREYS + 1,
        64,
        10,
        num_landmarks=16,
        conv_kernel_size=17,
        hidden_dropout_prob=0.0,
    ),
    data=digit_pixels,
    task=SequenceClassification(length=64),
    epochs=10,
    batch_size=32,
    learning_rate=2e-3,
    weight_decay=0.01,
    evaluations=8,
    measurements=8,
    arms=WITHOUT_POSITIONS,
    cost="about 25 s of one CPU core",
)

LRA_SMALL = (LISTOPS_SHORT, PATHFINDER_16, PIXEL_DIGITS)

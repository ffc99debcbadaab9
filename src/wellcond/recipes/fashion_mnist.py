"""Fashion-MNIST from IDX files: the Debian package dataset-fashion-mnist puts them in a place of its own.

The ViT, Swin and DaViT see 49 tokens that each cover 4×4 pixels; XCiT's stem makes 16 of 8×8, with a border around
the image because 28 is no multiple of 8.
"""

from __future__ import annotations

from functools import partial

from wellcond.data.idx import FASHION_MNIST_FOLDER, idx_folder
from wellcond.data.images import Split, bordered
from wellcond.recipes.recipe import Recipe, Source
from wellcond.recipes.tiny import tiny_davit, tiny_swin, tiny_vit, tiny_xcit

INSTALL = (
    "Install Debian's package dataset-fashion-mnist, or name a folder with the four files of "
    "https://github.com/zalandoresearch/fashion-mnist by --data-dir"
)


def read(source: Source, border: int = 0) -> Split:
    """The images of a folder, by default Debian's, with a border of so many pixels.

    Raises:
        FileNotFoundError: files are missing; the message says what to install.
        ValueError: a file is broken, or an option makes no sense for IDX files.
    """
    source.require_plain_folder()
    return bordered(idx_folder(source.folder or FASHION_MNIST_FOLDER, install=INSTALL), border)


EPOCHS = 10
BATCH_SIZE = 128
LEARNING_RATE = 1e-3

FASHION_MNIST_VIT = Recipe(
    name="fashion-mnist-vit",
    title="A small ViT on Fashion-MNIST",
    model=partial(tiny_vit, size=28, patch=4),
    data=partial(read, Source()),
    read=read,
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    learning_rate=LEARNING_RATE,
    cost="about 15 min of one CPU core",
)

FASHION_MNIST_SWIN = Recipe(
    name="fashion-mnist-swin",
    title="A tiny Swin on Fashion-MNIST",
    model=partial(tiny_swin, size=28, patch=4, window=4),
    data=partial(read, Source()),
    read=read,
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    learning_rate=LEARNING_RATE,
    positions=False,
    cost="about 5 min of one CPU core",
)

FASHION_MNIST_XCIT = Recipe(
    name="fashion-mnist-xcit",
    title="A tiny XCiT on Fashion-MNIST",
    model=tiny_xcit,
    data=partial(read, Source(), border=2),
    read=partial(read, border=2),
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    learning_rate=LEARNING_RATE,
    positions=False,
    cost="about 10 min of one CPU core",
)

FASHION_MNIST_DAVIT = Recipe(
    name="fashion-mnist-davit",
    title="A tiny DaViT on Fashion-MNIST",
    model=partial(tiny_davit, window=4),
    data=partial(read, Source()),
    read=read,
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    learning_rate=LEARNING_RATE,
    positions=False,
    cost="about 7 min of one CPU core",
)

FASHION_MNIST = (FASHION_MNIST_VIT, FASHION_MNIST_SWIN, FASHION_MNIST_XCIT, FASHION_MNIST_DAVIT)

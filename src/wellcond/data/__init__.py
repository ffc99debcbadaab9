"""Real data: what ships with packages, and readers of local folders and of the Hugging Face hub."""

from wellcond.data.folder import CorruptImage, FolderImages, image_folder
from wellcond.data.idx import idx_folder, read_idx
from wellcond.data.images import Images, Split, digits
from wellcond.data.streaming import StreamedImages, stream
from wellcond.data.text import brown, jane_austen, pydoc_topics, text_folder, tiny_stories
from wellcond.data.tokens import (
    Blocks,
    Vocabulary,
    byte_vocabulary,
    gpt2_vocabulary,
    split_documents,
    train_bpe,
)

__all__ = [
    "Blocks",
    "CorruptImage",
    "FolderImages",
    "Images",
    "Split",
    "StreamedImages",
    "Vocabulary",
    "brown",
    "byte_vocabulary",
    "digits",
    "gpt2_vocabulary",
    "idx_folder",
    "image_folder",
    "jane_austen",
    "pydoc_topics",
    "read_idx",
    "split_documents",
    "stream",
    "text_folder",
    "tiny_stories",
    "train_bpe",
]

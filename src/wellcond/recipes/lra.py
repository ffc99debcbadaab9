"""A small Nyströmformer on the five tasks of the Long Range Arena.

Sources of the numbers below, all in https://github.com/mlpen/Nystromformer, LRA/code:
  [config] lra_config.py
  [run] run_tasks.py
What differs: LayerNorm comes after each half of a block, as in transformers (see `wellcond.models.lra_classifier`).
AdamW's first β is constant, where OneCycleLR moves it between 0.95 and 0.85, and its ε is 1e-8, not 1e-6. Mixed
precision is bfloat16, not float16. The last weights are scored on the test set, not the best on a validation set. Black
pixels are tokens: the published code masks id 0 as padding, which black pixels have there (LRA/code/dataset.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from wellcond.data import Split
from wellcond.data.lra import listops, published
from wellcond.data.lra.listops_files import read_listops
from wellcond.data.lra.pathfinder_files import read_pathfinder
from wellcond.data.lra.sequences import BYTES
from wellcond.recipes.ingredients import Triangle
from wellcond.recipes.recipe import WITHOUT_POSITIONS, Paper, Recipe, Source
from wellcond.tasks.sequences import SequenceClassification

# [run] max_seq_len, rounded up to a power of two: 2000 and 4000 in [config], where texts end
LISTOPS_LENGTH, IMAGE_LENGTH, TEXT_LENGTH = 2048, 1024, 4096
TEXT_BYTES = 4000  # [config] max_seq_len of text and retrieval
WARMUP_START = 1 / 25  # torch's OneCycleLR, div_factor: [run] leaves it at its default


def nystrom_classifier(vocabulary: int, length: int, classes: int, **changes: Any) -> nn.Module:
    """The published model for one sequence; ``changes`` are options of transformers' configuration."""
    from wellcond.models.lra_classifier import SequenceClassifier, nystromformer

    return SequenceClassifier(nystromformer(vocabulary, length, **changes), classes)


def nystrom_pair_classifier(vocabulary: int, length: int, classes: int, **changes: Any) -> nn.Module:
    """The published model for two sequences."""
    from wellcond.models.lra_classifier import PairClassifier, nystromformer

    return PairClassifier(nystromformer(vocabulary, length, **changes), classes)


def softmax_classifier(vocabulary: int, length: int, classes: int, **changes: Any) -> nn.Module:
    """The same with softmax attention, for a comparison; put it in place of a recipe's ``model``."""
    from wellcond.models.lra_classifier import SequenceClassifier, softmax_transformer

    return SequenceClassifier(softmax_transformer(vocabulary, length, **changes), classes)


def one_cycle(warmup: int, steps: int) -> Triangle:
    """[run] OneCycleLR with anneal_strategy "linear" and pct_start = warmup/steps."""
    return Triangle(start=WARMUP_START, top=warmup / steps)


def in_folder(read: Callable[..., Split], missing: str, **options: Any) -> Callable[[Source], Split]:
    """A reader of a source that must be a folder; ``missing`` says how to come by one."""
    return partial(_read_folder, read, missing, options)


def _read_folder(read: Callable[..., Split], missing: str, options: dict[str, Any], source: Source) -> Split:
    source.require_plain_folder()
    if source.folder is None:
        raise FileNotFoundError(f"give the folder of the data, --data-dir FOLDER. {missing}")
    return read(source.folder, **options)


def read_text(source: Source) -> Split:
    """IMDB from a folder or the hub."""
    if source.hub and source.folder is None and source.corrupt == "fatal":
        return published.text_hub(length=TEXT_BYTES)
    return _read_folder(published.text_folder, published.IMDB, {"length": TEXT_BYTES}, source)


def read_image(source: Source) -> Split:
    """CIFAR-10 in grey from a folder or the hub."""
    if source.hub and source.folder is None and source.corrupt == "fatal":
        return published.image_hub()
    return _read_folder(published.image_folder, published.CIFAR10, {}, source)


GENERATED = "Generate it: python -m wellcond.data.lra"
read_listops_source = in_folder(read_listops, f"{GENERATED} listops FOLDER", length=LISTOPS_LENGTH)
read_pathfinder_source = in_folder(read_pathfinder, f"{GENERATED} pathfinder FOLDER", size=32)
read_retrieval_source = in_folder(published.retrieval_folder, published.AAN, length=TEXT_BYTES)

COMMON: dict[str, Any] = {
    "learning_rate": 1e-4,  # [config] learning_rate
    "weight_decay": 0.0,  # [config] weight_decay
    "max_gradient_norm": None,  # [run] clips nothing
    "drop_last": True,  # [run] DataLoader
    "mixed_precision": True,  # [run] mixed_precision
    "arms": WITHOUT_POSITIONS,  # the embeddings' LayerNorm comes after positions: no factor has the share wanted
    "evaluations": 20,  # ours
    "measurements": 20,  # ours
    "workers": 4,  # ours
    "cost": "not measured",
}

LRA_LISTOPS = Recipe(
    name="lra-listops",
    title="Nyströmformer on ListOps of the Long Range Arena",
    model=partial(nystrom_classifier, len(listops.TOKENS), LISTOPS_LENGTH, 10),
    data=partial(read_listops_source, Source()),
    read=read_listops_source,
    task=SequenceClassification(length=LISTOPS_LENGTH),
    steps=5_000,  # [config] num_train_steps
    batch_size=32,  # [config] batch_size
    schedule=one_cycle(1_000, 5_000),  # [config] warmup
    evaluation_batch=32,
    paper=Paper(37.1, 37.9),
    **COMMON,
)

LRA_TEXT = Recipe(
    name="lra-text",
    title="Nyströmformer on IMDB reviews as bytes, Long Range Arena",
    model=partial(nystrom_classifier, BYTES, TEXT_LENGTH, 2),
    data=partial(read_text, Source()),
    read=read_text,
    task=SequenceClassification(length=TEXT_LENGTH),
    steps=20_000,  # [config] num_train_steps
    batch_size=32,  # [config] batch_size
    schedule=one_cycle(8_000, 20_000),  # [config] warmup
    evaluation_batch=32,
    paper=Paper(63.8, 64.9),
    **COMMON,
)

LRA_RETRIEVAL = Recipe(
    name="lra-retrieval",
    title="Nyströmformer on pairs of papers as bytes, Long Range Arena",
    model=partial(nystrom_pair_classifier, BYTES, TEXT_LENGTH, 2),
    data=partial(read_retrieval_source, Source()),
    read=read_retrieval_source,
    task=SequenceClassification(length=TEXT_LENGTH),
    steps=30_000,  # [config] num_train_steps
    batch_size=32,  # [config] batch_size
    schedule=one_cycle(800, 30_000),  # [config] warmup
    evaluation_batch=16,
    paper=Paper(79.8, 80.9),
    **COMMON,
)

LRA_IMAGE = Recipe(
    name="lra-image",
    title="Nyströmformer on CIFAR-10 as grey pixels, Long Range Arena",
    model=partial(nystrom_classifier, BYTES, IMAGE_LENGTH, 10),
    data=partial(read_image, Source()),
    read=read_image,
    task=SequenceClassification(length=IMAGE_LENGTH),
    steps=35_000,  # [config] num_train_steps
    batch_size=256,  # [config] batch_size
    schedule=one_cycle(175, 35_000),  # [config] warmup
    evaluation_batch=128,
    paper=Paper(39.9, 40.1),
    **COMMON,
)

LRA_PATHFINDER = Recipe(
    name="lra-pathfinder",
    title="Nyströmformer on Pathfinder-32, Long Range Arena",
    model=partial(nystrom_classifier, BYTES, IMAGE_LENGTH, 2),
    data=partial(read_pathfinder_source, Source()),
    read=read_pathfinder_source,
    task=SequenceClassification(length=IMAGE_LENGTH),
    steps=62_400,  # [config] num_train_steps
    batch_size=256,  # [config] batch_size
    schedule=one_cycle(312, 62_400),  # [config] warmup
    evaluation_batch=128,
    paper=Paper(72.9, 73.3),
    **COMMON,
)

LRA = (LRA_LISTOPS, LRA_TEXT, LRA_RETRIEVAL, LRA_IMAGE, LRA_PATHFINDER)

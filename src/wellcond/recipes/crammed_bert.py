"""Crammed BERT: pretraining by masked language modelling, at the published size and as a small one on a CPU.

Sources: [cramming] https://github.com/JonasGeiping/cramming, in its folder cramming/config the files
arch/crammed-bert.yaml, train/bert-o4.yaml and train/optim/adam.yaml.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from wellcond.data import Split
from wellcond.data.masking import FixedMasks, Masking
from wellcond.data.text import pydoc_topics, text_folder
from wellcond.data.tokens import split_documents, unigram_entropy
from wellcond.data.wordpiece import Packed, digest, pack, train_wordpiece
from wellcond.recipes.ingredients import Triangle
from wellcond.recipes.recipe import WITHOUT_POSITIONS, Recipe, Source
from wellcond.tasks.masked import MaskedLanguageModel

PYDOC_VOCABULARY = 2048
PYDOC_LENGTH = 64


def crammed_bert(**changes: Any) -> nn.Module:
    """Crammed BERT with a masked-language-modelling head; ``changes`` are fields of its configuration."""
    from wellcond.models.crammed_bert import CrammedBertConfig, CrammedBertForMaskedLM

    return CrammedBertForMaskedLM(CrammedBertConfig(**changes))


TINY: dict[str, Any] = {
    "vocab_size": PYDOC_VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": PYDOC_LENGTH,
    "classifier_size": 128,
}
"""A crammed BERT of 0.25 million parameters."""


def masked_texts(documents: Sequence[str], masking: Masking, length: int) -> Split:
    """Documents packed into sequences; masks of validation sequences are fixed, those of training come and go."""
    parts = split_documents(documents)
    tokenizer = train_wordpiece(parts.train, masking.vocabulary, length=length)
    train, validation = (pack(tokenizer, part, length) for part in (parts.train, parts.validation))
    return masked_split(tokenizer, train, validation, masking)


def masked_split(tokenizer: Any, train: Packed, validation: Packed, masking: Masking) -> Split:
    """Sequences to train and to validate on. The details say what was found, `unigram_entropy` as of all its tokens."""
    details = {
        "vocabulary": digest(tokenizer),
        "text": hashlib.sha256(validation.ids.tobytes()).hexdigest()[:16],
        "train_sequences": len(train),
        "validation_sequences": len(validation),
        "unigram_entropy": round(unigram_entropy(validation.ids.ravel()), 6),
    }
    return Split(train, FixedMasks(validation, masking), details, tokenizer)


def read_texts(masking: Masking, length: int, source: Source) -> Split:
    """The texts of a folder, or Python's topics without one."""
    source.require_plain_folder()
    documents = pydoc_topics() if source.folder is None else text_folder(Path(source.folder))
    return masked_texts(documents, masking, length)


PYDOC_MASKING = Masking(vocabulary=PYDOC_VOCABULARY)

CRAMMED_BERT_PYDOC = Recipe(
    name="crammed-bert-pydoc",
    title="A tiny Crammed BERT on Python's reference",
    model=partial(crammed_bert, **TINY),
    data=partial(read_texts, PYDOC_MASKING, PYDOC_LENGTH, Source()),
    read=partial(read_texts, PYDOC_MASKING, PYDOC_LENGTH),
    task=MaskedLanguageModel(masking=PYDOC_MASKING),
    epochs=10,
    batch_size=16,
    learning_rate=6e-3,
    betas=(0.9, 0.98),
    weight_decay=0.01,
    exempt=(),
    schedule=Triangle(),
    max_gradient_norm=0.5,
    arms=WITHOUT_POSITIONS,
    evaluation_batch=64,
    cost="about 1 min of one CPU core",
)

CRAMMED_BERT = (CRAMMED_BERT_PYDOC,)

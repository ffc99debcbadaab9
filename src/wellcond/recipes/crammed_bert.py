"""Crammed BERT: pretraining by masked language modelling, at the published size and as a small one on a CPU.

Sources: [cramming] https://github.com/JonasGeiping/cramming, in its folder cramming/config the files
arch/crammed-bert.yaml, train/bert-o4.yaml and train/optim/adam.yaml.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wellcond.data import Split
from wellcond.data.masking import NOT_PREDICTED, FixedMasks, Masking
from wellcond.data.pile import is_prepared, open_prepared, pile, prepare
from wellcond.data.text import pydoc_topics, text_folder
from wellcond.data.tokens import split_documents, unigram_entropy
from wellcond.data.wordpiece import Packed, digest, pack, train_wordpiece
from wellcond.recipes.ingredients import BatchRamp, Triangle
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

VOCABULARY = 32768
LENGTH = 128  # [cramming] max_seq_length
BATCH_SIZE = 8192  # [cramming] batch_size
MICRO_BATCH = 128  # ours; [cramming] chooses it to fit the GPU
MICRO_BATCHES = 600_000
"""The budget. [cramming] gives one day to one GPU and sets "an upper limit that is usually never reached", 600,000."""

RAMP = BatchRamp(
    share=0.6
)  # [cramming] batch_size_ramp: "reaches the target 8192 at 60% of the total budget"

MASKING = Masking(vocabulary=VOCABULARY)  # [cramming] mlm_probability 0.25, use_80_20_rule


def read_corpus(sequences: int, source: Source) -> Split:
    """The Pile or any text in sequences of 128 word pieces.

    From a folder that was prepared; from a folder of text, in memory; or, with ``hub``, from the Pile, of which as many
    sequences as are asked for are streamed into the folder first.

    Raises:
        ValueError: there is no folder; or several processes were started and the folder is not prepared yet.
    """
    if source.folder is None:
        raise ValueError(
            "name a folder by --data-dir: of text; or, with --hub, where the sequences of the Pile go (256 bytes each)"
        )
    if not source.hub and not is_prepared(source.folder):
        return masked_texts(text_folder(source.folder), MASKING, LENGTH)
    if not is_prepared(source.folder) and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"{source.folder} is not prepared, and several processes would write it at once: run "
            f"`wellcond train crammed-bert --hub --data-dir {source.folder} --max-steps 1 --subset 128` alone first"
        )
    found = (
        prepare(source.folder, pile, vocabulary=VOCABULARY, length=LENGTH, sequences=sequences)
        if source.hub
        else open_prepared(source.folder)
    )
    return masked_split(found.tokenizer, found.train, found.validation, MASKING)


def crammed_bert_recipe(micro_batches: int = MICRO_BATCHES) -> Recipe:
    """Pretraining at the published size with a budget of micro-batches; `micro_batches_of` makes them of hours.

    >>> crammed_bert_recipe(10_000).steps
    509
    """
    read = partial(read_corpus, micro_batches * MICRO_BATCH)
    return Recipe(
        name="crammed-bert",
        title=f"Crammed BERT on the Pile, or on any text, {micro_batches:,} micro-batches",
        model=crammed_bert,
        data=partial(read, Source()),
        read=read,
        task=MaskedLanguageModel(masking=MASKING),
        steps=RAMP.steps_in(micro_batches, batch_size=BATCH_SIZE, micro_batch=MICRO_BATCH),
        batch_size=BATCH_SIZE,
        micro_batch=MICRO_BATCH,
        ramp=RAMP,
        learning_rate=1e-3,  # [cramming] optim.lr
        betas=(0.9, 0.98),
        epsilon=1e-12,
        weight_decay=0.01,
        exempt=(),  # [cramming] limited_decay_keys: bias and norm; here no parameter with one dimension decays
        schedule=Triangle(),  # [cramming] budget-triangle2
        max_gradient_norm=0.5,  # [cramming] gradient_clipping
        mixed_precision=True,  # [cramming] float16; bfloat16 here
        workers=4,  # ours
        evaluations=20,  # ours
        measurements=20,  # ours
        evaluation_batch=64,  # ours
        arms=WITHOUT_POSITIONS,
        budget=lambda text: crammed_bert_recipe(micro_batches_of(text)),
        cost="about a day of one GPU [cramming]; 20 GB of disk with --hub",
    )


def micro_batches_of(budget: str) -> int:
    """What a budget comes to: a number of micro-batches, or of hours with an h behind it.

    Raises:
        ValueError: the text is neither, or it is hours and several processes were started.

    >>> micro_batches_of("600000")
    600000
    """
    found = re.fullmatch(r"(\d+)|(\d+\.?\d*)h", budget.strip())
    count = int(found[1] or 0) if found else 0
    if found and found[2] and float(found[2]) > 0:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                "several processes would time their hours each for itself: give --budget a number of micro-batches, "
                "which the command tells for hours in one process"
            )
        count = max(1, micro_batches_in(float(found[2])))
    if count < 1:
        raise ValueError(f"--budget is a number of micro-batches or hours such as 24h, got {budget!r}")
    return count


def micro_batches_in(hours: float, *, micro_batch: int = MICRO_BATCH, timed: int = 10) -> int:
    """How many micro-batches this machine's accelerator, or CPU, trains on in so many hours.

    The published budget is a clock that the schedule reads at every step, so that no two runs are alike. Here the
    clock is read once, before the training: forward and backward of ``timed`` micro-batches, the median.
    """
    import statistics
    import time

    # A build for an accelerator names it as the current one on machines without it, too.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = found or torch.device("cpu")
    model = crammed_bert().to(device)
    ids = torch.randint(5, VOCABULARY, (micro_batch, LENGTH), device=device)
    labels = torch.where(torch.rand(ids.shape, device=device) < MASKING.share, ids, NOT_PREDICTED)
    seconds = []
    for _ in range(timed + 2):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(ids, labels=labels).loss
        loss.backward()
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    # The first two choose kernels and allocate memory.
    return int(3600 * hours / statistics.median(seconds[2:]))


CRAMMED_BERT = (CRAMMED_BERT_PYDOC, crammed_bert_recipe())

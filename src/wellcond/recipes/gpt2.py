"""GPT-2 on TinyStories at full size, and a small one on text that ships with Python.

Sources of the numbers below:
  [llm.c] https://github.com/karpathy/llm.c, scripts/run_gpt2_124M.sh, GPT-2 124M on 10B tokens of FineWeb.
  [nanoGPT] https://github.com/karpathy/nanoGPT, train.py, the defaults, which are for GPT-2 124M too.
The paper on conditioned tokens reports a validation loss of 2.41 for its baseline on TinyStories, and 2.36 conditioned.
Which recipe that was, which tokens and which length, is not known here; nor is what it did about the leak of a
correction that is computed from the whole sequence (see docs/decoders.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from wellcond.data import (
    Blocks,
    Split,
    Vocabulary,
    byte_vocabulary,
    gpt2_vocabulary,
    pydoc_topics,
    split_documents,
    tiny_stories,
    train_bpe,
)
from wellcond.data.text import documents_in
from wellcond.data.tokens import unigram_entropy
from wellcond.recipes.ingredients import Schedule
from wellcond.recipes.recipe import Recipe, Source
from wellcond.tasks import CausalLanguageModel

ARMS = ("baseline", "conditioned", "rescaled", "static", "conditioned-paper", "scaled")

VOCABULARY = 50_257
CONTEXT = 1024  # [llm.c] -t 1024
STEPS = 4_500  # ours: 2.4B tokens, 20 for each of 124M parameters and about five passes; [llm.c] has 18,865
WARMUP_STEPS = 700  # [llm.c] -u 700

SMALL_VOCABULARY = 1024
SMALL_CONTEXT = 128
LEAK_CONTEXT = 16  # short, so that a small model soon learns to read the future out of a correction


def gpt2(vocabulary: int = VOCABULARY, context: int = CONTEXT, **changes: Any) -> nn.Module:
    """A GPT-2 from transformers' configuration, by default GPT-2 small, 124M; ``changes`` are further options of it.

    Dropout is off: [nanoGPT] "for pretraining 0 is good". Biases are there, as in GPT-2.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    end = {"bos_token_id": vocabulary - 1, "eos_token_id": vocabulary - 1}
    config = GPT2Config(vocab_size=vocabulary, n_positions=context, **(options | end | changes))
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def language_split(
    vocabulary: Vocabulary, train: Sequence[str], validation: Sequence[str], length: int
) -> Split:
    """Blocks of ``length`` tokens. Its details are the digests of vocabulary and text, and their sizes.

    ``unigram_entropy`` is that of the validation tokens, in nats: no model that ignores context has a lower loss.
    """
    ids = [vocabulary.encode(part) for part in (train, validation)]
    text = hashlib.sha256()
    for part in ids:
        text.update(part.tobytes())
    details = {
        "vocabulary": vocabulary.digest,
        "vocabulary_size": vocabulary.size,
        "text": text.hexdigest()[:16],
        "train_tokens": len(ids[0]),
        "validation_tokens": len(ids[1]),
        "unigram_entropy": round(unigram_entropy(ids[1]), 6),
    }
    first, second = (Blocks(part, length, vocabulary.bytes_per_token) for part in ids)
    return Split(first, second, details)


def read_text(source: Source) -> Split:
    """A folder of text, or Python's own reference, in ``SMALL_VOCABULARY`` tokens trained on its training documents."""
    source.require_plain_folder()
    documents = split_documents(pydoc_topics() if source.folder is None else documents_in(source.folder))
    vocabulary = train_bpe(documents.train, SMALL_VOCABULARY)
    return language_split(vocabulary, documents.train, documents.validation, SMALL_CONTEXT)


def read_bytes(source: Source) -> Split:
    """The same text in bytes, a few at a time."""
    source.require_plain_folder()
    documents = split_documents(pydoc_topics() if source.folder is None else documents_in(source.folder))
    return language_split(byte_vocabulary(), documents.train, documents.validation, LEAK_CONTEXT)


def read_tiny_stories(source: Source) -> Split:
    """TinyStories in GPT-2's tokens; both from the folder if there is one, else from the hub or its cache."""
    if source.corrupt != "fatal":
        raise ValueError("stories are not read one by one, none can be skipped: leave --corrupt out")
    if source.hub and source.folder is not None:
        raise ValueError("--hub takes the stories from the Hugging Face hub: leave the folder out")
    vocabulary = gpt2_vocabulary(source.folder)
    if vocabulary.size > VOCABULARY:
        raise ValueError(
            f"the vocabulary in {source.folder} has {vocabulary.size} ids, GPT-2 has {VOCABULARY}"
        )
    train, validation = tiny_stories(source.folder)
    return language_split(vocabulary, train, validation, CONTEXT)


GPT2_PYDOC = Recipe(
    name="gpt2-pydoc",
    title="A small GPT-2 on the reference of the Python language",
    model=partial(gpt2, SMALL_VOCABULARY, SMALL_CONTEXT, n_embd=64, n_layer=3, n_head=4),
    data=partial(read_text, Source()),
    read=read_text,
    task=CausalLanguageModel(),
    steps=500,
    batch_size=8,
    learning_rate=2e-3,
    betas=(0.9, 0.95),  # [nanoGPT] beta1, beta2
    weight_decay=0.1,  # [nanoGPT] weight_decay
    exempt=(),  # [nanoGPT] all matrices decay, embeddings too
    drop_last=True,
    evaluation_batch=32,
    evaluations=5,
    arms=ARMS,
    cost="about 35 s of one CPU core",
)

GPT2_LEAK = Recipe(
    name="gpt2-leak",
    title="How a correction of the whole sequence tells a decoder its future",
    model=partial(gpt2, 257, LEAK_CONTEXT, n_embd=48, n_layer=3, n_head=3),
    data=partial(read_bytes, Source()),
    read=read_bytes,
    task=CausalLanguageModel(prefix_blocks=256, prefix_positions=LEAK_CONTEXT, prefix_batch=256),
    steps=800,
    batch_size=32,
    learning_rate=2e-3,
    betas=(0.9, 0.95),
    weight_decay=0.1,
    exempt=(),
    drop_last=True,
    arms=("baseline", "conditioned", "conditioned-paper"),
    cost="about 25 s of one CPU core",
)

GPT2_TINY_STORIES = Recipe(
    name="gpt2-tinystories",
    title="GPT-2 small (124M) on TinyStories",
    model=gpt2,
    data=partial(read_tiny_stories, Source()),
    read=read_tiny_stories,
    task=CausalLanguageModel(prefix_blocks=64, prefix_positions=16, prefix_batch=4),
    steps=STEPS,
    batch_size=512,  # [llm.c] -d 524288, in blocks of 1024 tokens
    micro_batch=16,  # ours: 512 is no multiple of the 12 of [nanoGPT]
    learning_rate=6e-4,  # [llm.c] -l 0.0006
    betas=(0.9, 0.95),  # [nanoGPT] beta1, beta2
    weight_decay=0.1,  # [llm.c] -c 0.1
    exempt=(),  # [nanoGPT] all matrices decay, embeddings too
    schedule=Schedule(
        warmup_epochs=WARMUP_STEPS / STEPS,  # a training by steps counts as one epoch
        floor=0.0,  # [llm.c] -q 0.0
        cosine_from_warmup=True,
    ),
    max_gradient_norm=1.0,  # [nanoGPT] grad_clip
    drop_last=True,
    mixed_precision=True,
    evaluation_batch=16,
    evaluations=18,  # ours: every 250 steps, [llm.c] -v 250
    measurements=18,
    arms=ARMS,
    # [llm.c] 300 ms for a step of 524,288 tokens on eight A100
    cost="about 3 h of one A100",
)

GPT2 = (GPT2_PYDOC, GPT2_LEAK, GPT2_TINY_STORIES)

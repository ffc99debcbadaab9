"""From documents to tokens: vocabularies, a split by document, blocks in which each token is predicted once."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from wellcond.data.text import END_OF_TEXT, paragraphs

IGNORED = -100
"""The label of a token that is not to be predicted, as in `torch.nn.functional.cross_entropy`."""

Ids = NDArray[np.unsignedinteger[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """Byte-level tokens: any text can be written in them, and each stands for some bytes.

    Attributes:
        tokenizer: a ``tokenizers.Tokenizer`` with byte-level pre-tokens and without a normaliser.
        end: the id that follows every document. No text contains it: a text that spells it out is written in others.
    """

    tokenizer: Any
    end: int

    @functools.cached_property
    def size(self) -> int:
        """One more than the largest id, ``end`` included."""
        return 1 + max(int(self.end), *map(int, self.tokenizer.get_vocab().values()))

    @functools.cached_property
    def digest(self) -> str:
        """What two vocabularies share only if they write every text alike; losses are comparable only then."""
        merges = json.loads(self.tokenizer.to_str())["model"]["merges"]
        what = [sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1]), merges, self.end]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    @functools.cached_property
    def bytes_per_token(self) -> NDArray[np.int64]:
        """``(size,)``: how many bytes of text each id stands for; 0 for ``end``."""
        counts = np.zeros(self.size, np.int64)
        for token, i in self.tokenizer.get_vocab().items():
            counts[i] = len(token)  # byte-level tokens are spelt with one character a byte
        counts[self.end] = 0
        return counts

    def encode(self, documents: Iterable[str]) -> Ids:
        """All documents in a row, each followed by ``end``; ``(tokens,)`` uint16, or uint32 for larger vocabularies.

        >>> bytes_ = byte_vocabulary()
        >>> bytes_.encode(["é", "ab"]).tolist()
        [195, 169, 256, 97, 98, 256]
        """
        dtype: type[np.unsignedinteger[Any]] = np.uint16 if self.size <= 2**16 else np.uint32
        parts: list[Ids] = []
        for some in _chunks(documents, 1000):
            for encoding in self.tokenizer.encode_batch(some, add_special_tokens=False):
                parts.append(np.array([*encoding.ids, self.end], dtype))
        return np.concatenate(parts) if parts else np.zeros(0, dtype)


def byte_vocabulary() -> Vocabulary:
    """Every byte is a token, and its number is the id; 256 ends a document.

    >>> byte_vocabulary().size
    257
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    spelling = {character: byte for byte, character in characters.items()}
    tokenizer = Tokenizer(models.BPE(vocab=spelling, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer, 256)


def train_bpe(documents: Iterable[str], size: int) -> Vocabulary:
    """Byte pair encoding of ``size`` ids, the last of which ends a document, trained on ``documents``.

    Train it on training documents only: a vocabulary that has seen the validation text writes it too well.

    Raises:
        ValueError: ``size`` is below 257, or the documents are too few for so many tokens.

    >>> vocabulary = train_bpe(["so so so so", "so long"], 259)
    >>> vocabulary.tokenizer.encode("so so").tokens, vocabulary.size
    (['so', 'Ġso'], 259)
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < 257:
        raise ValueError(f"a vocabulary has the 256 bytes and the end of a document, got size={size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != size - 1:
        raise ValueError(
            f"the documents give {tokenizer.get_vocab_size() + 1} tokens, not {size}: ask for fewer, or give more text"
        )
    return Vocabulary(tokenizer, size - 1)


def gpt2_vocabulary(folder: str | os.PathLike[str] | None = None) -> Vocabulary:
    """GPT-2's 50,257 tokens, or another byte-level BPE with ``<|endoftext|>``.

    Args:
        folder: that holds ``tokenizer.json``, or ``vocab.json`` and ``merges.txt``. None: ``openai-community/gpt2``
            from the Hugging Face hub, or from its cache.

    Raises:
        FileNotFoundError: the folder has no such files.
        ConnectionError: the hub cannot be reached and its cache holds nothing.
        ValueError: the tokens are not byte-level, or have no ``<|endoftext|>``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if folder is None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2").backend_tokenizer
        except OSError as error:
            raise ConnectionError(
                f"GPT-2's tokenizer could not be had from the Hugging Face hub ({error}); put its vocab.json and "
                f"merges.txt into the folder of the text and name it with --text"
            ) from error
    else:
        root = Path(folder)
        if (root / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
        elif (root / "vocab.json").is_file() and (root / "merges.txt").is_file():
            bpe = models.BPE.from_file(str(root / "vocab.json"), str(root / "merges.txt"))
            tokenizer = Tokenizer(bpe)
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        else:
            raise FileNotFoundError(f"{root} holds neither tokenizer.json nor vocab.json and merges.txt")
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None or tokenizer.normalizer is not None or "ByteLevel" not in repr(tokenizer.pre_tokenizer):
        raise ValueError(
            f"{folder or 'openai-community/gpt2'} is no byte-level tokenizer with {END_OF_TEXT}: its normaliser is "
            f"{tokenizer.normalizer}, its pre-tokenizer {tokenizer.pre_tokenizer}"
        )
    tokenizer.encode_special_tokens = True  # a story that spells out the end of a document does not end there
    return Vocabulary(tokenizer, end)


@dataclasses.dataclass(frozen=True)
class Documents:
    """Training and validation documents."""

    train: Sequence[str]
    validation: Sequence[str]


def split_documents(documents: Sequence[str], share: float = 0.1) -> Documents:
    """Whole documents for training and for validation; those that share a long paragraph stay on one side.

    Which ones is settled by their text alone: the order in which they come does not matter. The validation documents
    have at most ``share`` of the characters, unless the smallest of them has more.

    Raises:
        ValueError: there are fewer than two documents that share nothing.

    >>> split = split_documents([f"document {i}" for i in range(20)], share=0.25)
    >>> len(split.train), len(split.validation)
    (15, 5)
    """
    groups = _related(documents)
    if len(groups) < 2:
        raise ValueError(
            f"{len(documents)} documents make {len(groups)} that share no paragraph; training and validation need "
            f"one each: divide the text into more files"
        )
    weigh = [sum(len(documents[i]) for i in group) for group in groups]
    digests = [min(hashlib.sha256(documents[i].encode()).hexdigest() for i in group) for group in groups]
    room = share * sum(weigh)
    chosen: set[int] = set()
    for i in sorted(range(len(groups)), key=lambda i: digests[i]):
        if weigh[i] <= room:
            chosen |= groups[i]
            room -= weigh[i]
    if not chosen:
        chosen = groups[min(range(len(groups)), key=lambda i: (weigh[i], digests[i]))]
    train, validation = (
        [document for i, document in enumerate(documents) if (i in chosen) == held] for held in (False, True)
    )
    return Documents(train, validation)


def _related(documents: Sequence[str]) -> list[set[int]]:
    """The documents in groups: those of two groups share neither a long paragraph nor their whole text."""
    parent = list(range(len(documents)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    owner: dict[str, int] = {}
    for i, document in enumerate(documents):
        for part in {document.strip(), *paragraphs(document)}:
            parent[root(i)] = root(owner.setdefault(part, i))
    groups: dict[int, set[int]] = {}
    for i in range(len(documents)):
        groups.setdefault(root(i), set()).add(i)
    return list(groups.values())


class Blocks(Dataset[dict[str, Tensor]]):
    """Tokens cut into blocks of equal length, in which each token but the first is predicted once.

    Items: ``input_ids`` ``(length,)`` int64; ``labels`` ``(length,)`` int64, the token that follows each; ``bytes``
    ``()`` int64, how many bytes of text the labels stand for. The last block begins earlier, so that it is full, and
    has the label -100 where the block before has predicted already.

    Args:
        ids: ``(tokens,)``, all documents in a row.
        length: tokens that a model sees at once.
        bytes_per_token: ``(vocabulary,)``.

    Raises:
        ValueError: ``length`` is below 1, or there are not enough tokens for one block.

    >>> blocks = Blocks(np.arange(6, dtype=np.uint16), 3, np.ones(6, np.int64))
    >>> blocks[0]["input_ids"], blocks[1]["input_ids"], blocks[1]["labels"], blocks[1]["bytes"]
    (tensor([0, 1, 2]), tensor([2, 3, 4]), tensor([-100,    4,    5]), tensor(2))
    """

    draws = False  # items take no random numbers

    def __init__(self, ids: Ids, length: int, bytes_per_token: NDArray[np.int64]) -> None:
        if length < 1 or len(ids) <= length:
            raise ValueError(
                f"{len(ids)} tokens are not enough for a block of {length} and the token after it"
            )
        self.ids = ids
        self.length = length
        self.bytes_per_token = bytes_per_token

    def __len__(self) -> int:
        return math.ceil((len(self.ids) - 1) / self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        wanted = index * self.length
        start = min(wanted, len(self.ids) - 1 - self.length)
        block = self.ids[start : start + self.length + 1].astype(np.int64)
        labels = block[1:].copy()
        labels[: wanted - start] = IGNORED
        count = self.bytes_per_token[block[1 + wanted - start :]].sum()
        return {
            "input_ids": torch.from_numpy(block[:-1].copy()),
            "labels": torch.from_numpy(labels),
            "bytes": torch.tensor(count),
        }


def unigram_entropy(ids: Ids) -> float:
    """−Σ p log p of the frequencies of tokens in ``ids``, in nats: no model that ignores context has a lower loss.

    >>> round(unigram_entropy(np.array([0, 1, 2, 3], np.uint16)), 4) == round(math.log(4), 4)
    True
    """
    counts = np.bincount(ids)
    p = counts[counts > 0] / len(ids)
    return float(-(p * np.log(p)).sum())


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(items)
    while some := list(islice(iterator, size)):
        yield some

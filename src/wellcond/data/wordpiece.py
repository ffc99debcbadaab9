"""WordPiece vocabularies trained here, and documents packed into sequences of equal length for BERT."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens; their ids are their places here, in every vocabulary that `train_wordpiece` makes."""

PREFIX = "##"
"""What a piece inside a word begins with."""

ALPHABET = 1000
"""How many different characters a vocabulary knows, the most frequent ones, as BERT's tokenizer; others are unknown."""

PAD, UNKNOWN, CLASS, SEPARATOR, MASK = range(len(SPECIAL))


def train_wordpiece(documents: Sequence[str], size: int, *, length: int = 128) -> Any:
    """A WordPiece tokenizer of ``size`` tokens in lower case without accents, as BERT's, trained on ``documents``.

    The same documents make the same vocabulary.

    A pair becomes ``[CLS] a [SEP] b [SEP]``, a text alone ``[CLS] a [SEP]``.

    Args:
        documents: texts. Train on training documents only.
        size: tokens, with the five special ones.
        length: what the tokenizer cuts texts to where it is asked to.

    Returns:
        transformers.PreTrainedTokenizerFast: ``save_pretrained`` and ``AutoTokenizer`` know it.

    Raises:
        ValueError: the documents are too few for so many tokens.

    >>> tokenizer = train_wordpiece(["the cat sat", "the hat"], 20)
    >>> tokenizer.convert_ids_to_tokens(tokenizer("The cat", "a hat!")["input_ids"])
    ['[CLS]', 'the', 'cat', '[SEP]', 'a', 'hat', '[UNK]', '[SEP]']
    """
    from tokenizers import decoders, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    normalizer = normalizers.BertNormalizer()
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update("".join(normalizer.normalize_str(document).split()))
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:ALPHABET]
    # The trainer numbers the characters inside words as they come out of a hash table, and breaks ties between pairs by
    # these numbers: given to it in a fixed order, the same text makes the same vocabulary.
    inner = sorted(
        piece
        for piece in _trained(documents, 0, alphabet, [*SPECIAL]).get_vocab()
        if piece.startswith(PREFIX) and len(piece) == len(PREFIX) + 1
    )
    vocabulary = _trained(documents, size, alphabet, [*SPECIAL, *inner]).get_vocab()
    if len(vocabulary) != size:
        raise ValueError(
            f"the documents give {len(vocabulary)} word pieces, not {size}: ask for fewer, or give more text"
        )
    tokenizer = _bare(vocabulary)
    tokenizer.decoder = decoders.WordPiece(prefix=PREFIX)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLASS), ("[SEP]", SEPARATOR)],
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        model_max_length=length,
        model_input_names=["input_ids", "attention_mask"],
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def _bare(vocabulary: dict[str, int] | None = None) -> Any:
    """A tokenizer that splits as BERT's does."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    model = models.WordPiece(vocabulary, unk_token="[UNK]", continuing_subword_prefix=PREFIX)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _trained(documents: Sequence[str], size: int, alphabet: list[str], first: list[str]) -> Any:
    """A tokenizer with the pieces ``first`` in front; the alphabet alone where ``size`` has no room for more."""
    from tokenizers import trainers

    tokenizer = _bare({"[UNK]": 0})
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        min_frequency=0,
        continuing_subword_prefix=PREFIX,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def packed_ids(tokenizer: Any, documents: Iterable[str]) -> Iterator[NDArray[np.uint16]]:
    """The ids of document after document, each followed by the separator, in pieces of about a thousand documents.

    Raises:
        ValueError: the vocabulary does not fit 16 bits.
    """
    if len(tokenizer) > 2**16:
        raise ValueError(f"a vocabulary of {len(tokenizer)} tokens does not fit the 16 bits of a stored id")
    separator = tokenizer.sep_token_id
    iterator = iter(documents)
    while some := list(islice(iterator, 1000)):
        encoded = tokenizer.backend_tokenizer.encode_batch_fast(some, add_special_tokens=False)
        yield np.concatenate([np.array([*item.ids, separator], np.uint16) for item in encoded])


class Packed(Dataset[dict[str, Tensor]]):
    """Sequences of equal length cut out of a row of documents; items ``{"input_ids": (length,) int64}``.

    Args:
        ids: ``(n, length)`` of any integer type, in memory or mapped from a file.
    """

    draws = False  # items take no random numbers

    def __init__(self, ids: NDArray[Any]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self.ids[index].astype(np.int64))}


def pack(tokenizer: Any, documents: Iterable[str], length: int) -> Packed:
    """All documents in a row, cut into sequences; fewer than ``length`` tokens at the very end are left out.

    Raises:
        ValueError: there are fewer than ``length`` tokens.

    >>> tokenizer = train_wordpiece(["a b c d"], 9)
    >>> packed = pack(tokenizer, ["a b c d", "b a c"], 4)
    >>> [tokenizer.decode(item["input_ids"]) for item in packed]
    ['a b c d', '[SEP] b a c']
    """
    row = np.concatenate([np.zeros(0, np.uint16), *packed_ids(tokenizer, documents)])
    count = len(row) // length
    if count == 0:
        raise ValueError(f"{len(row)} tokens do not fill a sequence of {length}: give more text")
    return Packed(row[: count * length].reshape(count, length))


def digest(tokenizer: Any) -> str:
    """What two vocabularies share only if they write every text alike; losses are comparable only then.

    >>> digest(train_wordpiece(["a b"], 7)) == digest(train_wordpiece(["a b"], 7))
    True
    """
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16]

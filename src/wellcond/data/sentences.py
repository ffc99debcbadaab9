"""Sentences and pairs of sentences with a label, tokenised once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclasses.dataclass(frozen=True)
class Example:
    """One sentence or a pair, and its label.

    Attributes:
        first, second: the sentences; ``second`` is None where there is one only.
        label: number of the class, or the value of a regression.
    """

    first: str
    second: str | None
    label: float


class Sentences(Dataset[dict[str, Tensor]]):
    """Tokenised examples. Items: ``input_ids`` and, if the tokenizer has them, ``token_type_ids``, ``(N,)`` int64 of
    differing N; ``labels`` ``()``, int64 or float32; ``part`` ``()`` int64.

    Args:
        examples: the examples, all with one sentence or all with two.
        tokenizer: a fast tokenizer of transformers.
        length: longer examples are cut there, the longer sentence first; ``truncated`` counts them.
        regression: labels are numbers, not classes.
        parts: the number of the part each example belongs to, as matched and mismatched of MNLI; None: all of part 0.

    Raises:
        ValueError: there is no example, or some have one sentence and others two.

    >>> from wellcond.data.wordpiece import train_wordpiece
    >>> tokenizer = train_wordpiece(["the cat sat", "the hat"], 20)
    >>> sentences = Sentences([Example("the cat", "the hat", 1)], tokenizer, length=16)
    >>> tokenizer.decode(sentences[0]["input_ids"]), sentences[0]["labels"], sentences.truncated
    ('[CLS] the cat [SEP] the hat [SEP]', tensor(1), 0)
    """

    draws = False  # items take no random numbers

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Any,
        *,
        length: int,
        regression: bool = False,
        parts: Sequence[int] | None = None,
    ) -> None:
        if not examples:
            raise ValueError("there is no example: the data are empty")
        pairs = {example.second is not None for example in examples}
        if len(pairs) > 1:
            raise ValueError("some examples have one sentence and others two")
        self.labels = torch.tensor(
            [example.label for example in examples], dtype=torch.float32 if regression else torch.int64
        )
        self.parts = torch.tensor([0] * len(examples) if parts is None else list(parts))
        names = [
            "input_ids",
            *(["token_type_ids"] if "token_type_ids" in tokenizer.model_input_names else []),
        ]
        rows: dict[str, list[list[int]]] = {name: [] for name in names}
        self.truncated = 0
        for start in range(0, len(examples), 1000):
            some = examples[start : start + 1000]
            first = [example.first for example in some]
            second = [example.second for example in some] if pairs == {True} else None
            encoded = tokenizer(first, second, truncation="longest_first", max_length=length)
            for name in names:
                rows[name] += encoded[name]
            self.truncated += sum(bool(item.overflowing) for item in encoded.encodings)
        ends = np.cumsum([0] + [len(row) for row in rows["input_ids"]])
        self.ends: np.ndarray[Any, np.dtype[np.int64]] = ends
        # One long row for each: a list of lists takes many times the memory.
        self.rows = {name: torch.tensor(np.concatenate(of, dtype=np.int32)) for name, of in rows.items()}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = slice(int(self.ends[index]), int(self.ends[index + 1]))
        item = {name: row[place].long() for name, row in self.rows.items()}
        return item | {"labels": self.labels[index], "part": self.parts[index]}

"""A corpus that is too large for memory: streamed once, tokenised, and kept as packed sequences in a folder.

The Pile, deduplicated, is 825 GB of text; a day of one GPU sees a few per cent of it. So the stream is read until there
are as many sequences as the budget asks for, 256 bytes each, and a training reads them from disk in any order.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from wellcond.data.wordpiece import Packed, packed_ids, train_wordpiece

HUB = "EleutherAI/the_pile_deduplicated"
MARK = "sequences.json"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a prepared folder holds: a tokenizer and packed sequences, mapped from their files."""

    tokenizer: Any
    train: Packed
    validation: Packed


def pile() -> Iterator[str]:
    """The texts of the deduplicated Pile, streamed from the Hugging Face hub.

    Raises:
        ConnectionError: the hub is out of reach.
    """
    import datasets

    try:
        stream = datasets.load_dataset(HUB, split="train", streaming=True)
    except (OSError, datasets.exceptions.DatasetNotFoundError) as error:
        raise ConnectionError(
            f"cannot stream {HUB!r}, the hub is out of reach ({type(error).__name__}: {error}): go online, "
            f"or name a folder of text by --data-dir"
        ) from error
    for row in stream:
        yield row["text"]


def prepare(
    folder: str | os.PathLike[str],
    documents: Callable[[], Iterable[str]],
    *,
    vocabulary: int,
    length: int,
    sequences: int,
    held: int = 1000,
    fitted: int = 200_000,
) -> Prepared:
    """Write a folder for `open_prepared`; one that is complete is only opened.

    Args:
        folder: of the results: ``tokenizer/``, ``train.u16``, ``validation.u16`` and, last, ``sequences.json``.
        documents: starts the stream of texts from its beginning, twice.
        vocabulary: word pieces.
        length: tokens of a sequence.
        sequences: for training. The stream may end sooner.
        held: the first documents are for validation.
        fitted: the documents after them that the vocabulary is trained on.

    Raises:
        ValueError: the folder holds sequences of another kind, too few of them, or there are too few documents.
    """
    root = Path(folder)
    if (root / MARK).is_file():
        found = json.loads((root / MARK).read_text())
        asked = {"vocabulary": vocabulary, "length": length}
        if any(found[name] != value for name, value in asked.items()):
            raise ValueError(f"{root} was prepared with {found}, not with {asked}: name another folder")
        if found["train"] < sequences and not found["complete"]:
            raise ValueError(
                f"{root} holds {found['train']:,} sequences, not the {sequences:,} asked for: name another folder"
            )
        return open_prepared(root)
    root.mkdir(parents=True, exist_ok=True)
    tokenizer = train_wordpiece(list(islice(documents(), held, held + fitted)), vocabulary, length=length)
    tokenizer.save_pretrained(root / "tokenizer")
    stream = iter(documents())
    validation, _ = _write(root / "validation.u16", tokenizer, islice(stream, held), length, None)
    train, complete = _write(root / "train.u16", tokenizer, stream, length, sequences)
    if not (train and validation):
        raise ValueError(f"{train} training and {validation} validation sequences: there is too little text")
    mark = {
        "vocabulary": vocabulary,
        "length": length,
        "train": train,
        "validation": validation,
        "complete": complete,
    }
    # Last and in one step: a folder without it was not finished, and is begun anew.
    (root / "unfinished").write_text(json.dumps(mark) + "\n")
    (root / "unfinished").replace(root / MARK)
    return open_prepared(root)


def is_prepared(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds finished sequences."""
    return (Path(folder) / MARK).is_file()


def open_prepared(folder: str | os.PathLike[str]) -> Prepared:
    """The sequences of a folder that `prepare` wrote; they stay on disk until they are asked for.

    Raises:
        FileNotFoundError: the folder was not prepared, or not to the end.
        ValueError: a file has another length than was written.
    """
    from transformers import AutoTokenizer

    root = Path(folder)
    if not is_prepared(root):
        raise FileNotFoundError(f"{root} holds no finished sequences ({MARK})")
    found = json.loads((root / MARK).read_text())
    parts = []
    for name in ("train", "validation"):
        path, shape = root / f"{name}.u16", (found[name], found["length"])
        if path.stat().st_size != 2 * shape[0] * shape[1]:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes, not those of {shape} ids: prepare it anew"
            )
        parts.append(Packed(np.memmap(path, np.uint16, "r", shape=shape)))
    return Prepared(AutoTokenizer.from_pretrained(root / "tokenizer"), *parts)


def _write(
    path: Path, tokenizer: Any, documents: Iterable[str], length: int, most: int | None
) -> tuple[int, bool]:
    """Sequences written, at most so many, and whether that was all there is."""
    written, rest = 0, np.zeros(0, np.uint16)
    with path.open("wb") as file:
        for piece in packed_ids(tokenizer, documents):
            row = np.concatenate([rest, piece])
            count = len(row) // length
            if most is not None and written + count >= most:
                file.write(row[: (most - written) * length].tobytes())
                return most, False
            file.write(row[: count * length].tobytes())
            written, rest = written + count, row[count * length :]
    return written, True

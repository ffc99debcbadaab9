"""A corpus streamed once into a folder: the sequences are those of packing in memory; unfinished ones are told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from wellcond.data.pile import MARK, is_prepared, open_prepared, pile, prepare
from wellcond.data.text import paragraphs, pydoc_topics
from wellcond.data.wordpiece import pack, train_wordpiece

HELD, FITTED, LENGTH, SIZE = 5, 60, 16, 400


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [text for topic in pydoc_topics() for text in paragraphs(topic)][:200]


def prepared(folder: Path, texts: list[str], sequences: int = 10**6, **changes: Any) -> Any:
    options: dict[str, Any] = {"vocabulary": SIZE, "length": LENGTH, "held": HELD, "fitted": FITTED}
    return prepare(folder, lambda: iter(texts), sequences=sequences, **(options | changes))


def test_the_sequences_are_those_of_packing_in_memory(texts: list[str], tmp_path: Path) -> None:
    """The first documents are held for validation, and neither the vocabulary nor the training sees them."""
    found = prepared(tmp_path, texts)
    tokenizer = train_wordpiece(texts[HELD : HELD + FITTED], SIZE, length=LENGTH)
    assert found.tokenizer.get_vocab() == tokenizer.get_vocab()
    for part, documents in ((found.train, texts[HELD:]), (found.validation, texts[:HELD])):
        assert np.array_equal(part.ids, pack(tokenizer, documents, LENGTH).ids)
        assert isinstance(part.ids, np.memmap)
    assert found.train[3]["input_ids"].tolist() == found.train.ids[3].tolist()


def test_a_stream_is_read_no_further_than_asked(texts: list[str], tmp_path: Path) -> None:
    whole, read = prepared(tmp_path / "whole", texts), 0

    def stream() -> Iterator[str]:
        nonlocal read
        for number, text in enumerate(texts * 20):
            read = max(read, number)
            yield text

    some = prepare(
        tmp_path / "some", stream, vocabulary=SIZE, length=LENGTH, sequences=25, held=HELD, fitted=FITTED
    )
    assert np.array_equal(some.train.ids, whole.train.ids[:25])
    assert read < HELD + 1001  # pieces of a thousand documents
    assert json.loads((tmp_path / "some" / MARK).read_text())["complete"] is False


def test_a_finished_folder_is_only_opened(texts: list[str], tmp_path: Path) -> None:
    first = prepared(tmp_path, texts, 25)

    def never() -> Iterator[str]:
        raise AssertionError("the stream was read again")

    again = prepare(tmp_path, never, vocabulary=SIZE, length=LENGTH, sequences=20)
    assert np.array_equal(again.train.ids, first.train.ids)
    with pytest.raises(ValueError, match=r"holds 25 sequences, not the 26 asked for"):
        prepared(tmp_path, texts, 26)
    with pytest.raises(ValueError, match="was prepared with"):
        prepared(tmp_path, texts, 25, length=8)


def test_an_interrupted_folder_is_begun_anew(texts: list[str], tmp_path: Path) -> None:
    def breaking() -> Iterator[str]:
        # The vocabulary is trained on the first pass, the second one breaks.
        nonlocal passes
        passes += 1
        for number, text in enumerate(texts):
            if passes == 2 and number == 100:
                raise OSError("the line is dead")
            yield text

    passes = 0
    with pytest.raises(OSError, match="the line is dead"):
        prepare(tmp_path, breaking, vocabulary=SIZE, length=LENGTH, sequences=10**6, held=HELD, fitted=FITTED)
    assert not is_prepared(tmp_path)
    with pytest.raises(FileNotFoundError, match="no finished sequences"):
        open_prepared(tmp_path)
    whole = prepared(tmp_path / "other", texts)
    assert np.array_equal(prepared(tmp_path, texts).train.ids, whole.train.ids)


def test_a_file_that_was_cut_is_told(texts: list[str], tmp_path: Path) -> None:
    prepared(tmp_path, texts)
    path = tmp_path / "train.u16"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train.u16 has \d+ bytes, not those of .* prepare it anew"):
        open_prepared(tmp_path)


def test_too_little_text_is_an_error(texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0 training and .* there is too little text"):
        prepare(tmp_path, lambda: iter(texts[:6]), vocabulary=80, length=512, sequences=9, held=5, fitted=1)


def test_without_a_network_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_reach(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr(datasets, "load_dataset", out_of_reach)
    with pytest.raises(
        ConnectionError, match=r"out of reach .*no route.* name a folder of text by --data-dir"
    ):
        next(pile())

"""Tokens write every text and nothing else; validation text is never trained on; each token is scored once."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellcond.data.text import paragraphs, pydoc_topics
from wellcond.data.tokens import (
    Blocks,
    Vocabulary,
    byte_vocabulary,
    gpt2_vocabulary,
    split_documents,
    train_bpe,
    unigram_entropy,
)

TEXT = ["the cat sat on the mat, the cat sat", "a cat and a hat — naïve", "<|endoftext|> the the the cat"]


def gpt2_folder(folder: Path, documents: list[str] = TEXT, size: int = 280) -> Path:
    """A tokenizer as GPT-2's is published, ``vocab.json`` and ``merges.txt``."""
    tokenizer = train_bpe(documents, size).tokenizer
    vocabulary = tokenizer.get_vocab() | {"<|endoftext|>": size - 1}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n")
    return folder


@pytest.fixture(scope="module", params=["bytes", "bpe", "gpt2", "json"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    if request.param == "bytes":
        return byte_vocabulary()
    if request.param == "bpe":
        return train_bpe(TEXT, 280)
    folder = gpt2_folder(tmp_path_factory.mktemp("gpt2"))
    if request.param == "gpt2":
        return gpt2_vocabulary(folder)
    gpt2_vocabulary(folder).tokenizer.save(str(folder / "tokenizer.json"))
    return gpt2_vocabulary(folder)


@settings(max_examples=60, deadline=None)
@given(documents=st.lists(st.one_of(st.text(), st.just("a<|endoftext|>b")), max_size=4))
def test_tokens_stand_for_the_bytes_of_the_text(vocabulary: Vocabulary, documents: list[str]) -> None:
    """Every document comes back, its bytes are counted right, and the end mark is there once a document."""
    ids = vocabulary.encode(documents)
    assert (ids == vocabulary.end).sum() == len(documents)
    assert vocabulary.bytes_per_token[ids].sum() == sum(len(d.encode()) for d in documents)
    found = [
        list(group) for is_end, group in itertools.groupby(ids, lambda i: i == vocabulary.end) if not is_end
    ]
    decoded = [vocabulary.tokenizer.decode(part, skip_special_tokens=False) for part in found]
    assert decoded == [document for document in documents if document]


def test_byte_tokens_are_bytes() -> None:
    text = "naïve\n"
    assert byte_vocabulary().encode([text]).tolist() == [*text.encode(), 256]


def test_digests_tell_vocabularies_apart_and_know_the_same_one() -> None:
    digests = [byte_vocabulary(), train_bpe(TEXT, 280), train_bpe(TEXT, 281), train_bpe(TEXT[:2] * 2, 280)]
    assert len({v.digest for v in digests}) == 4
    assert train_bpe(TEXT, 280).digest == train_bpe(TEXT, 280).digest


def test_large_vocabularies_have_larger_numbers() -> None:
    small = byte_vocabulary()
    assert small.encode(["a"]).dtype == np.uint16
    assert Vocabulary(small.tokenizer, 70_000).encode(["a"]).tolist() == [97, 70_000]


def test_a_vocabulary_that_the_text_does_not_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="not 5000: ask for fewer"):
        train_bpe(TEXT, 5000)
    with pytest.raises(ValueError, match="size=100"):
        train_bpe(TEXT, 100)


def test_what_is_no_gpt2_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer\.json nor vocab\.json"):
        gpt2_vocabulary(tmp_path)
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1})).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="no byte-level tokenizer"):
        gpt2_vocabulary(tmp_path)


# ------------------------------------------------------------------------------------------- the split


def related(documents: list[str]) -> list[set[str]]:
    """Groups that share paragraphs or whole texts, by merging until nothing changes."""
    groups: list[set[str]] = []
    for document in documents:
        own = {document.strip()} | paragraphs(document)
        groups, touched = [g for g in groups if not g & own], [g for g in groups if g & own]
        groups.append(own.union(*touched))
    return groups


@settings(max_examples=60, deadline=None)
@given(data=st.data(), share=st.floats(0.01, 0.6))
def test_no_long_paragraph_is_on_both_sides(data: st.DataObject, share: float) -> None:
    blocks = [f"paragraph {i}: " + "words " * 15 for i in range(6)]
    made = st.lists(st.sampled_from([*blocks, "short", "other"]), min_size=1, max_size=3).map("\n\n".join)
    documents = data.draw(st.lists(made, min_size=2, max_size=12))
    if len(related(documents)) < 2:
        with pytest.raises(ValueError, match="divide the text"):
            split_documents(documents, share)
        return
    split = split_documents(documents, share)
    assert split.train
    assert split.validation
    assert sorted([*split.train, *split.validation]) == sorted(documents)
    seen = set().union(*map(paragraphs, split.train))
    assert not seen & set().union(*map(paragraphs, split.validation))
    assert not set(split.train) & set(split.validation)


def test_the_split_does_not_depend_on_the_order() -> None:
    documents = pydoc_topics()
    one, other = split_documents(documents), split_documents(documents[::-1])
    assert sorted(one.validation) == sorted(other.validation)
    held = sum(map(len, one.validation)) / sum(map(len, documents))
    assert 0.05 < held <= 0.1


# ------------------------------------------------------------------------------------------- blocks


@settings(max_examples=80, deadline=None)
@given(tokens=st.integers(2, 60), length=st.integers(1, 20))
def test_each_token_but_the_first_is_predicted_once_from_the_ones_before(tokens: int, length: int) -> None:
    ids = np.arange(tokens, dtype=np.uint16)
    if tokens <= length:
        with pytest.raises(ValueError, match="not enough"):
            Blocks(ids, length, np.ones(tokens, np.int64))
        return
    blocks = Blocks(ids, length, np.arange(tokens))
    predicted: list[int] = []
    for i in range(len(blocks)):
        item = blocks[i]
        assert item["input_ids"].shape == item["labels"].shape == (length,)
        kept = item["labels"] != -100
        assert torch.equal(item["labels"][kept], item["input_ids"][kept] + 1)
        assert item["bytes"] == item["labels"][kept].sum()
        predicted += item["labels"][kept].tolist()
    assert predicted == list(range(1, tokens))
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_unigram_entropy_is_that_of_the_frequencies() -> None:
    ids = np.repeat(np.arange(3, dtype=np.uint16), [2, 1, 1])
    assert unigram_entropy(ids) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy(np.zeros(5, np.uint16)) == 0.0

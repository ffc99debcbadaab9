"""Word pieces, packed sequences and masks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer

from wellcond.data.masking import FixedMasks, Masking
from wellcond.data.text import pydoc_topics
from wellcond.data.wordpiece import MASK, SPECIAL, Packed, pack, packed_ids, train_wordpiece

RULE = Masking(vocabulary=1000)


def tokens(shape: tuple[int, ...] = (64, 128), seed: int = 0) -> Tensor:
    return torch.randint(5, 1000, shape, generator=torch.Generator().manual_seed(seed))


def applied(ids: Tensor, rule: Masking = RULE, seed: int = 1) -> tuple[Tensor, Tensor]:
    return rule.apply(ids, torch.Generator().manual_seed(seed))


def test_the_shares_are_25_and_80_10_10() -> None:
    """Within five standard deviations of a binomial count."""
    ids = tokens((400, 128))
    inputs, labels = applied(ids)
    chosen = labels != -100
    hidden, kept = chosen & (inputs == MASK), chosen & (inputs == ids)
    swapped = chosen & ~hidden & ~kept
    for count, total, share in (
        (chosen.sum(), ids.numel(), 0.25),
        (hidden.sum(), chosen.sum(), 0.8),
        # A replacement is the token itself once in a thousand times.
        (swapped.sum(), chosen.sum(), 0.1 * 0.999),
        (kept.sum(), chosen.sum(), 0.1 + 0.1 * 0.001),
    ):
        deviation = (share * (1 - share) / float(total)) ** 0.5
        assert abs(float(count) / float(total) - share) < 5 * deviation


def test_labels_are_the_original_tokens_and_the_rest_is_untouched() -> None:
    ids = tokens()
    before = ids.clone()
    inputs, labels = applied(ids)
    chosen = labels != -100
    assert torch.equal(labels[chosen], before[chosen])
    assert torch.equal(inputs[~chosen], before[~chosen])
    assert torch.equal(ids, before)


def test_replacements_are_spread_over_the_vocabulary() -> None:
    rule = Masking(vocabulary=10, share=1.0, hidden=0.0, replaced=1.0, special=())
    inputs, _ = applied(torch.full((500, 100), 7), rule)
    counts = torch.bincount(inputs.flatten(), minlength=10) / inputs.numel()
    assert (counts - 0.1).abs().max() < 0.01


def test_special_tokens_are_never_chosen() -> None:
    ids = tokens((50, 40))
    ids[:, 0], ids[:, 20], ids[:, 30:] = 2, 3, 0
    inputs, labels = applied(ids, Masking(vocabulary=1000, share=0.9))
    special = (ids == 0) | (ids == 2) | (ids == 3)
    assert (labels[special] == -100).all()
    assert torch.equal(inputs[special], ids[special])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 100))
def test_there_is_always_something_to_predict(batch: int, length: int, seed: int) -> None:
    _, labels = applied(tokens((batch, length)), Masking(vocabulary=1000, share=1e-6), seed)
    assert (labels != -100).sum() >= 1


def test_bad_rules_and_batches_are_named() -> None:
    with pytest.raises(ValueError, match="shares lie in 0 to 1"):
        Masking(vocabulary=9, share=1.5)
    with pytest.raises(ValueError, match="more than all"):
        Masking(vocabulary=9, hidden=0.8, replaced=0.3)
    with pytest.raises(ValueError, match=r"\(2, 3\) are special"):
        applied(torch.zeros(2, 3, dtype=torch.long))


def test_training_masks_come_from_the_running_random_state() -> None:
    torch.manual_seed(3)
    first = RULE.apply(tokens())
    second = RULE.apply(tokens())
    torch.manual_seed(3)
    again = RULE.apply(tokens())
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], second[1])


def test_evaluation_masks_are_fixed_and_differ_between_sequences() -> None:
    same = tokens((1, 128)).expand(20, -1).numpy()
    fixed, other = FixedMasks(Packed(same), RULE), FixedMasks(Packed(same), RULE, seed=1)
    first = [fixed[i]["labels"] for i in range(20)]
    torch.manual_seed(99)
    assert all(torch.equal(a, fixed[i]["labels"]) for i, a in enumerate(first))
    assert len({tuple(labels.tolist()) for labels in first}) == 20
    assert not any(torch.equal(a, other[i]["labels"]) for i, a in enumerate(first))


@pytest.fixture(scope="module")
def topics() -> list[str]:
    return pydoc_topics()[:12]


def test_word_pieces_of_real_text(topics: list[str]) -> None:
    tokenizer = train_wordpiece(topics, 800)
    assert len(tokenizer) == 800
    assert [tokenizer.convert_tokens_to_ids(name) for name in SPECIAL] == [0, 1, 2, 3, 4]
    ids = tokenizer("The attribute reference", "is EVALUATED")["input_ids"]
    assert tokenizer.decode(ids) == "[CLS] the attribute reference [SEP] is evaluated [SEP]"
    assert tokenizer("x")["input_ids"][0] == 2
    unknown = sum((part == 1).sum() for part in packed_ids(tokenizer, topics))
    assert unknown == 0


def test_training_a_vocabulary_twice_gives_the_same(topics: list[str]) -> None:
    first, second = (train_wordpiece(topics, 500) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()


def test_a_vocabulary_can_be_saved(topics: list[str], tmp_path) -> None:
    tokenizer = train_wordpiece(topics, 500, length=64)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (
        loaded("A class is defined.", "so")["input_ids"]
        == tokenizer("A class is defined.", "so")["input_ids"]
    )
    assert (loaded.model_max_length, loaded.mask_token_id) == (64, 4)
    assert set(loaded("a")) == {"input_ids", "attention_mask"}


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"give \d+ word pieces, not 500"):
        train_wordpiece(["so little"], 500)
    tokenizer = train_wordpiece(["a b"], 7)
    with pytest.raises(ValueError, match="3 tokens do not fill a sequence of 8"):
        pack(tokenizer, ["a b"], 8)


def test_packing_keeps_every_token_in_order(topics: list[str]) -> None:
    tokenizer = train_wordpiece(topics, 500)
    packed = pack(tokenizer, topics, 32)
    row = np.concatenate(list(packed_ids(tokenizer, topics)))
    assert len(packed) == len(row) // 32
    assert np.array_equal(
        np.concatenate([item["input_ids"].numpy() for item in packed]), row[: len(packed) * 32]
    )
    assert (row == 3).sum() == len(topics)
    expected = tokenizer(topics[0], add_special_tokens=False)["input_ids"]
    assert row[: len(expected)].tolist() == expected

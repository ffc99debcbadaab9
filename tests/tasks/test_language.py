"""Language scores: each token counts alike, bytes are those of the text, and a prefix shows nothing of what follows."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import wellcond as wc
from wellcond.data.tokens import Blocks, byte_vocabulary
from wellcond.tasks.language import CausalLanguageModel

V = 257


def blocks(tokens: int = 200, length: int = 12) -> Blocks:
    text = "".join(chr(97 + i) for i in np.random.default_rng(0).integers(0, 20, tokens - 1))
    vocabulary = byte_vocabulary()
    return Blocks(vocabulary.encode([text]), length, vocabulary.bytes_per_token)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"vocab_size": V, "n_positions": 16, "n_embd": 24, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=256, eos_token_id=256)).eval()


class Uniform(nn.Module):
    """Knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        return self.weight.expand(*input_ids.shape, V)


class Cheat(Uniform):
    """Predicts each token by looking at it: right wherever the next token is in its input."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        self.longest = max(self.longest, input_ids.shape[1])
        seen = nn.functional.one_hot(input_ids[:, 1:], V) * 20.0
        return torch.cat([seen, seen.new_zeros(len(seen), 1, V)], 1)


def evaluated(model: nn.Module, data: Blocks, batch: int) -> dict[str, float]:
    task, scorer = CausalLanguageModel(), CausalLanguageModel().scorer()
    for start in range(0, len(data), batch):
        items = task.collate([data[i] for i in range(start, min(start + batch, len(data)))])
        scorer.update(task.scored(model(**task.inputs(items, training=False)), items))
    return scorer.compute()


def test_a_model_that_knows_nothing_needs_log_v_nats_a_token() -> None:
    data = blocks()
    scores = evaluated(Uniform(), data, 3)
    assert scores["loss"] == pytest.approx(math.log(V))
    # 199 letters and the end of the document; the first letter is not predicted.
    assert scores["bits_per_byte"] == pytest.approx(math.log2(V) * 199 / 198)


@pytest.mark.parametrize("length", [7, 12, 16])
def test_scores_do_not_depend_on_batches_and_count_every_token_once(length: int) -> None:
    model, data = gpt2(), blocks(length=length)
    with torch.no_grad():
        one, other = evaluated(model, data, 1), evaluated(model, data, 5)
    assert one == pytest.approx(other, rel=1e-6)


def test_the_training_loss_is_the_mean_over_the_labels_that_count() -> None:
    task, data, model = CausalLanguageModel(), blocks(), gpt2()
    batch = task.collate([data[0], data[len(data) - 1]])
    assert (batch["labels"] == -100).any()
    outputs = model(**task.inputs(batch, training=True))
    scored = task.scored(outputs, batch)
    loss = task.loss(outputs, batch, training=True)
    assert loss.item() == pytest.approx((scored["nats"].sum() / scored["tokens"].sum()).item(), rel=1e-5)


def test_the_loss_is_that_of_transformers() -> None:
    """There the shift is inside: the last position has no label."""
    task, data, model = CausalLanguageModel(), blocks(), gpt2()
    ids = task.collate([data[0], data[1]])["input_ids"]
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    loss = task.loss(model(**task.inputs(batch, training=True)), batch, training=True)
    assert loss.item() == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)


def test_a_causal_model_has_no_gap() -> None:
    scores = CausalLanguageModel(prefix_positions=5).final_scores(gpt2(), blocks())
    assert abs(scores["prefix_gap"]) < 1e-5
    assert scores["whole_loss"] == pytest.approx(scores["prefix_loss"], abs=1e-5)


def test_all_positions_of_all_blocks_give_the_loss() -> None:
    model, data = gpt2(), blocks()
    task = CausalLanguageModel(prefix_blocks=1000, prefix_positions=1000, prefix_batch=3)
    with torch.no_grad():
        scores = task.final_scores(model, data)
        assert scores["whole_loss"] == pytest.approx(evaluated(model, data, 4)["loss"], rel=1e-5)


def test_what_looks_ahead_is_found_out() -> None:
    """The last position of a block has nothing to look at, the others have; prefixes have nothing anywhere."""
    model, data = Cheat(), blocks(length=10)
    scores = CausalLanguageModel(prefix_positions=10).final_scores(model, data)
    assert scores["whole_loss"] < 0.15 * math.log(V)
    assert scores["prefix_loss"] == pytest.approx(math.log(V), rel=1e-5)
    assert scores["prefix_gap"] == pytest.approx(scores["prefix_loss"] - scores["whole_loss"])


def test_a_conditioned_decoder_leaks_in_scope_sample_only() -> None:
    data, task = blocks(), CausalLanguageModel(prefix_positions=6)
    gaps = {}
    for scope in ("table", "sample"):
        model = gpt2()
        wc.condition_(model, wc.ConditioningConfig(scope=scope, allow_leak=True))  # type: ignore[arg-type]
        with torch.no_grad():
            gaps[scope] = abs(task.final_scores(model, data)["prefix_gap"])
    assert gaps["table"] < 1e-5
    assert gaps["sample"] > 1e-4


def test_it_can_be_turned_off() -> None:
    model = Cheat()
    assert CausalLanguageModel(prefix_blocks=0).final_scores(model, blocks()) == {}
    assert model.longest == 0


def test_an_empty_test_set_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be scored"):
        CausalLanguageModel().scorer().compute()

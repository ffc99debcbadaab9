"""Masked language modelling: what is asked, what is minimised, what is scored."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM

from wellcond.data.masking import FixedMasks, Masking
from wellcond.data.wordpiece import Packed
from wellcond.models.crammed_bert import CrammedBertConfig, CrammedBertForMaskedLM
from wellcond.running import call_model
from wellcond.tasks.masked import MaskedLanguageModel, PerPrediction

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
TASK = MaskedLanguageModel(masking=Masking(vocabulary=40))


def sequences(count: int = 6) -> Packed:
    ids = torch.randint(5, 40, (count, 16), generator=torch.Generator().manual_seed(0))
    return Packed(ids.numpy())


def model(kind: str):
    torch.manual_seed(0)
    made = (
        CrammedBertForMaskedLM(CrammedBertConfig(**SIZES))
        if kind == "crammed"
        else BertForMaskedLM(BertConfig(**SIZES))
    )
    return made.eval()


def batch(count: int = 6) -> dict[str, Tensor]:
    fixed = FixedMasks(sequences(count), TASK.masking)
    return TASK.collate([fixed[i] for i in range(count)])


@pytest.mark.parametrize("kind", ["crammed", "bert"])
def test_loss_and_scores_are_those_of_the_masked_positions(kind: str) -> None:
    """For a model that decodes the masked positions alone, and for one that decodes all."""
    whole = batch()
    labels = whole["labels"]
    with torch.no_grad():
        outputs = call_model(model(kind), TASK.inputs(whole, training=False))
        dense = model(kind)(whole["input_ids"]).logits
    expected = cross_entropy(dense.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    chosen = labels != -100
    assert TASK.loss(outputs, whole, training=True).item() == pytest.approx(
        expected[chosen].mean().item(), abs=1e-5
    )
    scorer = TASK.scorer()
    scorer.update(TASK.scored(outputs, whole))
    scores = scorer.compute()
    assert scores["loss"] == pytest.approx(expected[chosen].mean().item(), abs=1e-5)
    right = (dense.argmax(-1) == labels)[chosen].float().mean().item()
    assert scores["accuracy"] == pytest.approx(100 * right)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_scores_do_not_depend_on_how_the_test_set_is_cut(cut: int) -> None:
    """Sequences with many and with few predictions weigh by their predictions."""
    fixed = FixedMasks(sequences(), TASK.masking)
    items = [fixed[i] for i in range(6)]
    scorers = [TASK.scorer(), TASK.scorer()]
    for scorer, size in zip(scorers, (6, cut), strict=True):
        for start in range(0, 6, size):
            part = TASK.collate(items[start : start + size])
            with torch.no_grad():
                outputs = call_model(model("crammed"), TASK.inputs(part, training=False))
            scorer.update(TASK.scored(outputs, part))
    whole, parts = (scorer.compute() for scorer in scorers)
    assert parts == pytest.approx(whole, abs=1e-5)


def test_training_masks_are_drawn_and_fixed_ones_are_kept() -> None:
    training = TASK.collate([sequences()[i] for i in range(6)])
    torch.manual_seed(1)
    first = TASK.prepare(dict(training))
    again = TASK.prepare(dict(training))
    torch.manual_seed(1)
    repeated = TASK.prepare(dict(training))
    assert torch.equal(first["labels"], repeated["labels"])
    assert torch.equal(first["input_ids"], repeated["input_ids"])
    assert not torch.equal(first["labels"], again["labels"])
    fixed = batch()
    assert TASK.prepare(fixed) is fixed


def test_inputs_hold_what_the_batch_has() -> None:
    assert set(TASK.inputs({"input_ids": torch.zeros(1, 2)}, training=False)) == {"input_ids"}
    assert set(TASK.inputs(batch(), training=True)) == {"input_ids", "labels"}


def test_a_model_that_decodes_other_positions_is_refused() -> None:
    whole = batch()
    wrong = SimpleNamespace(logits=torch.zeros(3, 40))
    with pytest.raises(
        ValueError, match=r"positions have a label, but the model returned logits of shape \(3, 40\)"
    ):
        TASK.loss(wrong, whole, training=True)


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(ValueError, match="no prediction to score"):
        PerPrediction().compute()


def test_the_metric_is_a_loss() -> None:
    assert (TASK.metric.name, TASK.metric.higher_is_better, TASK.metric.unit) == ("loss", False, "nats")

"""GLUE's metrics against sklearn and scipy, and the task around them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics
from torch import Tensor

from wellcond.data.glue import GLUE
from wellcond.data.sentences import Example, Sentences
from wellcond.data.wordpiece import train_wordpiece
from wellcond.recipes.glue import glue_task
from wellcond.tasks.glue import SentenceTask, accuracy, f1, matthews, pearson, spearman

CLASSES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)


@settings(deadline=None)
@given(CLASSES)
def test_classification_metrics_are_those_of_sklearn(pairs: list[tuple[int, int]]) -> None:
    predictions, labels = (torch.tensor(column) for column in zip(*pairs, strict=True))
    p, y = predictions.numpy(), labels.numpy()
    assert accuracy(predictions, labels) == pytest.approx(metrics.accuracy_score(y, p))
    assert f1(predictions, labels) == pytest.approx(metrics.f1_score(y, p, zero_division=0.0), abs=1e-6)
    degenerate = len(set(p)) < 2 or len(set(y)) < 2
    expected = 0.0 if degenerate else metrics.matthews_corrcoef(y, p)
    assert matthews(predictions, labels) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_correlations_are_those_of_numpy(seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = draw.integers(0, 6, 50) + draw.normal(size=50)
    y = draw.integers(0, 11, 50) / 2  # ties, as human scores have
    predictions, labels = torch.tensor(x), torch.tensor(y)
    assert pearson(predictions, labels) == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-9)
    ranks = np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1]
    assert spearman(predictions, labels) == pytest.approx(ranks, abs=1e-9)


def test_one_class_alone_and_constants_have_a_score() -> None:
    ones, mixed = torch.ones(4, dtype=torch.long), torch.tensor([1, 1, 0, 1])
    assert accuracy(ones, mixed) == 0.75
    assert matthews(ones, mixed) == matthews(mixed, ones) == 0.0
    assert f1(torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)) == 0.0
    for correlation in (pearson, spearman):
        assert correlation(torch.full((4,), 2.5), torch.tensor([1.0, 2.0, 3.0, 4.0])) == 0.0


def samples(labels: list[float], parts: list[int] | None = None, regression: bool = False) -> Sentences:
    examples = [Example("the cat " * (1 + i % 3), "sat", label) for i, label in enumerate(labels)]
    tokenizer = train_wordpiece(["the cat sat"], 18)
    return Sentences(examples, tokenizer, length=16, parts=parts, regression=regression)


def scores(task: SentenceTask, data: Sentences, logits: Tensor, size: int = 3) -> dict[str, float]:
    scorer = task.scorer()
    for start in range(0, len(data), size):
        batch = task.collate([data[i] for i in range(start, min(start + size, len(data)))])
        scorer.update(task.scored(SimpleNamespace(logits=logits[start : start + size]), batch))
    return scorer.compute()


def test_matched_and_mismatched_are_scored_apart() -> None:
    task = glue_task(GLUE["mnli"])
    data = samples([0, 1, 2, 0, 1], parts=[0, 0, 0, 1, 1])
    predictions = torch.tensor([0, 1, 0, 0, 0])
    found = scores(task, data, 5.0 * torch.eye(3)[predictions])
    assert found["accuracy_matched"] == pytest.approx(200 / 3)
    assert found["accuracy_mismatched"] == 50.0
    assert task.metric.name == "accuracy_matched"


@pytest.mark.parametrize("name", GLUE)
def test_each_task_of_glue_is_scored_by_its_own_metrics(name: str) -> None:
    task, glue = glue_task(GLUE[name]), GLUE[name]
    assert task.classes == (1 if name == "stsb" else len(glue.classes))
    labels = [i % max(2, task.classes) for i in range(12)]
    parts = [i % 2 for i in range(12)] if name == "mnli" else None
    data = samples([float(label) for label in labels] if task.regression else labels, parts, task.regression)
    logits = torch.tensor(labels).float()[:, None] if task.regression else 9 * torch.eye(task.classes)[labels]
    found = scores(task, data, logits)
    expected = {f"{m}_{p}" if p else m for m in glue.metrics for p in task.parts} | {"loss"}
    assert set(found) == expected
    assert all(found[name] == pytest.approx(100.0) for name in expected - {"loss"})
    assert found["loss"] == pytest.approx(0.0, abs=1e-2)


def test_batches_are_padded_on_the_right_and_masked() -> None:
    task, data = SentenceTask(pad=0), samples([0, 1, 0])
    batch = task.collate([data[i] for i in range(3)])
    lengths = batch["attention_mask"].sum(1).tolist()
    assert lengths == [len(data[i]["input_ids"]) for i in range(3)]
    assert len(set(lengths)) == 3
    for i, n in enumerate(lengths):
        assert torch.equal(batch["input_ids"][i, :n], data[i]["input_ids"])
        assert not batch["input_ids"][i, n:].any()
        assert batch["attention_mask"][i].tolist() == [1] * n + [0] * (batch["input_ids"].shape[1] - n)
    assert set(task.inputs(batch, training=True)) == {"input_ids", "attention_mask"}


def test_regression_minimises_the_squared_error() -> None:
    task, data = SentenceTask(classes=1, metrics=("pearson",)), samples([0.5, 4.0], regression=True)
    batch = task.collate([data[0], data[1]])
    logits = torch.tensor([[1.0], [2.0]])
    assert task.loss(SimpleNamespace(logits=logits), batch, training=True).item() == pytest.approx(
        (0.25 + 4) / 2
    )


def test_wrong_settings_and_outputs_are_named() -> None:
    with pytest.raises(ValueError, match="unknown metrics \\['auc'\\]"):
        SentenceTask(metrics=("auc",))
    with pytest.raises(ValueError, match="classes counts from 1"):
        SentenceTask(classes=0)
    task, data = SentenceTask(), samples([0, 1])
    batch = task.collate([data[0], data[1]])
    with pytest.raises(ValueError, match=r"logits of shape \(2, 3\) for 2 classes"):
        task.loss(SimpleNamespace(logits=torch.zeros(2, 3)), batch, training=True)
    with pytest.raises(ValueError, match="no sample to score"):
        task.scorer().compute()
    with pytest.raises(ValueError, match="no sample of part mismatched"):
        scores(glue_task(GLUE["mnli"]), samples([0, 1]), torch.zeros(2, 3))
    stsb = glue_task(GLUE["stsb"])
    with pytest.raises(ValueError, match="1 predictions are not finite"):
        scores(stsb, samples([0.0, 1.0], regression=True), torch.tensor([[float("nan")], [1.0]]))

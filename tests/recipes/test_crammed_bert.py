"""Crammed BERT's pretraining: the published size makes a step, the small one learns, a budget is kept, batches grow."""

import dataclasses
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM, AutoTokenizer

from wellcond.cli import main
from wellcond.data import Split
from wellcond.data.masking import Masking
from wellcond.data.pile import is_prepared
from wellcond.data.text import paragraphs, pydoc_topics
from wellcond.monitor import read_lines
from wellcond.recipes import RECIPES, Recipe, Source
from wellcond.recipes import crammed_bert as recipes
from wellcond.recipes.crammed_bert import (
    CRAMMED_BERT_PYDOC,
    TINY,
    crammed_bert,
    crammed_bert_recipe,
    micro_batches_in,
    micro_batches_of,
)
from wellcond.training.arms import select_arms
from wellcond.training.run import RunResult, train_arm


def trained(
    recipe: Recipe, data: Split, arm: str, folder: Path, steps: int, subset: int | None = None
) -> RunResult:
    (chosen,) = select_arms([arm])
    return train_arm(recipe, data, chosen, 0, folder, max_steps=steps, subset=subset)


# ------------------------------------------------------------------------------------------ at the published size


@pytest.mark.slow
def test_a_step_at_the_published_size_from_a_folder_of_text(tmp_path: Path) -> None:
    """16 layers of 768 and 32,768 word pieces trained here; the first batch of the ramp is one micro-batch."""
    draw = random.Random(0)
    words = sorted({"".join(draw.choices("abcdefghijklmnop", k=draw.randint(3, 7))) for _ in range(40_000)})
    draw.shuffle(words)
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(" ".join(words[i::20]))
    recipe = dataclasses.replace(
        RECIPES["crammed-bert"].from_source(Source(tmp_path)), micro_batch=2, workers=0
    )
    data = recipe.data()
    assert data.details["train_sequences"] > 100
    result = trained(recipe, data, "conditioned", tmp_path / "run", 1, subset=4)
    assert result.metrics["loss"] == pytest.approx(np.log(32_768), rel=0.07)
    assert {row.layer for row in result.rows if row.site == "attention.output"} == set(range(16))
    after = [row.kappa_pinv for row in result.rows if row.site == "conditioned.after"]
    assert after
    assert max(after) <= 2.002


def test_the_numbers_are_the_published_ones() -> None:
    """bert-o4.yaml: batch 8192 reached at 60 % of the budget, 1e-3, 0.9 and 0.98, decay 0.01, clipped at 0.5."""
    recipe = RECIPES["crammed-bert"]
    assert (recipe.batch_size, recipe.learning_rate, recipe.betas) == (8192, 1e-3, (0.9, 0.98))
    assert (recipe.weight_decay, recipe.epsilon, recipe.max_gradient_norm) == (0.01, 1e-12, 0.5)
    assert Masking(vocabulary=32_768, share=0.25) == recipes.MASKING
    assert recipe.steps is not None
    sizes = recipes.RAMP.sizes(recipe.steps, batch_size=8192, micro_batch=128)
    assert sizes[0] == 128
    assert sum(size // 128 for size in sizes) == pytest.approx(600_000, abs=64)
    spent = np.cumsum(sizes) / sum(sizes)
    assert spent[sizes.index(8192)] == pytest.approx(0.6, abs=0.02)


# ------------------------------------------------------------------------------------------------ the small one


@pytest.fixture(scope="module")
def pydoc() -> Split:
    return CRAMMED_BERT_PYDOC.data()


@pytest.mark.slow
def test_the_small_one_gets_clearly_below_the_unigram_entropy_of_its_text(
    pydoc: Split, tmp_path: Path
) -> None:
    """The text is that of the Python at hand and differs from one version to the next; so do entropy and loss."""
    recipe = dataclasses.replace(CRAMMED_BERT_PYDOC, evaluations=1, measurements=1)
    result = trained(recipe, pydoc, "baseline", tmp_path, 920)
    assert result.metrics["loss"] < pydoc.details["unigram_entropy"] - 0.25
    wanted = torch.cat([torch.as_tensor(pydoc.test[i]["labels"]) for i in range(len(pydoc.test))])
    wanted = wanted[wanted != -100]
    commonest = wanted.bincount().max().item() / len(wanted)
    copied_or_guessed = 100 * (0.1 + 0.9 * commonest)
    assert result.metrics["accuracy"] > copied_or_guessed + 4.2


@pytest.mark.parametrize("arm", CRAMMED_BERT_PYDOC.arms)
def test_a_smoke_run_of_every_arm(arm: str, pydoc: Split, tmp_path: Path) -> None:
    recipe = dataclasses.replace(CRAMMED_BERT_PYDOC, evaluations=1, measurements=1)
    result = trained(recipe, pydoc, arm, tmp_path, 2, subset=32)
    assert result.metrics.keys() == {"loss", "accuracy"}
    assert result.metrics["loss"] == pytest.approx(np.log(recipes.PYDOC_VOCABULARY), rel=0.1)
    assert {row.layer for row in result.rows if row.site == "attention.output"} == {0, 1, 2}


# --------------------------------------------------------------------------------------------------- the budget


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published recipe with a model, a vocabulary and batches that a test has time for."""
    tiny = TINY | {"vocab_size": 400, "max_position_embeddings": 32}
    monkeypatch.setattr(recipes, "crammed_bert", partial(crammed_bert, **tiny))
    monkeypatch.setattr(recipes, "VOCABULARY", 400)
    monkeypatch.setattr(recipes, "MASKING", Masking(vocabulary=400))
    monkeypatch.setattr(recipes, "LENGTH", 32)
    monkeypatch.setattr(recipes, "BATCH_SIZE", 16)
    monkeypatch.setattr(recipes, "MICRO_BATCH", 4)
    quick = {"workers": 0, "evaluations": 1, "measurements": 1}
    monkeypatch.setattr(
        recipes,
        "crammed_bert_recipe",
        lambda budget: dataclasses.replace(crammed_bert_recipe(budget), **quick),
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, topic in enumerate(pydoc_topics()[:40]):
        (folder / f"{i:02}.txt").write_text(topic, encoding="utf-8")
    return folder


def test_a_budget_of_micro_batches_by_command(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches grow from 4 to 16 until the budget is spent, to within one batch; a checkpoint has its tokenizer."""
    small(monkeypatch)
    seen: list[int] = []

    def counted() -> nn.Module:
        model = crammed_bert(**(TINY | {"vocab_size": 400, "max_position_embeddings": 32}))
        model.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append(len(kwargs["input_ids"])) if m.training else None,
            with_kwargs=True,
        )
        return model

    monkeypatch.setattr(recipes, "crammed_bert", counted)
    out = tmp_path / "run"
    command = ["train", "crammed-bert", "--data-dir", str(texts), "--budget", "20", "--out", str(out)]
    assert main([*command, "--conditioned"]) == 0
    assert "20 micro-batches" in capsys.readouterr().out.replace("\n", " ")
    config = json.loads((out / "run.json").read_text())["config"]
    sizes = recipes.RAMP.sizes(config["steps"], batch_size=16, micro_batch=4)
    assert seen == [4] * (sum(sizes) // 4)
    assert abs(len(seen) - 20) < 16 // 4
    assert (sizes[0], sizes[-1]) == (4, 16)
    assert read_lines(out / "results.jsonl")[0]["arm"] == "conditioned"
    place = out / "checkpoints" / f"checkpoint-{config['steps']}"
    assert len(AutoTokenizer.from_pretrained(place)) == 400
    assert AutoModelForMaskedLM.from_pretrained(place).config.model_type == "crammed_bert"


def test_hours_are_timed_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the hours, twice the micro-batches, for a clock that says that one takes a quarter of a second."""
    small(monkeypatch)
    ticks = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) / 4)
    assert micro_batches_in(1.0, micro_batch=2, timed=3) == 4 * 3600
    assert micro_batches_of("0.5h") == 2 * 3600
    assert RECIPES["crammed-bert"].from_budget("2h").steps == crammed_bert_recipe(8 * 3600).steps
    assert crammed_bert_recipe(8 * 3600).title.endswith("28,800 micro-batches")


@pytest.mark.parametrize("budget", ["", "0", "0h", "-3", "h", "1 day", "1.5", "inf"])
def test_a_budget_that_means_nothing_is_refused(budget: str) -> None:
    with pytest.raises(ValueError, match="a number of micro-batches or hours such as 24h"):
        micro_batches_of(budget)


def test_several_processes_do_not_time_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="several processes would time their hours"):
        micro_batches_of("24h")
    assert micro_batches_of("24") == 24


def test_recipes_without_a_budget_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "crammed-bert-pydoc", "--budget", "24h"]) == 2
    assert "'crammed-bert-pydoc' has no budget: leave --budget out" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- the data


def test_the_pile_is_streamed_into_the_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    streamed: list[None] = []

    def stream() -> Any:
        streamed.append(None)
        return iter([text for topic in pydoc_topics() for text in paragraphs(topic)])

    monkeypatch.setattr(recipes, "pile", stream)
    monkeypatch.setattr(recipes, "prepare", partial(recipes.prepare, held=20, fitted=300))
    recipe = crammed_bert_recipe(50)
    hub = recipe.from_source(Source(tmp_path, hub=True))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"alone first"):
        hub.data()
    monkeypatch.delenv("WORLD_SIZE")
    first = hub.data()
    assert len(first.train) == 50 * 4  # type: ignore[arg-type]
    assert is_prepared(tmp_path)
    passes = len(streamed)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for source in (Source(tmp_path, hub=True), Source(tmp_path)):
        again = recipe.from_source(source).data()
        assert again.details == first.details
        assert torch.equal(again.train[7]["input_ids"], first.train[7]["input_ids"])
    assert len(streamed) == passes


def test_data_that_are_missing_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name a folder by --data-dir"):
        RECIPES["crammed-bert"].data()
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        RECIPES["crammed-bert"].from_source(Source(tmp_path / "none")).data()

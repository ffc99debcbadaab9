"""GPT-2: both recipes run, a short one learns more than frequencies, losses of other tokens are refused, leaks show."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.data.test_tokens import gpt2_folder
from wellcond.cli import main
from wellcond.data import Split, byte_vocabulary, pydoc_topics
from wellcond.monitor import read_lines
from wellcond.recipes import RECIPES, Recipe, Source
from wellcond.recipes import gpt2 as recipes
from wellcond.recipes.gpt2 import GPT2_LEAK, GPT2_PYDOC, GPT2_TINY_STORIES, gpt2, language_split
from wellcond.report import read_run, write_report
from wellcond.report.kappas import panels
from wellcond.training.arms import select_arms
from wellcond.training.compare import compare
from wellcond.training.run import RunResult, total_steps, train_arm


@pytest.fixture(scope="module")
def pydoc() -> Split:
    return GPT2_PYDOC.data()


def trained(recipe, data: Split, arm: str, folder: Path, steps: int, subset: int | None = None) -> RunResult:
    (chosen,) = select_arms([arm])
    return train_arm(recipe, data, chosen, 0, folder, max_steps=steps, subset=subset)


@pytest.mark.slow
def test_a_short_run_is_clearly_below_the_unigram_entropy_of_its_text(pydoc: Split, tmp_path: Path) -> None:
    entropy = pydoc.details["unigram_entropy"]
    result = trained(GPT2_PYDOC, pydoc, "baseline", tmp_path, 160)
    assert result.metrics["loss"] < entropy - 0.3
    assert result.metrics["bits_per_byte"] < 3.0
    assert abs(result.metrics["prefix_gap"]) < 1e-4


def test_details_tell_vocabulary_and_text(pydoc: Split) -> None:
    again = GPT2_PYDOC.data()
    assert again.details == pydoc.details
    assert pydoc.details["vocabulary_size"] == 1024
    assert 5.0 < pydoc.details["unigram_entropy"] < 6.5
    assert len(pydoc.train) * 128 >= pydoc.details["train_tokens"] - 1  # type: ignore[arg-type]


def test_any_folder_of_text(tmp_path: Path, pydoc: Split) -> None:
    for i, document in enumerate(pydoc_topics()):
        (tmp_path / f"{i:02}.txt").write_text(document, encoding="utf-8")
    assert (
        GPT2_PYDOC.from_source(Source(tmp_path)).data().details["vocabulary"] == pydoc.details["vocabulary"]
    )
    with pytest.raises(ValueError, match="leave --hub out"):
        GPT2_PYDOC.from_source(Source(hub=True)).data()


@pytest.mark.parametrize("arm", ["rescaled", "static", "conditioned-paper", "scaled"])
def test_a_smoke_run_of_every_arm(arm: str, pydoc: Split, tmp_path: Path) -> None:
    task = dataclasses.replace(GPT2_PYDOC.task, prefix_blocks=4, prefix_positions=4)  # type: ignore[type-var]
    recipe = dataclasses.replace(GPT2_PYDOC, task=task, evaluations=1, measurements=1)
    result = trained(recipe, pydoc, arm, tmp_path, 2, subset=16)
    assert result.metrics.keys() == {"loss", "bits_per_byte", "whole_loss", "prefix_loss", "prefix_gap"}
    assert result.metrics["loss"] < 7.2
    if arm != "conditioned-paper":
        assert abs(result.metrics["prefix_gap"]) < 1e-4
    sites = {row.site for row in result.rows}
    assert {"tokens", "attention.output"} <= sites
    assert "conditioned.after" in sites
    assert {row.layer for row in result.rows if row.site == "attention.output"} == {0, 1, 2}


@pytest.fixture(scope="module")
def compared(pydoc: Split, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """A comparison of two steps in two arms."""
    folder = tmp_path_factory.mktemp("compared")
    task = dataclasses.replace(GPT2_PYDOC.task, prefix_blocks=4, prefix_positions=4)  # type: ignore[type-var]
    recipe = dataclasses.replace(GPT2_PYDOC, task=task, evaluations=1, measurements=1, data=lambda: pydoc)
    arms = select_arms(["baseline", "conditioned"])
    compare(recipe, arms, [0], folder, command="x", max_steps=2, subset=16)
    return recipe, folder


def test_losses_of_other_tokens_are_refused(compared: tuple[Recipe, Path]) -> None:
    """A text in bytes has another loss a token: a run folder does not take it."""
    recipe, folder = compared
    text = ["a document", "another one"] * 80
    other = dataclasses.replace(recipe, data=lambda: language_split(byte_vocabulary(), text, text, 128))
    with pytest.raises(ValueError, match=r"holds runs of another experiment.*vocabulary"):
        compare(other, select_arms(["rescaled"]), [0], folder, command="x", max_steps=2, subset=16)
    assert len(read_lines(folder / "results.jsonl")) == 2


def test_a_comparison_has_the_three_pairs_of_bars_of_figure_3(compared: tuple[Recipe, Path]) -> None:
    _, folder = compared
    found = panels(read_run(folder).rows or (), ["baseline", "conditioned"])
    assert [panel.quantity for panel in found] == ["tokens", "first_layer", "all_layers"]
    assert all(set(panel.values) == {"baseline", "conditioned"} for panel in found)
    page = write_report(folder).read_text(encoding="utf-8")
    assert "Scored from prefixes alone" in page
    for quantity in ("tokens", "first_layer", "all_layers"):
        assert list((folder / "plots").glob(f"bars*{quantity}.png"))


@pytest.mark.slow
def test_the_leak_is_learnt_and_prefixes_show_it(tmp_path: Path) -> None:
    """The paper's scope on a decoder: lower loss with the block in view, higher loss where nothing later can help."""
    data = GPT2_LEAK.data()
    found = {
        arm: trained(GPT2_LEAK, data, arm, tmp_path, 500).metrics for arm in ("baseline", "conditioned-paper")
    }
    paper, baseline = found["conditioned-paper"], found["baseline"]
    assert abs(baseline["prefix_gap"]) < 1e-4
    assert paper["prefix_gap"] > 0.1
    assert paper["prefix_loss"] > baseline["prefix_loss"]


# ------------------------------------------------------------------------------------------- TinyStories


def test_gpt2_small_has_its_published_size() -> None:
    with torch.device("meta"):
        model = gpt2()
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert GPT2_TINY_STORIES.batch_size * recipes.CONTEXT == 524_288
    assert total_steps(GPT2_TINY_STORIES, 460_000) == recipes.STEPS


def test_the_schedule_is_the_published_one() -> None:
    schedule, peak = GPT2_TINY_STORIES.schedule, GPT2_TINY_STORIES.learning_rate
    assert schedule is not None
    rates = [
        schedule.rate(step, steps=recipes.STEPS, epochs=1, peak=peak) for step in (0, 350, 700, 2600, 4500)
    ]
    assert rates == pytest.approx([0.0, 3e-4, 6e-4, 3e-4, 0.0])


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories")
    documents = [f"Once upon a time there were {i} cats and a dog. They sat on the mat." for i in range(60)]
    gpt2_folder(folder, documents)
    for part, some in {"train": documents, "valid": documents[:20]}.items():
        (folder / f"TinyStories-{part}.txt").write_text("<|endoftext|>".join(some))
    return folder


@pytest.mark.slow
def test_gpt2_small_at_full_shape_makes_a_step(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "CONTEXT", 32)  # of the data; the model keeps its 1024 positions
    task = dataclasses.replace(GPT2_TINY_STORIES.task, prefix_blocks=1, prefix_positions=2)  # type: ignore[type-var]
    recipe = dataclasses.replace(GPT2_TINY_STORIES, task=task, batch_size=2, micro_batch=1, measurements=1)
    recipe = recipe.from_source(Source(stories))
    result = trained(recipe, recipe.data(), "conditioned", tmp_path, 1, subset=2)
    assert 9.0 < result.metrics["loss"] < 12.5
    assert {row.layer for row in result.rows if row.site == "attention.output"} == set(range(12))


def test_stories_are_read_from_a_folder(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "CONTEXT", 32)
    data = GPT2_TINY_STORIES.from_source(Source(stories)).data()
    assert data.details["vocabulary_size"] == 280
    assert data.details["train_tokens"] > data.details["validation_tokens"]
    with pytest.raises(ValueError, match="leave the folder out"):
        GPT2_TINY_STORIES.from_source(Source(stories, hub=True)).data()
    with pytest.raises(ValueError, match="leave --corrupt out"):
        GPT2_TINY_STORIES.from_source(Source(stories, corrupt="skip")).data()


def test_the_command_takes_a_folder_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "gpt2-pydoc", "--text", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert {"gpt2-pydoc", "gpt2-leak", "gpt2-tinystories"} <= RECIPES.keys()

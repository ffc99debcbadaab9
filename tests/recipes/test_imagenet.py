"""The ImageNet recipes on a generated folder of three classes: at full depth and tiny width, and one real step."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.data.folders import write_image_folder
from wellcond.cli import main
from wellcond.recipes import IMAGENET, RECIPES, Recipe, Source
from wellcond.recipes.ingredients import decay_groups
from wellcond.training.arms import select_arms
from wellcond.training.run import steps_per_epoch
from wellcond.training.train import train

pytestmark = pytest.mark.filterwarnings("ignore:3 classes for 1000 outputs")

NARROW: dict[str, dict[str, Any]] = {
    "vit-b-imagenet": {"embed_dim": 24, "num_heads": 3},
    "deit-b-imagenet": {"embed_dim": 24, "num_heads": 3},
    "swin-b-imagenet": {"embed_dim": 8, "num_heads": (1, 2, 4, 8)},
    "xcit-m24-imagenet": {"embed_dim": 32, "num_heads": 4},
    "davit-b-imagenet": {"embed_dims": (8, 16, 32, 64), "num_heads": (1, 2, 4, 8)},
}
PARAMETERS = {
    "vit-b-imagenet": 86_567_656,
    "deit-b-imagenet": 86_567_656,
    "swin-b-imagenet": 87_768_224,
    "xcit-m24-imagenet": 84_395_752,
    "davit-b-imagenet": 87_954_408,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("imagenet"), train=2, val=1, size=(300, 260))


def narrow(name: str) -> Recipe:
    recipe = RECIPES[name]
    return dataclasses.replace(recipe, model=partial(recipe.model, **NARROW[name]), workers=0)


def run(recipe: Recipe, folder: Path, out: Path, arm: str = "conditioned", **options: Any) -> Any:
    located = recipe.from_source(Source(folder))
    return train(located, select_arms([arm])[0], 0, out, data=located.data(), command="x", **options)


def on_meta(recipe: Recipe) -> nn.Module:
    with torch.device("meta"):
        return recipe.model()


def test_the_five_are_listed() -> None:
    assert {recipe.name for recipe in IMAGENET} == set(NARROW) == set(PARAMETERS)
    assert all(
        recipe.paper is not None and recipe.paper.conditioned > recipe.paper.baseline for recipe in IMAGENET
    )


@pytest.mark.parametrize("name", NARROW)
def test_models_have_the_published_size(name: str) -> None:
    assert sum(p.numel() for p in on_meta(RECIPES[name]).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "batch", "rate", "steps"),
    [
        ("vit-b-imagenet", 4096, 3e-3, 300 * 312),
        ("deit-b-imagenet", 1024, 1e-3, 300 * 1251),
        ("swin-b-imagenet", 1024, 1e-3, 300 * 1251),
        ("xcit-m24-imagenet", 1024, 1e-3, 400 * 1251),
        ("davit-b-imagenet", 2048, 2e-3, 310 * 625),
    ],
)
def test_length_and_rate_of_the_published_recipes(name: str, batch: int, rate: float, steps: int) -> None:
    recipe = RECIPES[name]
    assert recipe.batch_size == batch
    assert recipe.epochs * steps_per_epoch(recipe, 1_281_167) == steps
    assert recipe.schedule is not None
    rates = [recipe.schedule.rate(s, steps=steps, epochs=recipe.epochs, peak=recipe.learning_rate)
             for s in range(0, steps, steps // 1000)]  # fmt: skip
    warm = recipe.schedule.warmup_epochs / recipe.epochs
    assert rates[0] == recipe.schedule.warmup_start
    # Where the cosine starts with the training, its beginning is under the warm-up and the peak is not reached.
    assert 0.97 * rate < max(rates) <= rate
    assert abs(rates.index(max(rates)) / 1000 - warm) < 0.01
    assert rates[-1] == pytest.approx(recipe.schedule.floor, abs=2e-7)


EXEMPT = {
    "vit-b-imagenet": {"pos_embed", "cls_token"},
    "deit-b-imagenet": {"pos_embed", "cls_token"},
    "xcit-m24-imagenet": {"cls_token"},
    "davit-b-imagenet": set(),
}


@pytest.mark.parametrize("name", NARROW)
def test_weight_decay_spares_what_the_recipe_names(name: str) -> None:
    recipe = RECIPES[name]
    model = on_meta(recipe)
    assert recipe.exempt is not None
    groups = decay_groups(model, recipe.weight_decay, recipe.exempt)
    free = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    larger = {n for n, p in model.named_parameters() if id(p) in free and p.ndim > 1}
    if name == "swin-b-imagenet":
        assert len(larger) == 24
        assert all(n.endswith("relative_position_bias_table") for n in larger)
    else:
        assert larger == EXEMPT[name]


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("vit-b-imagenet", {0.0}),
        ("deit-b-imagenet", {0.0, 0.1}),
        ("swin-b-imagenet", {0.0, 0.5}),
        ("xcit-m24-imagenet", {0.15}),
        ("davit-b-imagenet", {0.0, 0.4}),
    ],
)
def test_stochastic_depth_is_in_the_model(name: str, rates: set[float]) -> None:
    from timm.layers import DropPath

    found = [m.drop_prob for m in on_meta(RECIPES[name]).modules() if isinstance(m, DropPath)] or [0.0]
    assert max(found) == pytest.approx(max(rates))
    assert min(found) == pytest.approx(min(found) if len(rates) > 1 else max(rates))


def test_augmentation_is_that_of_the_recipe(folder: Path) -> None:
    texts = {
        recipe.name: [str(part.transform) for part in (split.train, split.test)]  # type: ignore[attr-defined]
        for recipe in IMAGENET
        for split in [recipe.from_source(Source(folder)).data()]
    }
    for name, (train_text, test_text) in texts.items():
        assert "RandomResizedCropAndInterpolation(size=(224, 224), scale=(0.08, 1.0)" in train_text
        assert "RandomHorizontalFlip(p=0.5)" in train_text
        assert ("RandAugment(n=2" in train_text) == (name != "vit-b-imagenet")
        assert ("RandomErasing(p=0.25, mode=pixel" in train_text) == (name != "vit-b-imagenet")
        assert "ColorJitter" not in train_text
        assert "Rand" not in test_text
    sizes = {"xcit-m24-imagenet": 224, "davit-b-imagenet": 248}
    for name, (_, test_text) in texts.items():
        assert f"Resize(size={sizes.get(name, 256)}, interpolation=bicubic" in test_text
        assert "CenterCrop(size=(224, 224))" in test_text


@pytest.mark.parametrize("name", NARROW)
def test_a_smoke_run_of_full_depth(name: str, folder: Path, tmp_path: Path) -> None:
    result = run(narrow(name), folder, tmp_path, max_steps=1)
    after = [row for row in result.rows if row.site == "conditioned.after"]
    assert after
    assert all(row.kappa_pinv <= 2.002 for row in after)
    assert ("average_accuracy" in result.metrics) == (RECIPES[name].average_decay is not None)
    config = json.loads((tmp_path / "run.json").read_text())["config"]
    assert config["schedule"]["warmup_epochs"] > 0
    assert config["max_steps"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
def test_a_step_of_full_size(name: str, folder: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPES[name], measurements=1, workers=0)
    result = run(recipe, folder, tmp_path, max_steps=1, subset=2)
    assert result.metrics["loss"] > 0


def test_loaders_with_worker_processes(folder: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(narrow("deit-b-imagenet"), workers=2)
    plain = run(dataclasses.replace(recipe, workers=0), folder, tmp_path / "plain", "baseline", max_steps=2)
    apart = run(recipe, folder, tmp_path / "workers", "baseline", max_steps=2)
    assert apart.metrics == plain.metrics


def test_a_wrong_layout_ends_the_command_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_image_folder(tmp_path / "images")
    for index, path in enumerate(sorted((root / "val").rglob("*.png"))):
        path.rename(root / "val" / f"{index}.png")
    for name in ("ant", "bee", "cat"):
        (root / "val" / name).rmdir()
    out = tmp_path / "out"
    assert main(["train", "deit-b-imagenet", "--data-dir", str(root), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "val holds 6 images directly" in error
    assert "Move each into" in error
    assert not out.exists()


def test_without_a_place_the_command_says_what_to_give(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "swin-b-imagenet"]) == 2
    assert "--data-dir names the folder" in capsys.readouterr().err
    both = ["train", "swin-b-imagenet", "--hub", "--data-dir", str(tmp_path)]
    assert main(both) == 2
    assert "give one" in capsys.readouterr().err


def test_offline_the_hub_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    assert main(["train", "vit-b-imagenet", "--hub"]) == 2
    assert "cannot stream 'ILSVRC/imagenet-1k'" in capsys.readouterr().err


def test_a_corrupt_image_is_fatal_or_skipped_as_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_image_folder(tmp_path / "images", train=2, val=1, size=(64, 64))
    (root / "train/bee/1.jpg").write_bytes(b"broken")
    source = Source(root)
    with pytest.raises(ValueError, match=r"train/bee/1.jpg cannot be read"):
        run(narrow("vit-b-imagenet"), root, tmp_path / "fatal", max_steps=1)
    skipping = narrow("vit-b-imagenet").from_source(dataclasses.replace(source, corrupt="skip"))
    with pytest.warns(UserWarning, match=r"skipped: the image .*train/bee/1.jpg"):
        result = train(
            skipping, select_arms(["baseline"])[0], 0, tmp_path / "skip", data=skipping.data(), command="x",
            max_steps=1,
        )  # fmt: skip
    assert result.metrics["loss"] > 0


def test_classes_are_counted(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path, train=1, val=1, size=(8, 8))
    with pytest.warns(UserWarning, match="3 classes for 1000 outputs"):
        RECIPES["vit-b-imagenet"].from_source(Source(root)).data()

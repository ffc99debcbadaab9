"""Mask R-CNN's recipes: both of COCO on a generated folder, weights from a file, two processes on digits."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from torch import nn

from tests.data.coco_folders import write_coco
from wellcond.cli import main
from wellcond.data.detection_transforms import augmentation
from wellcond.monitor import read_lines
from wellcond.recipes import RECIPES, Recipe, Source
from wellcond.recipes import maskrcnn_coco as coco
from wellcond.recipes.ingredients import decay_groups
from wellcond.training.arms import select_arms
from wellcond.training.run import steps_per_epoch, train_arm
from wellcond.training.train import train

pytestmark = [
    pytest.mark.filterwarnings("ignore:2 categories for 80 classes"),
    pytest.mark.filterwarnings("ignore:the backbone starts from random weights"),
]
BACKBONES = {"maskrcnn-xcit-s-coco": coco.SMALL, "maskrcnn-xcit-m-coco": coco.MEDIUM}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coco(tmp_path_factory.mktemp("coco"))


def run(recipe: Recipe, folder: Path, out: Path, arm: str = "conditioned", **options: Any) -> Any:
    located = recipe.from_source(Source(folder))
    return train(located, select_arms([arm])[0], 0, out, data=located.data(), command="x", **options)


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return coco.coco_mask_rcnn(BACKBONES[name])


# ----------------------------------------------------------------------------------------------- what the recipes state


def test_both_are_listed_with_the_papers_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    for name, numbers in (
        ("maskrcnn-xcit-s-coco", "44.9 %, 45.7 %"),
        ("maskrcnn-xcit-m-coco", "45.7 %, 46.2 %"),
    ):
        assert name in text
        assert numbers in text


@pytest.mark.parametrize("name", BACKBONES)
def test_length_and_rate_are_those_of_the_published_recipe(name: str) -> None:
    recipe = RECIPES[name]
    steps = 36 * steps_per_epoch(recipe, coco.IMAGES)
    assert steps == 36 * 7329
    assert recipe.schedule is not None

    def rate(epoch: float) -> float:
        step = round(epoch * 7329)
        return recipe.schedule.rate(step, steps=steps, epochs=36, peak=recipe.learning_rate)  # type: ignore[union-attr]

    rates = [rate(0), rate(1), rate(26.99), rate(27), rate(32.99), rate(33), rate(35.99)]
    assert rates == pytest.approx([1e-7, 1e-4, 1e-4, 1e-5, 1e-5, 1e-6, 1e-6])
    assert (recipe.batch_size, recipe.weight_decay, recipe.betas) == (16, 0.05, (0.9, 0.999))


@pytest.mark.parametrize("name", BACKBONES)
def test_weight_decay_spares_norms_biases_and_positions(name: str) -> None:
    model, recipe = on_meta(name), RECIPES[name]
    assert recipe.exempt is not None
    groups = decay_groups(model, recipe.weight_decay, recipe.exempt)
    free = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    spared = {name for name, p in model.named_parameters() if id(p) in free}
    larger = {name for name, p in model.named_parameters() if id(p) in free and p.ndim > 1}
    assert larger == {"backbone.body.pos_embed.token_projection.weight"}
    norms = [name for name, _ in model.named_parameters() if ".norm" in name]
    assert norms
    assert spared >= set(norms)


# ------------------------------------------------------------------------------------------------------ smoke runs


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks, 32 wide, on small images."""
    from wellcond.models import xcit_pyramid

    body = xcit_pyramid.xcit_body
    monkeypatch.setattr(xcit_pyramid, "xcit_body", partial(body, embed_dim=32, num_heads=2))
    smaller = partial(augmentation, (64, 96), 128, (80,), (48, 64))
    monkeypatch.setattr(coco, "augmentation", smaller)


def small_images(recipe: Recipe, **sizes: int) -> Recipe:
    """Test images are resized to 96 pixels in place of 800."""

    def model() -> nn.Module:
        detector: Any = recipe.model()
        detector.transform.min_size, detector.transform.max_size = (sizes.get("short", 96),), 320
        return detector

    return dataclasses.replace(recipe, model=model, workers=0, measurements=1)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_smoke_run_of_full_depth(name: str, folder: Path, tmp_path: Path, narrow: None) -> None:
    result = run(small_images(RECIPES[name]), folder, tmp_path, max_steps=1)
    assert 0 <= result.metrics["box_ap"] <= result.metrics["box_ap50"] <= 100
    assert {row.layer for row in result.rows if row.site == "attention.output"} == set(
        range(len(on_meta(name).backbone.body.blocks))  # type: ignore[union-attr, arg-type]
    )
    after = [row for row in result.rows if row.site == "conditioned.after"]
    assert after
    assert all(row.kappa_pinv <= 2.002 for row in after)
    config = json.loads((tmp_path / "run.json").read_text())["config"]
    assert config["schedule"]["after_epochs"] == [27, 33]
    assert len(json.loads((tmp_path / "examples.json").read_text())["conditioned"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKBONES)
def test_a_step_of_full_size(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published model on one image of the smallest published size; without checkpoints, which have gigabytes."""
    monkeypatch.setattr(coco, "augmentation", partial(augmentation, (480,), before_crop=(400,)))
    recipe = small_images(RECIPES[name], short=128).from_source(Source(folder))
    (arm,) = select_arms(["conditioned"])
    result = train_arm(recipe, recipe.data(), arm, 0, tmp_path, max_steps=1, subset=1)
    assert result.curve[0]["train_loss"] > 0
    assert result.metrics["box_ap"] >= 0


# ------------------------------------------------------------------------------------------------- pretrained weights


@pytest.mark.parametrize("name", BACKBONES)
def test_weights_from_a_file_reach_the_backbone(name: str, tmp_path: Path, narrow: None) -> None:
    torch.manual_seed(1)
    source = timm.create_model(BACKBONES[name].name, embed_dim=32, num_heads=2)
    torch.save(source.state_dict(), tmp_path / "imagenet.pth")
    torch.manual_seed(2)
    model: Any = RECIPES[name].from_pretrained(tmp_path / "imagenet.pth").model()
    loaded = model.backbone.body.state_dict()
    assert "blocks.0.attn.qkv.weight" in loaded
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in loaded.items())


@pytest.mark.parametrize("command", ["train", "compare"])
def test_the_command_takes_a_file_and_a_folder(
    command: str, folder: Path, tmp_path: Path, narrow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that does not fit ends it before the first step, and a sentence says what is wrong with which file."""
    weights = tmp_path / "imagenet.pth"
    words = [command, "maskrcnn-xcit-s-coco", "--data-dir", str(folder), "--out", str(tmp_path / "out")]
    words += ["--pretrained", str(weights)]
    assert main(words) == 2
    assert f"there is no file of weights {weights}" in capsys.readouterr().err
    torch.save(timm.create_model("xcit_small_12_p16_224", embed_dim=64, num_heads=2).state_dict(), weights)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"{weights} has no weights that fit xcit_small_12_p16_224" in error
    assert "size mismatch for cls_token" in error
    assert not (tmp_path / "out" / "results.jsonl").exists()
    assert json.loads((tmp_path / "out" / "run.json").read_text())["config"]["pretrained"] == str(weights)


def test_a_run_without_weights_says_so(narrow: None) -> None:
    with pytest.warns(UserWarning, match="random weights, but the published results .* --pretrained FILE"):
        RECIPES["maskrcnn-xcit-s-coco"].model()


def test_without_a_folder_the_command_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "maskrcnn-xcit-m-coco"]) == 2
    assert "--data-dir names the folder that holds annotations/" in capsys.readouterr().err
    assert main(["train", "maskrcnn-xcit-m-coco", "--hub"]) == 2
    assert "leave --hub out" in capsys.readouterr().err


def test_categories_are_counted(folder: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="2 categories for 80 classes: good for a smoke run"):
        RECIPES["maskrcnn-xcit-s-coco"].from_source(Source(folder)).data()
    more = write_coco(tmp_path, categories=[{"id": i, "name": str(i)} for i in range(1, 82)])
    with pytest.raises(ValueError, match="81 categories, but the model has 80 classes"):
        RECIPES["maskrcnn-xcit-s-coco"].from_source(Source(more)).data()


# ----------------------------------------------------------------------------------------------------- many devices


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_two_processes_train_and_score_what_one_does(tmp_path: Path) -> None:
    """Regions to learn from are drawn at random in each process, so losses are near and not the same."""
    curves = []
    for name, launcher in (
        ("one", []),
        ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]),
    ):
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "tests.recipes.detecting", str(tmp_path / name)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = read_lines(tmp_path / name / "results.jsonl")
        assert line["metrics"]["images"] == 7  # the eighth, which fills the last batch, is not counted
        curves.append([point["train_loss"] for point in line["curve"]])
        assert len(json.loads((tmp_path / name / "examples.json").read_text())["conditioned"]) == 4
    one, two = curves
    assert len(one) == 2
    assert two == pytest.approx(one, rel=0.1)

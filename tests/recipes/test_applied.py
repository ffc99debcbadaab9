"""What a recipe says is done in training: seen in checkpoints, in the log and in the batches."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.data.folders import write_image_folder
from tests.training.tiny import RecordingViT, tiny_data, tiny_model, tiny_recipe
from wellcond.data import Images, Split, stream
from wellcond.recipes import Recipe, Schedule
from wellcond.tasks import ImageClassification, Mixing
from wellcond.training.arms import select_arms
from wellcond.training.average import Average
from wellcond.training.repeatable import Repeatable, RepeatableStream, RepeatedOrder
from wellcond.training.run import process_batch, steps_per_epoch
from wellcond.training.train import train

MIXED = ImageClassification(label_smoothing=0.1, mixing=Mixing(mixup=0.8, cutmix=1.0))


class Noisy(Images):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        return item | {"pixel_values": item["pixel_values"] + torch.randn(1)}


def noisy_data() -> Split:
    data = tiny_data()
    assert isinstance(data.train, Images)
    return Split(Noisy(data.train.pixels, data.train.labels), data.test)


def full_recipe(**changes: Any) -> Recipe:
    """Everything on at once: mixing, average, repeats, groups, schedule, dropout and stochastic depth."""
    fields: dict[str, Any] = {
        "data": noisy_data,
        "task": MIXED,
        "average_decay": 0.9,
        "repeats": 3,
        "drop_last": True,
        "exempt": ("pos_embed", "cls_token"),
        "schedule": Schedule(warmup_epochs=0.5, warmup_start=1e-4, floor=1e-3),
        "max_gradient_norm": None,
    }
    return tiny_recipe(**(fields | changes))


def run(recipe: Recipe, folder: Path, **options: Any) -> Any:
    return train(
        recipe, select_arms(["baseline"])[0], 0, folder, data=recipe.data(), command="x", save_every=1, **options
    )  # fmt: skip


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"checkpoint-{step}"


def test_the_average_follows_the_weights(tmp_path: Path) -> None:
    recipe = full_recipe(task=ImageClassification())
    result = run(recipe, tmp_path, max_steps=2)
    torch.manual_seed(0)
    average = {name: tensor.clone() for name, tensor in recipe.model().state_dict().items()}
    for step in (1, 2):
        weights = load_file(checkpoint(tmp_path, step) / "model.safetensors")
        average = {name: 0.9 * average[name] + 0.1 * weights[name] for name in weights}
        stored = load_file(checkpoint(tmp_path, step) / "average.safetensors")
        for name, tensor in average.items():
            assert torch.allclose(stored[name], tensor, atol=1e-6), name
    model = recipe.model()
    model.load_state_dict(average)
    test = recipe.data().test
    pixels, labels = (torch.stack([test[i][key] for i in range(32)]) for key in ("pixel_values", "labels"))
    with torch.no_grad():
        logits = model.eval()(pixels)
    expected = nn.functional.cross_entropy(logits, labels).item()
    assert result.metrics["average_loss"] == pytest.approx(expected, rel=1e-4)
    assert result.metrics["average_loss"] != pytest.approx(result.metrics["loss"], rel=1e-4)


def test_evaluating_the_average_leaves_the_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = Average(model, 0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    nn.init.zeros_(model[0].weight)
    with average.applied_to(model):
        assert torch.equal(model[0].weight, before["0.weight"])
    assert torch.equal(model[0].weight, torch.zeros(2, 2))


class Stopped(Exception):
    pass


@pytest.mark.parametrize("stop", [4, 6], ids=["after an epoch", "within an epoch"])
def test_a_resume_repeats_mixing_average_order_and_schedule(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def until(name: str, last: int = 8) -> None:
        def progress(step: int, steps: int) -> None:
            if step > last:
                raise Stopped

        monkeypatch.setenv("BATCHES", str(tmp_path / f"{name}.txt"))
        run(full_recipe(), tmp_path / name, resume=True, progress=progress)

    until("whole")
    with pytest.raises(Stopped):
        until("stopped", last=stop)
    until("stopped")
    whole, order = ((tmp_path / f"{name}.txt").read_text().split() for name in ("whole", "stopped"))
    assert len(set(whole)) == 8
    assert order[stop + 1 :] == whole[stop:]
    for file in ("model.safetensors", "average.safetensors"):
        one, two = (load_file(checkpoint(tmp_path / name, 8) / file) for name in ("whole", "stopped"))
        assert all(torch.equal(one[name], two[name]) for name in one), file
    rates = [
        [entry["learning_rate"] for entry in json.loads(path.read_text())["log_history"] if "learning_rate" in entry]
        for path in (checkpoint(tmp_path / name, 8) / "trainer_state.json" for name in ("whole", "stopped"))
    ]  # fmt: skip
    assert rates[0] == rates[1]


def test_the_learning_rate_is_that_of_the_schedule(tmp_path: Path) -> None:
    recipe = full_recipe(evaluations=8)
    run(recipe, tmp_path)
    history = json.loads((checkpoint(tmp_path, 8) / "trainer_state.json").read_text())["log_history"]
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    schedule = recipe.schedule
    assert schedule is not None
    assert rates == pytest.approx([schedule.rate(step, steps=8, epochs=2, peak=1e-2) for step in range(8)])


def test_groups_reach_the_optimizer(tmp_path: Path) -> None:
    run(full_recipe(weight_decay=0.3), tmp_path, max_steps=1)
    state = torch.load(checkpoint(tmp_path, 1) / "optimizer.pt", weights_only=True)
    decays = {group["weight_decay"]: len(group["params"]) for group in state["param_groups"]}
    model = tiny_model()
    free = [n for n, p in model.named_parameters() if p.ndim == 1 or n in ("pos_embed", "cls_token")]
    assert decays == {0.0: len(free), 0.3: len(list(model.parameters())) - len(free)}


class Seeing(RecordingViT):
    """Keeps what it is trained and tested on."""

    trained: list[Tensor]
    tested: list[int]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.training:
            self.trained.append(x.detach().clone())
        else:
            self.tested.append(len(x))
        return super().forward(x, *args, **kwargs)


def seeing_recipe(**changes: Any) -> tuple[Recipe, Seeing]:
    model = tiny_model()
    model.__class__ = Seeing
    assert isinstance(model, Seeing)
    model.trained, model.tested = [], []
    return full_recipe(model=lambda: model, average_decay=None, **changes), model


def test_images_are_mixed_in_training_and_not_in_evaluation(tmp_path: Path) -> None:
    recipe, model = seeing_recipe(repeats=1, data=tiny_data)
    result = run(recipe, tmp_path, max_steps=2)
    images = tiny_data().train
    assert isinstance(images, Images)
    distances = [
        torch.cdist(batch.flatten(1), images.pixels.flatten(1)).min(1).values for batch in model.trained
    ]
    assert all(len(batch) == 16 for batch in model.trained)
    assert all((distance > 1e-3).any() for distance in distances)
    # Log loss of soft targets cannot fall below their entropy, but that of the test images is of hard ones.
    test = tiny_data().test
    pixels, labels = (torch.stack([test[i][key] for i in range(32)]) for key in ("pixel_values", "labels"))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.eval()(pixels), labels).item()
    assert result.metrics["loss"] == pytest.approx(loss, rel=1e-4)


def test_batches_are_full_and_no_test_image_is_dropped(tmp_path: Path) -> None:
    data = tiny_data()
    assert isinstance(data.train, Images)
    short = Split(Images(data.train.pixels[:57], data.train.labels[:57]), data.test)
    recipe, model = seeing_recipe(data=lambda: short, measurements=1)
    assert steps_per_epoch(recipe, 57) == 3
    result = run(recipe, tmp_path)
    assert [len(batch) for batch in model.trained] == [16] * 6
    assert 32 in model.tested
    assert result.metrics["accuracy"] * 32 / 100 == pytest.approx(
        round(result.metrics["accuracy"] * 32 / 100)
    )


def test_fewer_images_than_a_batch_make_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = full_recipe()
    assert process_batch(recipe, 64) == 16
    assert process_batch(recipe, 11) == 10
    assert steps_per_epoch(recipe, 11) == 1
    with pytest.raises(ValueError, match="1 samples are too few for 1 processes, each of which needs 2"):
        process_batch(recipe, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert process_batch(recipe, 11) == 4
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(ValueError, match=r"multiple of 2, .* each of 16 processes has 1 of a batch of 16"):
        process_batch(recipe)


def test_repeats_show_an_image_three_times_augmented_anew() -> None:
    images = Repeatable(noisy_data().train, seed=1)
    order = list(RepeatedOrder(images, 3))
    assert len(order) == 64
    counts = Counter(index % 64 for index in order)
    assert sorted(counts.values()) == [1] + [3] * 21
    assert [index % 64 for index in order[:3]] == [order[0] % 64] * 3
    three = [images[index]["pixel_values"] for index in order[:3]]
    assert not torch.equal(three[0], three[1])
    assert not torch.equal(three[1], three[2])
    assert images[order[0]]["labels"] == images[order[1]]["labels"]
    images.epoch = 1
    assert list(RepeatedOrder(images, 3)) != order


def to_digit(image: Any) -> Tensor:
    """8×8 grey with noise, for the tiny model."""
    from torchvision.transforms.functional import resize, to_tensor

    return to_tensor(resize(image.convert("L"), [8, 8])) + torch.randn(1) * 0.1 + float(np.random.rand())  # noqa: NPY002


def streamed(root: Path) -> Split:
    return stream(str(root), train=to_digit, test=to_digit)[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    root = write_image_folder(tmp_path / "images", train=7, val=2)
    (root / "val").rename(root / "validation")
    return root


def test_a_stream_never_ends_and_repeats_itself(folder: Path) -> None:
    def beginning(seed: int, epoch: int, repeats: int = 1) -> Tensor:
        images = RepeatableStream(streamed(folder).train, seed, repeats=repeats)  # type: ignore[arg-type]
        images.epoch = epoch
        iterator = iter(images)
        return torch.stack([next(iterator)["pixel_values"] for _ in range(30)])

    first = beginning(0, 0)
    assert torch.equal(beginning(0, 0), first)
    assert not torch.equal(beginning(0, 1), first)
    assert not torch.equal(beginning(1, 0), first)
    repeated = beginning(0, 0, repeats=3)
    assert (repeated[0] - repeated[1]).std() < 1e-6 < (repeated[0] - repeated[1]).abs().mean()


def test_a_recipe_trains_on_a_stream_and_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = full_recipe(data=lambda: streamed(folder), batch_size=6, epochs=2)

    def until(name: str, last: int = 99) -> Any:
        def progress(step: int, steps: int) -> None:
            assert steps == 6
            if step > last:
                raise Stopped

        monkeypatch.setenv("BATCHES", str(tmp_path / f"{name}.txt"))
        return run(recipe, tmp_path / name, resume=True, progress=progress)

    result = until("whole")
    assert set(result.metrics) == {"accuracy", "loss", "average_accuracy", "average_loss"}
    with pytest.raises(Stopped):
        until("stopped", last=4)
    until("stopped")
    whole, order = ((tmp_path / f"{name}.txt").read_text().split() for name in ("whole", "stopped"))
    assert len(set(whole)) == 6
    assert order[5:] == whole[4:]
    assert os.environ["BATCHES"].endswith("stopped.txt")


@pytest.mark.parametrize("micro_batch", [8, 3], ids=["even", "a short last batch"])
def test_micro_batches_train_like_the_whole_batch(micro_batch: int, tmp_path: Path) -> None:
    """57 images in batches of 24 leave a last one of 9: with micro-batches of 8 its parts are of 8 and 1."""
    data = tiny_data()
    assert isinstance(data.train, Images)
    short = Split(Images(data.train.pixels[:57], data.train.labels[:57]), data.test)

    def model() -> nn.Module:
        still = tiny_model()
        for module in still.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "drop_prob"):
                module.drop_prob = 0.0
        return still

    def trained(name: str, **changes: Any) -> tuple[Any, dict[str, Tensor]]:
        recipe = tiny_recipe(
            model=model, data=lambda: short, batch_size=24, epochs=2, evaluations=6, **changes
        )
        result = run(recipe, tmp_path / name)
        return result, load_file(checkpoint(tmp_path / name, 6) / "model.safetensors")

    (whole, weights), (parts, others) = trained("whole"), trained("parts", micro_batch=micro_batch)
    losses = [
        [point["train_loss"] for point in result.curve if "train_loss" in point] for result in (whole, parts)
    ]
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert parts.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-3)
    for name, tensor in weights.items():
        assert (others[name] - tensor).norm() <= 2e-3 * tensor.norm() + 1e-4, name


def test_a_micro_batch_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="micro-batch of 5 does not divide the 16 samples"):
        run(tiny_recipe(micro_batch=5), tmp_path)
    with pytest.raises(ValueError, match="or is no multiple of 2"):
        run(full_recipe(micro_batch=1), tmp_path / "mixed")


def test_steps_in_place_of_epochs(tmp_path: Path) -> None:
    assert len(run(tiny_recipe(steps=3, evaluations=3), tmp_path).curve) == 3


def test_betas_reach_the_optimizer(tmp_path: Path) -> None:
    for name, recipe in (("ours", full_recipe(betas=(0.8, 0.9))), ("theirs", tiny_recipe(betas=(0.8, 0.9)))):
        run(recipe, tmp_path / name, max_steps=1)
        state = torch.load(checkpoint(tmp_path / name, 1) / "optimizer.pt", weights_only=True)
        assert {tuple(group["betas"]) for group in state["param_groups"]} == {(0.8, 0.9)}

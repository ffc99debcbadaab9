"""The Long Range Arena's recipes: batches at full shape, the numbers they state, and the small ones that train."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wellcond.data import Split
from wellcond.data.lra.listops_files import Counts, write_listops
from wellcond.data.lra.pathfinder_files import Counts as ImageCounts
from wellcond.data.lra.pathfinder_files import write_pathfinder
from wellcond.data.lra.sequences import Pixels, Sequences, byte_ids
from wellcond.recipes import RECIPES, Source
from wellcond.recipes.lra import LRA
from wellcond.recipes.lra_small import LRA_SMALL
from wellcond.report import write_report
from wellcond.report.folder import read_run
from wellcond.report.kappas import panels
from wellcond.running import call_model
from wellcond.tasks.sequences import SequenceClassification
from wellcond.training.arms import select_arms
from wellcond.training.compare import compare
from wellcond.training.train import train

SHAPES = {"listops": 2048, "text": 4096, "retrieval": 4096, "image": 1024, "pathfinder": 1024}


def samples(name: str) -> Split:
    """Two of each class, as long as they get."""
    rng = np.random.default_rng(0)
    texts = [byte_ids(rng.bytes(n)) for n in (4000, 300, 4000, 20)]
    labels = [0, 1, 0, 1]
    made: Any = {
        "listops": lambda: Sequences(
            [rng.integers(1, 16, n).astype(np.uint8) for n in (1999, 501, 800, 700)], labels
        ),
        "text": lambda: Sequences(texts, labels),
        "retrieval": lambda: Sequences(texts, labels, texts[::-1]),
        "image": lambda: Pixels(rng.integers(0, 256, (4, 32, 32)).astype(np.uint8), np.array(labels)),
    }
    made["pathfinder"] = made["image"]
    part = made[name.removeprefix("lra-")]()
    return Split(part, part)


def test_each_task_has_its_recipe() -> None:
    assert [recipe.name for recipe in LRA] == [f"lra-{name}" for name in SHAPES]
    assert all(RECIPES[recipe.name] is recipe for recipe in (*LRA, *LRA_SMALL))
    for recipe in LRA:
        assert recipe.task.length == SHAPES[recipe.name.removeprefix("lra-")]  # type: ignore[attr-defined]
        assert recipe.paper is not None


@pytest.mark.parametrize("recipe", LRA, ids=lambda recipe: recipe.name)
def test_the_published_schedule(recipe: Any) -> None:
    """torch's OneCycleLR with a linear anneal, as run_tasks.py makes it; its peak is one step earlier."""
    warmup = {"listops": 1000, "text": 8000, "retrieval": 800, "image": 175, "pathfinder": 312}
    steps = recipe.steps
    rise = warmup[recipe.name.removeprefix("lra-")]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-4, pct_start=rise / steps, anneal_strategy="linear", total_steps=steps
    )
    rates = []
    for _ in range(steps - 1):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    ours = [recipe.schedule.rate(step, steps=steps, epochs=1, peak=1e-4) for step in range(steps - 1)]
    np.testing.assert_allclose(ours, rates, rtol=0, atol=1e-4 / rise)


@pytest.mark.parametrize("recipe", LRA, ids=lambda recipe: recipe.name)
def test_a_batch_at_full_shape(recipe: Any) -> None:
    """Forward and backward of the published model on one padded batch."""
    torch.manual_seed(0)
    data = samples(recipe.name).train
    batch = recipe.task.collate([data[0], data[1]])
    assert batch["input_ids"].shape == (2, recipe.task.length)
    model = recipe.model()
    outputs = call_model(model, recipe.task.inputs(batch, training=True))
    recipe.task.loss(outputs, batch, training=True).backward()
    assert outputs.shape[0] == 2
    assert outputs.shape[1] > int(data.labels.max())  # type: ignore[attr-defined]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["conditioned", "static"])
@pytest.mark.parametrize("recipe", LRA, ids=lambda recipe: recipe.name)
def test_a_smoke_run_at_full_shape(recipe: Any, arm: str, tmp_path: Path) -> None:
    """One optimizer step, measured, scored and saved."""
    result = train(
        recipe, select_arms([arm])[0], 0, tmp_path, data=samples(recipe.name), command="x", max_steps=1
    )
    assert 0 <= result.metrics["accuracy"] <= 100
    after = [row for row in result.rows if row.site == "conditioned.after"]
    assert after
    assert arm == "static" or all(row.kappa_pinv <= 2.002 for row in after)
    outputs = [row for row in result.rows if row.site == "attention.output"]
    assert {(row.layer, row.head) for row in outputs} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("recipe", LRA, ids=lambda recipe: recipe.name)
def test_missing_data_say_how_to_come_by_them(recipe: Any, tmp_path: Path) -> None:
    for source in (Source(), Source(folder=tmp_path / "nowhere")):
        with pytest.raises(FileNotFoundError, match=r"python -m wellcond.data.lra|Download https://"):
            recipe.read(source)
    if recipe.name not in ("lra-text", "lra-image"):
        with pytest.raises(ValueError, match="leave --hub out"):
            recipe.read(Source(hub=True))


def test_generated_folders_are_read(tmp_path: Path) -> None:
    write_listops(tmp_path / "listops", counts=Counts(6, 1, 2))
    write_pathfinder(tmp_path / "pathfinder", counts=ImageCounts(2, 1, 1))
    for name, counts in (("listops", (6, 2)), ("pathfinder", (2, 1))):
        recipe = RECIPES[f"lra-{name}"].from_source(Source(folder=tmp_path / name))
        data = recipe.data()
        assert (len(data.train), len(data.test)) == counts  # type: ignore[arg-type]
        assert recipe.task.collate([data.test[0]])["input_ids"].shape == (1, SHAPES[name])


# ---------------------------------------------------------------------------------------------- task


def test_too_long_a_sequence_is_an_error() -> None:
    task = SequenceClassification(length=4)
    item = {"input_ids": torch.ones(5, dtype=torch.long), "labels": torch.tensor(0)}
    with pytest.raises(ValueError, match="a sequence has 5 tokens, and the model takes 4"):
        task.collate([item])


def test_pairs_and_single_sequences_do_not_mix() -> None:
    task = SequenceClassification(length=4)
    one = {"input_ids": torch.tensor([1]), "labels": torch.tensor(0)}
    with pytest.raises(ValueError, match="1 of 2 samples have other_ids"):
        task.collate([one, one | {"other_ids": torch.tensor([2])}])


def test_scores() -> None:
    task = SequenceClassification(length=2)
    scorer = task.scorer()
    logits = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    scorer.update(task.scored(logits, {"labels": torch.tensor([0, 1, 1])}))
    scores = scorer.compute()
    assert scores["accuracy"] == pytest.approx(200 / 3)
    assert scores["loss"] == pytest.approx(
        task.loss(logits, {"labels": torch.tensor([0, 1, 1])}, training=False).item()
    )


# --------------------------------------------------------------------------------------------- small


def small(name: str) -> Any:
    """A small recipe with few samples, which a test can afford to make."""
    recipe = RECIPES[name]
    if name == "pixel-digits":
        return recipe
    options = {"listops-short": {"train": 96, "test": 40}, "pathfinder-16": {"train": 10, "test": 20}}[name]
    data: Any = recipe.data
    return dataclasses.replace(recipe, data=lambda: data.func(*data.args, **(data.keywords | options)))


@pytest.mark.parametrize("name", [recipe.name for recipe in LRA_SMALL])
def test_small_recipes_train(name: str, tmp_path: Path) -> None:
    recipe = small(name)
    data = recipe.data()
    result = train(
        recipe, select_arms(["conditioned"])[0], 0, tmp_path, data=data, command="x", max_steps=2, subset=64
    )
    after = [row for row in result.rows if row.site == "conditioned.after"]
    assert after
    assert all(row.kappa_pinv <= 2.002 for row in after)
    assert {(row.layer, row.head) for row in result.rows if row.site == "attention.output"} == {
        (0, 0), (0, 1), (1, 0), (1, 1)
    }  # fmt: skip


@pytest.mark.slow
def test_the_bars_of_figure_4(tmp_path: Path) -> None:
    """Tokens, first layer, all layers: each the mean over the heads' own κ, in every arm."""
    recipe, arms = small("listops-short"), ["baseline", "conditioned"]
    compare(recipe, select_arms(arms), [0], tmp_path, command="x", max_steps=2, subset=48)
    run = read_run(tmp_path)
    found = {panel.quantity: panel for panel in panels(run.rows or [], arms)}
    assert set(found) == {"tokens", "first_layer", "all_layers"}
    for quantity, layers in (("first_layer", {0}), ("all_layers", {0, 1})):
        for arm in arms:
            heads = [
                item.row
                for item in run.rows or []
                if item.arm == arm and item.row.site == "attention.output" and item.row.layer in layers
            ]
            assert {(row.layer, row.head) for row in heads} == {(i, head) for i in layers for head in (0, 1)}
            attribute = "kappa_pinv" if found[quantity].symbol == "κ⁺" else "kappa"
            expected = np.mean([getattr(row, attribute) for row in heads])
            assert found[quantity].averages()[arm] == pytest.approx(expected)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    for quantity in found:
        assert (tmp_path / "plots" / f"bars-{quantity}.png").is_file()
    assert page.count("averaged over training, ") == 3


@pytest.mark.parametrize("name", ["listops-short", "pixel-digits"])
def test_small_models_learn_a_batch(name: str) -> None:
    recipe = small(name)
    torch.manual_seed(0)
    data = recipe.data().train
    batch = recipe.task.collate([data[i] for i in range(32)])
    model = recipe.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = recipe.task.loss(
            call_model(model, recipe.task.inputs(batch, training=True)), batch, training=True
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("recipe", [*LRA, *LRA_SMALL], ids=lambda recipe: recipe.name)
def test_the_control_positions_does_not_fit(recipe: Any) -> None:
    assert "positions" not in recipe.arms


def test_every_published_number_has_its_source() -> None:
    text = Path("src/wellcond/recipes/lra.py").read_text(encoding="utf-8")
    numbers = [
        line
        for line in text.splitlines()
        if re.match(r"    (steps|batch_size|schedule|\"(learn|weight))", line)
    ]
    assert len(numbers) == 17
    assert all(re.search(r"# \[(config|run)\]", line) for line in numbers)

"""Batches that grow: their sizes, the loader, and a training that is the same as one with whole batches."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

from tests.training.tiny import same, tiny_data, tiny_recipe
from wellcond.recipes.ingredients import BatchRamp, Triangle, decay_groups
from wellcond.training.arms import select_arms
from wellcond.training.growing import GrowingBatches
from wellcond.training.train import train

BASELINE = select_arms(["baseline"])[0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 7), st.floats(0.05, 1.0))
def test_batches_grow_in_whole_micro_batches_up_to_the_full_one(
    steps: int, times: int, micro: int, share: float
) -> None:
    ramp, batch = BatchRamp(share=share), times * micro
    sizes = ramp.sizes(steps, batch_size=batch, micro_batch=micro)
    assert len(sizes) == steps
    assert sizes[0] == micro
    assert all(size % micro == 0 and micro <= size <= batch for size in sizes)
    assert all(a <= b for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_the_batch_is_full_after_its_share_of_the_budget(share: float) -> None:
    ramp = BatchRamp(share=share)
    steps = ramp.steps_in(20_000, batch_size=64 * 8, micro_batch=8)
    sizes = ramp.sizes(steps, batch_size=64 * 8, micro_batch=8)
    assert sum(sizes) / 8 == pytest.approx(20_000, abs=64)
    spent = [0, *itertools.accumulate(sizes)]
    for before, size in zip(spent, sizes, strict=False):
        # In proportion to the budget spent, rounded up to a micro-batch and one more where it is whole.
        wanted = min(64.0, 64 * before / (share * spent[-1]))
        assert wanted - 0.2 <= size / 8 <= min(64.0, wanted + 1.2)


def test_a_micro_batch_must_divide_the_batch() -> None:
    with pytest.raises(ValueError, match="16 is no multiple of a micro-batch of 5"):
        BatchRamp().sizes(3, batch_size=16, micro_batch=5)
    with pytest.raises(ValueError, match="between 0 and 1, got 0"):
        BatchRamp(share=0)


@pytest.mark.parametrize(("start", "top"), [(0.25, 0.75), (0.0, 0.5)])
def test_the_triangle_is_that_of_the_published_code(start: float, top: float) -> None:
    """min(base + x(1-base)/(1-falloff), 1/falloff - x/falloff), as backend/optimizers/schedulers.py writes it."""
    falloff = 1 - top
    schedule = Triangle(start=start, top=top)
    for step in range(101):
        x = step / 100
        expected = min(start + x * (1 - start) / (1 - falloff), 1 / falloff - x / falloff)
        assert schedule.rate(step, steps=100, epochs=1, peak=2.0) == pytest.approx(2 * expected)


def test_every_sample_comes_once_a_pass_in_an_order_of_its_own() -> None:
    batches = list(GrowingBatches(10, [3, 7, 10, 10], seed=0))
    numbers = list(itertools.chain(*batches))
    passes = [numbers[i : i + 10] for i in (0, 10, 20)]
    for turn, drawn in enumerate(passes):
        assert sorted(drawn) == list(range(10 * turn, 10 * turn + 10))
    orders = [[number % 10 for number in drawn] for drawn in passes]
    assert orders[0] != orders[1] != orders[2]
    assert list(GrowingBatches(10, [3, 7, 10, 10], seed=0)) == batches
    assert list(GrowingBatches(10, [3, 7, 10, 10], seed=1)) != batches


def test_processes_share_each_batch() -> None:
    sizes = [4, 8, 8]
    whole = list(GrowingBatches(9, sizes, seed=3))
    shares = [list(GrowingBatches(9, sizes, seed=3, process=p, processes=4)) for p in range(4)]
    for batch, *parts in zip(whole, *shares, strict=True):
        assert len({len(part) for part in parts}) == 1
        assert sorted(itertools.chain(*parts)) == sorted(batch)


class Plain(nn.Module):
    """Without dropout, so that only the batches matter. Counts the samples of every call in training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(len(x))
        return self.layers(x)


FIELDS: dict[str, Any] = {
    "batch_size": 16,
    "micro_batch": 4,
    "ramp": BatchRamp(share=0.5),
    "steps": 8,
    "schedule": Triangle(),
    "exempt": (),
    "max_gradient_norm": None,
    "betas": (0.9, 0.98),
    "epsilon": 1e-6,
    "evaluations": 2,
    "measurements": 1,
}


class NoMonitor:
    """Measures nothing: the model has no tokens."""

    batch = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rows: list[Any] = []


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellcond.training.run.ConditioningMonitor", NoMonitor)
    monkeypatch.setattr("wellcond.training.run.MonitorCallback", lambda monitor: TrainerCallback())
    monkeypatch.setattr("wellcond.training.run.token_spectra", lambda model, batch: {})


def test_the_training_is_that_of_whole_batches(unmeasured: None, tmp_path: Path) -> None:
    """Micro-batches of 4, sizes 4 to 16, rates by the budget: the weights of a loop written out with whole batches."""
    made: list[Plain] = []

    def build() -> Plain:
        made.append(Plain())
        return made[-1]

    recipe = tiny_recipe(model=build, **FIELDS)
    train(recipe, BASELINE, 0, tmp_path, data=tiny_data(), command="x")
    (model,) = made
    sizes = BatchRamp(share=0.5).sizes(8, batch_size=16, micro_batch=4)
    assert model.seen == [4] * (sum(sizes) // 4)
    assert len(set(sizes)) > 2

    torch.manual_seed(0)
    expected, data = Plain(), tiny_data().train
    optimizer = torch.optim.AdamW(
        decay_groups(expected, recipe.weight_decay, ()), lr=1e-2, betas=(0.9, 0.98), eps=1e-6
    )
    seen = 0
    for batch in GrowingBatches(64, sizes, seed=0):
        for group in optimizer.param_groups:
            group["lr"] = Triangle().rate(seen, steps=sum(sizes), epochs=1, peak=1e-2)
        items = [data[number % 64] for number in batch]
        pixels, labels = (torch.stack([item[key] for item in items]) for key in ("pixel_values", "labels"))
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(pixels), labels).backward()
        optimizer.step()
        seen += len(batch)
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_a_resumed_training_is_that_without_a_stop(tmp_path: Path) -> None:
    """To the bit, with dropout and from the middle of the growth."""
    recipe = tiny_recipe(**FIELDS)

    class Stop(Exception):
        pass

    def stop(step: int, steps: int) -> None:
        if step == 5:
            raise Stop

    options: dict[str, Any] = {"data": tiny_data(), "command": "x", "save_every": 3}
    train(recipe, BASELINE, 0, tmp_path / "whole", **options)
    with pytest.raises(Stop):
        train(recipe, BASELINE, 0, tmp_path / "cut", progress=stop, **options)
    train(recipe, BASELINE, 0, tmp_path / "cut", resume=True, **options)
    a, b = (
        load_file(tmp_path / name / "checkpoints" / "checkpoint-8" / "model.safetensors")
        for name in ("whole", "cut")
    )
    assert same(a, b)

"""Random augmentation is the same after a resume, in worker processes and in any order of loading."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from tests.training.tiny import same, tiny_data, tiny_recipe
from wellcond.data import Images, Split
from wellcond.training.arms import select_arms
from wellcond.training.repeatable import Repeatable
from wellcond.training.train import train


class Noisy(Images):
    """Images with noise from the three random states that transforms use."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        noise = torch.randn(1) + np.random.rand() + random.random()  # noqa: NPY002
        return item | {"pixel_values": item["pixel_values"] + noise.float()}


def noisy_data() -> Split:
    data = tiny_data()
    return Split(Noisy(data.train.pixels, data.train.labels), data.test)


def loaded(images: Repeatable, workers: int) -> Tensor:
    loader: DataLoader[Any] = DataLoader(images, batch_size=16, num_workers=workers)
    return torch.cat([batch["pixel_values"] for batch in loader])


def test_numbers_depend_on_seed_epoch_and_index_alone() -> None:
    images = Repeatable(noisy_data().train, seed=1)
    first = images[3]["pixel_values"]
    torch.manual_seed(99)
    random.seed(99)
    assert torch.equal(images[3]["pixel_values"], first)
    plain = tiny_data().train
    offsets = {float((images[i]["pixel_values"] - plain[i]["pixel_values"]).mean()) for i in range(8)}
    assert len(offsets) == 8
    images.epoch = 1
    assert not torch.equal(images[3]["pixel_values"], first)
    assert not torch.equal(Repeatable(noisy_data().train, seed=2)[3]["pixel_values"], first)


def random_states() -> list[str]:
    return [str(torch.get_rng_state().tolist()), repr(np.random.get_state()), repr(random.getstate())]  # noqa: NPY002


def test_random_states_go_on_as_if_nothing_was_drawn() -> None:
    before = random_states()
    Repeatable(noisy_data().train, seed=1)[0]
    assert random_states() == before


def test_worker_processes_make_the_same_images() -> None:
    images = Repeatable(noisy_data().train, seed=1)
    assert torch.equal(loaded(images, workers=0), loaded(images, workers=2))


class Stopped(Exception):
    pass


@pytest.mark.parametrize("stop", [4, 6], ids=["after an epoch", "within an epoch"])
def test_a_resumed_run_sees_the_same_augmented_images(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, last: int = 8) -> None:
        def progress(step: int, steps: int) -> None:
            if step > last:
                raise Stopped

        monkeypatch.setenv("BATCHES", str(tmp_path / f"{name}.txt"))
        train(
            tiny_recipe(), select_arms(["baseline"])[0], 0, tmp_path / name, data=noisy_data(), command="x",
            save_every=1, resume=True, progress=progress,
        )  # fmt: skip

    run("whole")
    with pytest.raises(Stopped):
        run("stopped", last=stop)
    run("stopped")
    whole, order = ((tmp_path / f"{name}.txt").read_text().split() for name in ("whole", "stopped"))
    assert len(set(whole)) == 8
    assert order[stop + 1 :] == whole[stop:]
    last = Path("checkpoints", "checkpoint-8", "model.safetensors")
    assert same(load_file(tmp_path / "whole" / last), load_file(tmp_path / "stopped" / last))

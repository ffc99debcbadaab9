"""Small models train with one thread, and nobody else notices."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.tiny import tiny_data, tiny_recipe
from wellcond.training import threads
from wellcond.training.arms import select_arms
from wellcond.training.run import train_arm
from wellcond.training.threads import threads_for


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("size", "expected"), [(3, 1), (4, 3)])
def test_one_thread_below_the_limit(size: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SMALL", 16)
    with threads_for(nn.Linear(size, 4, bias=False)):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 3


def test_the_users_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with threads_for(nn.Linear(4, 4)):
        assert torch.get_num_threads() == 3


def test_the_number_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError), threads_for(nn.Linear(4, 4)):
        raise KeyError
    assert torch.get_num_threads() == 3


def test_a_run_trains_with_one_thread(tmp_path: Path) -> None:
    seen: list[int] = []
    train_arm(
        tiny_recipe(),
        tiny_data(),
        select_arms(["baseline"])[0],
        0,
        tmp_path,
        lambda *_: seen.append(torch.get_num_threads()),
        max_steps=2,
    )
    assert seen == [1, 1]
    assert torch.get_num_threads() == 3

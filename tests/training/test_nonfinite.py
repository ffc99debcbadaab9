"""F11: a loss that is not finite stops the run, names the place, and the last good checkpoint stays."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.training.tiny import tiny_data, tiny_model, tiny_recipe
from wellcond.cli import main
from wellcond.recipes import RECIPES
from wellcond.training.arms import select_arms
from wellcond.training.checkpoints import last_checkpoint
from wellcond.training.nonfinite import NonFiniteLoss
from wellcond.training.train import train


class FromThird(nn.Module):
    """GELU until the second training forward, then one NaN in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        y = nn.functional.gelu(x)
        return y.index_fill(-1, torch.tensor(0), math.nan) if self.calls >= 3 else y


class InfiniteSlope(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.inf


class SteepFromThird(FromThird):
    """GELU; from the third training forward on its gradient is infinite while its output is fine."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        y = nn.functional.gelu(x)
        slope: Tensor = InfiniteSlope.apply(y)
        return slope if self.calls >= 3 else y


def poisoned(act: type[nn.Module]) -> nn.Module:
    model = tiny_model()
    model.get_submodule("blocks.1.mlp").act = act()
    return model


def run(folder: Path, **changes: Any) -> None:
    train(
        tiny_recipe(**changes), select_arms(["conditioned"])[0], 0, folder, data=tiny_data(), command="x",
        max_steps=6, save_every=1, resume=True,
    )  # fmt: skip


def test_it_stops_names_the_site_and_goes_on_from_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss) as caught:
        run(tmp_path, model=lambda: poisoned(FromThird))
    message = str(caught.value)
    assert "step 3 was not taken, the weights are those after step 2: the loss is nan" in message
    assert "first output that is not finite is that of 'blocks.1.mlp.act'" in message
    assert "Weights that are not finite: none" in message
    checkpoint = tmp_path / "checkpoints" / "checkpoint-2"
    assert message.endswith(f"Last good checkpoint: {checkpoint}")
    assert last_checkpoint(tmp_path / "checkpoints") == checkpoint
    state = load_file(checkpoint / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
    tiny_model().load_state_dict(state)
    run(tmp_path)  # the same recipe with a model that behaves
    assert last_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "checkpoint-6"


def test_a_gradient_that_is_not_finite_reaches_no_weight(tmp_path: Path) -> None:
    with pytest.raises(
        NonFiniteLoss, match=r"step 3 was not taken.*the gradient is not finite, first in \S+"
    ):
        run(tmp_path, model=lambda: poisoned(SteepFromThird))
    checkpoint = last_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-2"


def test_bad_images_are_said_to_be_bad(tmp_path: Path) -> None:
    data = tiny_data()
    data.train.pixels[:] = math.nan
    with pytest.raises(NonFiniteLoss, match=r"The data themselves are not finite.*none yet"):
        train(tiny_recipe(), select_arms(["baseline"])[0], 0, tmp_path, data=data, command="x", max_steps=2)


def test_the_command_ends_with_one_sentence_and_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", tiny_recipe(model=lambda: poisoned(FromThird)))
    assert (
        main(["train", "tiny", "--out", str(tmp_path / "out"), "--save-every", "1", "--max-steps", "6"]) == 1
    )
    error = capsys.readouterr().err
    assert "wellcond: step 3 was not taken" in error
    assert "checkpoint-2" in error
    assert "Traceback" not in error

"""``torchrun -m tests.training.processes FOLDER``: what several processes do; started once, it takes long."""

import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.tiny import RecordingViT, tiny_data, tiny_recipe
from wellcond.training import run as runs
from wellcond.training.arms import select_arms
from wellcond.training.nonfinite import NonFiniteLoss
from wellcond.training.train import train


class PlainViT(RecordingViT):
    """Without dropout, whose random numbers are another process's business."""


def plain_model() -> nn.Module:
    return PlainViT(img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=16, depth=2, num_heads=2)


class BadInOneProcess(nn.Module):
    """The identity; in the last process its third training forward is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
        return x * math.nan if self.calls >= 3 and last else x


def poisoned_model() -> nn.Module:
    model = plain_model()
    model.get_submodule("blocks.0").ls1 = BadInOneProcess()
    return model


def run(folder: Path, *, resume: bool = False, **changes: Any) -> None:
    train(
        tiny_recipe(**({"model": plain_model, "evaluations": 8} | changes)),
        select_arms(["conditioned"])[0],
        3,
        folder,
        data=tiny_data(),
        command="processes",
        max_steps=8,
        save_every=2,
        resume=resume,
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    measured = 0
    true_measure = runs.ConditioningMonitor.after_step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        global measured
        rows = true_measure(self, *args, **kwargs)
        measured += bool(rows)
        return rows

    runs.ConditioningMonitor.after_step = counted  # type: ignore[method-assign]
    run(folder / "run")
    (folder / f"measured-{os.environ.get('RANK', '0')}").write_text(str(measured))
    if "RANK" in os.environ:
        try:
            run(folder / "poisoned", model=poisoned_model)
        except NonFiniteLoss as error:
            (folder / f"stopped-{os.environ['RANK']}").write_text(str(error))
        torch.distributed.destroy_process_group()

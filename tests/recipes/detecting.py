"""``torchrun -m tests.recipes.detecting FOLDER``: a conditioned detector, trained and scored by several processes."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path

import torch

from wellcond.data.canvases import digit_canvases
from wellcond.recipes import RECIPES
from wellcond.tasks import Detection
from wellcond.tasks.detection import AveragePrecision
from wellcond.training.arms import select_arms
from wellcond.training.train import train


class Counting(AveragePrecision):
    """Says also how many images were scored."""

    def compute(self) -> dict[str, float]:
        return super().compute() | {"images": self.images}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingDetection(Detection):
    def scorer(self) -> Counting:
        return Counting(masks=self.masks)


if __name__ == "__main__":
    recipe = dataclasses.replace(
        RECIPES["maskrcnn-digits"],
        data=partial(digit_canvases, train=16, test=7),
        task=CountingDetection(),
        evaluations=2,
        measurements=2,
        evaluation_batch=2,
    )
    train(
        recipe,
        select_arms(["conditioned"])[0],
        0,
        Path(sys.argv[1]),
        data=recipe.data(),
        command="detecting",
        max_steps=2,
    )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

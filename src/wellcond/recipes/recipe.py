"""What a recipe is: everything that two runs of an experiment have in common, in one typed place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from wellcond.data import Split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Image classification with a known transformer.

    Attributes:
        name, title: for commands and for people.
        model: builds a fresh model that returns logits; its weights come from torch's random state.
        data: loads the images.
        epochs, batch_size: the length of the training.
        learning_rate, weight_decay, warmup_share, label_smoothing: AdamW with linear warm-up and cosine decay.
        evaluations: how often the test images are scored during training.
        measurements: how often condition numbers are measured.
    """

    name: str
    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], Split]
    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.05
    warmup_share: float = 0.05
    label_smoothing: float = 0.0
    evaluations: int = 10
    measurements: int = 10

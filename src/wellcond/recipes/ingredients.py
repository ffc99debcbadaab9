"""The parts of published recipes that the Trainer has no argument for, as data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up, then a cosine down to a floor, in epochs.

    Attributes:
        warmup_epochs: length of the warm-up, may be a fraction.
        warmup_start: the learning rate it starts from.
        floor: the learning rate at the end.
        by_epoch: the rate changes between epochs only, as timm's schedulers do by default.
        delay: epochs by which the rate lags; scripts that step timm's scheduler with the number of the epoch just
            finished train with the rate of the epoch before.
        cosine_from_warmup: the cosine starts where the warm-up ends. False, timm's default: it started with the
            training, and the warm-up covers its beginning.
        cooldown_epochs: epochs at the floor after the cosine, part of the recipe's epochs.

    >>> schedule = Schedule(warmup_epochs=2, warmup_start=0.0, floor=0.1)
    >>> [round(schedule.rate(step, steps=40, epochs=4, peak=1.0), 3) for step in (0, 10, 20, 30, 40)]
    [0.0, 0.5, 0.55, 0.232, 0.1]
    """

    warmup_epochs: float = 0.0
    warmup_start: float = 0.0
    floor: float = 0.0
    by_epoch: bool = False
    delay: int = 0
    cosine_from_warmup: bool = False
    cooldown_epochs: float = 0.0

    def rate(self, step: int, *, steps: int, epochs: float, peak: float) -> float:
        """The learning rate of optimizer step ``step`` of ``steps``, counted from 0."""
        # Steps are integers: the sum of the fractions of an epoch must not fall short of a whole one.
        time = step * epochs / steps
        if self.by_epoch:
            time = max(0, math.floor(time + 1e-9) - self.delay)
        if time < self.warmup_epochs:
            return self.warmup_start + (peak - self.warmup_start) * time / self.warmup_epochs
        start = self.warmup_epochs if self.cosine_from_warmup else 0.0
        share = min(1.0, (time - start) / (epochs - self.cooldown_epochs - start))
        return self.floor + (peak - self.floor) * (1 + math.cos(math.pi * share)) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Triangle:
    """A one-cycle schedule of two straight lines: up to the peak, then down to 0.

    Source: ``budget-triangle2`` of https://github.com/JonasGeiping/cramming (backend/optimizers/schedulers.py), whose
    numbers are the defaults; ``Triangle(start=0, top=0.5)`` is ``budget-one-cycle`` there.

    Attributes:
        start: share of the peak that it begins with.
        top: share of the training after which the peak is reached.

    >>> schedule = Triangle()
    >>> [round(schedule.rate(step, steps=40, epochs=1, peak=1.0), 3) for step in (0, 15, 30, 35, 40)]
    [0.25, 0.625, 1.0, 0.5, 0.0]
    """

    start: float = 0.25
    top: float = 0.75

    def rate(self, step: int, *, steps: int, epochs: float, peak: float) -> float:
        """The learning rate of optimizer step ``step`` of ``steps``, counted from 0."""
        share = step / steps
        if share < self.top:
            return peak * (self.start + (1 - self.start) * share / self.top)
        return peak * (1 - share) / (1 - self.top)


def decay_groups(model: nn.Module, weight_decay: float, exempt: tuple[str, ...]) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: no decay of parameters with one dimension, of biases and of those named.

    Args:
        model: any.
        weight_decay: of all others.
        exempt: patterns with ``*`` for names of further parameters; each must match one.

    Raises:
        ValueError: a pattern matches no parameter.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    >>> [len(group["params"]) for group in decay_groups(model, 0.05, ())]
    [3, 1]
    """
    from fnmatch import fnmatch

    from timm.optim._param_groups import param_groups_weight_decay

    names = [name for name, _ in model.named_parameters()]
    unknown = [pattern for pattern in exempt if not any(fnmatch(name, pattern) for name in names)]
    if unknown:
        raise ValueError(f"no parameter of {type(model).__name__} is named {', '.join(unknown)}")
    groups: list[dict[str, Any]] = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=exempt)
    return groups

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Batches that grow in proportion to the budget spent, in whole micro-batches, up to the full batch.

    The budget is counted in micro-batches, which all cost the same. Source: ``schedule_batch_size`` of
    https://github.com/JonasGeiping/cramming (backend/torch_default.py), which reads a clock in place of counting. It
    multiplies by the share where its own comment, "training reaches the target at 60% of the total budget", says to
    divide; here the comment is followed.

    Attributes:
        share: of the budget after which the batch is full.

    >>> BatchRamp(share=0.5).sizes(6, batch_size=16, micro_batch=4)
    (4, 4, 8, 12, 16, 16)
    """

    share: float = 0.6

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(
                f"the batch is full after a share of the budget between 0 and 1, got {self.share}"
            )

    def sizes(self, steps: int, *, batch_size: int, micro_batch: int) -> tuple[int, ...]:
        """Samples of each of ``steps`` optimizer steps.

        Raises ValueError if the micro-batch does not divide the batch.
        """
        if batch_size % micro_batch:
            raise ValueError(f"a batch of {batch_size} is no multiple of a micro-batch of {micro_batch}")
        # The smallest budget that is enough for so many steps; every batch has between one and `most` micro-batches.
        low, high = steps, steps * (batch_size // micro_batch)
        while low < high:
            middle = (low + high) // 2
            if len(self._spend(middle, batch_size, micro_batch)) >= steps:
                high = middle
            else:
                low = middle + 1
        return tuple(self._spend(low, batch_size, micro_batch)[:steps])

    def steps_in(self, micro_batches: int, *, batch_size: int, micro_batch: int) -> int:
        """Optimizer steps for which a budget of so many micro-batches is enough.

        >>> BatchRamp(share=0.5).steps_in(15, batch_size=16, micro_batch=4)
        6
        """
        return len(self._spend(micro_batches, batch_size, micro_batch))

    def _spend(self, budget: int, batch_size: int, micro_batch: int) -> list[int]:
        sizes, spent = [], 0
        while spent < budget:
            grown = spent * batch_size / (budget * self.share * micro_batch)
            micro_batches = min(int(grown + 1e-9) + 1, batch_size // micro_batch)
            sizes.append(micro_batches * micro_batch)
            spent += micro_batches
        return sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drops:
    """Linear warm-up over a number of steps, then a constant rate that drops at the end of some epochs.

    Source: the "step" policy of https://github.com/open-mmlab/mmcv (runner/hooks/lr_updater.py) with its linear
    warm-up; a drop after epoch 27 means that epoch 28 is the first with the lower rate.

    Attributes:
        after_epochs: when the rate drops.
        factor: what it is multiplied by each time.
        warmup_steps: optimizer steps of the warm-up.
        warmup_ratio: the share of the rate that it starts from.

    >>> drops = Drops(after_epochs=(27, 33), warmup_steps=10, warmup_ratio=0.1)
    >>> [round(drops.rate(step, steps=3600, epochs=36, peak=1.0), 4) for step in (0, 5, 10, 2699, 2700, 3300, 3599)]
    [0.1, 0.55, 1.0, 1.0, 0.1, 0.01, 0.01]
    """

    after_epochs: tuple[float, ...]
    factor: float = 0.1
    warmup_steps: int = 0
    warmup_ratio: float = 0.001

    def rate(self, step: float, *, steps: int, epochs: float, peak: float) -> float:
        """The learning rate of optimizer step ``step`` of ``steps``, counted from 0."""
        # As in `Schedule`: the sum of the fractions of an epoch must not fall short of a whole one.
        time = step * epochs / steps + 1e-9
        regular = peak * self.factor ** sum(time >= end for end in self.after_epochs)
        if step >= self.warmup_steps:
            return regular
        return regular * (self.warmup_ratio + (1 - self.warmup_ratio) * step / self.warmup_steps)


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

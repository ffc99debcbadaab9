"""ConditioningMonitor: measure during training, every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from wellcond.monitor.measuring import measure
from wellcond.monitor.rows import Row
from wellcond.sharded import needs_every_process


class ConditioningMonitor:
    """Calls `measure` on the model every ``every`` optimizer steps; no hook stays in the model in between.

    Because it runs a forward of its own, it sees compiled models, fused attention and checkpointed blocks
    alike, once per measurement, and changes nothing in the training step.

    Args:
        model: the model in training, wrapped or not.
        every: optimizer steps between measurements; step 0 is measured.
        batch: fixed inputs to measure on, so that curves compare the same samples; None: give a batch to
            each call of `after_step`.
        samples: how many samples of a batch are measured.
        sink: called with the rows of each measurement, such as `wellcond.monitor.JsonLines`.
        weights: see `measure`.

    >>> from torch import nn, randn
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    >>> monitor = ConditioningMonitor(encoder, every=10)
    >>> [len(monitor.after_step(step, randn(2, 5, 8))) > 0 for step in (0, 5, 10)]
    [True, False, True]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        batch: Any = None,
        *,
        samples: int = 8,
        sink: Callable[[list[Row]], None] | None = None,
        weights: bool = True,
    ) -> None:
        if every < 1 or samples < 1:
            raise ValueError(f"every and samples count from 1, got every={every}, samples={samples}")
        self.model = model
        self.every = every
        self.batch = batch
        self.samples = samples
        self.sink = sink
        self.weights = weights
        self.rows: list[Row] = []

    def after_step(self, step: int, batch: Any = None, *, first_process: bool = True) -> list[Row]:
        """Measure if ``step`` is due; the new rows, empty if it is not. A step is measured once.

        In a distributed run every process may call it. Those that are not the first measure only if the first cannot
        do it alone (FSDP), and their sinks are not called.

        Raises ValueError if there is no batch, here or in the constructor.
        """
        if step % self.every or (self.rows and self.rows[-1].step >= step):
            return []
        if not first_process and not needs_every_process(self.model):
            return []
        chosen = self.batch if batch is None else batch
        if chosen is None:
            raise ValueError(
                "nothing to measure on: give ConditioningMonitor(batch=...) or after_step(step, batch)"
            )
        rows = measure(self.model, first_samples(chosen, self.samples), step=step, weights=self.weights)
        self.rows += rows
        if self.sink is not None and first_process:
            self.sink(rows)
        return rows


def first_samples(batch: Any, n: int) -> Any:
    """The first n samples of every tensor in a batch.

    >>> import torch
    >>> first_samples({"x": torch.arange(5), "flag": True}, 2)
    {'x': tensor([0, 1]), 'flag': True}
    """
    if isinstance(batch, Tensor):
        return batch[:n] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: first_samples(value, n) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(first_samples(value, n) for value in batch)
    return batch

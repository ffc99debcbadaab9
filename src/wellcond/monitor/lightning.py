"""ConditioningMonitor in PyTorch Lightning; the only module that imports it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from wellcond.monitor.schedule import ConditioningMonitor


class LightningMonitor(Callback):
    """Measures at the start and after optimizer steps; in a distributed run the first process writes rows.

    Give it to ``Trainer(callbacks=[...])``. Steps are Lightning's ``global_step``, which counts optimizer steps. A
    run that goes on from a checkpoint does not measure at its start, because that step was measured before it.

    Args:
        monitor: built with the transformer inside the LightningModule and with a fixed ``batch``, which is moved to
            the device of the module.

    Raises:
        ValueError: the monitor has no batch.
    """

    def __init__(self, monitor: ConditioningMonitor) -> None:
        if monitor.batch is None:
            raise ValueError(
                "build ConditioningMonitor(model, batch=...): curves need the same samples at each step"
            )
        self.monitor = monitor
        self.step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Move the batch; measure step 0."""
        self.monitor.batch = trainer.strategy.batch_to_device(self.monitor.batch)
        self.step = trainer.global_step
        if self.step == 0:
            self.monitor.after_step(0, first_process=trainer.is_global_zero)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure if an optimizer step was made and is due."""
        if trainer.global_step > self.step:
            self.monitor.after_step(trainer.global_step, first_process=trainer.is_global_zero)
        self.step = trainer.global_step

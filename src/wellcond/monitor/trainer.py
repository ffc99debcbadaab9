"""ConditioningMonitor in the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from wellcond.monitor.schedule import ConditioningMonitor


class MonitorCallback(TrainerCallback):
    """Measures at the start and after optimizer steps; in a distributed run the first process writes rows.

    A run that goes on from a checkpoint does not measure at its start, because that step was measured before it.

    Args:
        monitor: built with the model the Trainer trains and with a fixed ``batch`` on its device.
    """

    def __init__(self, monitor: ConditioningMonitor) -> None:
        if monitor.batch is None:
            raise ValueError(
                "the Trainer does not show its batches: build ConditioningMonitor(model, batch=...)"
            )
        self.monitor = monitor

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == 0:
            self.on_step_end(args, state, control, **kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.monitor.after_step(state.global_step, first_process=state.is_world_process_zero)

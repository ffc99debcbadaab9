"""One run: one arm, one seed, trained by the Hugging Face Trainer."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import EvalPrediction

from wellcond.data import Split
from wellcond.monitor import ConditioningMonitor, Row
from wellcond.monitor.trainer import MonitorCallback
from wellcond.recipes import Recipe
from wellcond.training.arms import Arm
from wellcond.training.spectra import token_spectra

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What one run leaves: a line of ``results.jsonl`` and its measurements.

    Attributes:
        arm, seed: which run.
        metrics: at the end of training, on the test images.
        curve: metrics during training, each with its ``step``.
        seconds_per_step: the median step, measurements and evaluations not counted.
        peak_memory_mb: of the accelerator; None on a CPU.
        rows: the measurements.
        spectra: singular values of one test image's tokens at the end, see `token_spectra`.
    """

    arm: str
    seed: int
    metrics: dict[str, float]
    curve: list[dict[str, float]]
    seconds_per_step: float
    peak_memory_mb: float | None
    rows: list[Row]
    spectra: dict[str, list[float] | None]

    def line(self) -> dict[str, Any]:
        """The fields of ``results.jsonl``."""
        fields = dataclasses.asdict(self)
        del fields["rows"], fields["spectra"]
        return fields


class ImageTrainer(Trainer):
    """The Trainer on a model that takes pixels and returns logits; nothing is wrapped, no key is renamed."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        logits = model(inputs["pixel_values"])
        loss = nn.functional.cross_entropy(
            logits,
            inputs["labels"],
            label_smoothing=self.args.label_smoothing_factor if model.training else 0.0,
        )
        return (loss, {"logits": logits}) if return_outputs else loss


class Stopwatch(TrainerCallback):
    """Times optimizer steps and says how far the run is."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.durations: list[float] = []
        self.started = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.started = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.durations.append(time.perf_counter() - self.started)
        if self.progress is not None:
            self.progress(state.global_step, state.max_steps)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Top-1 accuracy in %."""
    logits = (
        prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    )
    return {"accuracy": 100.0 * float(np.mean(np.argmax(logits, axis=-1) == prediction.label_ids))}


def train_arm(
    recipe: Recipe, data: Split, arm: Arm, seed: int, folder: Path, progress: Progress | None = None
) -> RunResult:
    """Train one arm with one seed; two arms with the same seed share initial weights and order of data.

    Args:
        recipe: the experiment.
        data: its images, loaded once for all runs.
        arm: what is done to the fresh model.
        seed: of weights and data order.
        folder: for what the Trainer writes.
        progress: told after every step.

    Raises ValueError where an arm does not fit the model.
    """
    torch.manual_seed(seed)
    model = recipe.model()
    probe = torch.stack([data.test[i]["pixel_values"] for i in range(8)])
    arm.apply_(model, torch.stack([data.train[i]["pixel_values"] for i in range(min(64, len(data.train)))]))

    # The Trainer asks for libraries that report elsewhere unless it is told not to; nothing leaves this machine.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    steps = recipe.epochs * -(-len(data.train) // recipe.batch_size)
    every = max(1, steps // recipe.evaluations)
    arguments = TrainingArguments(
        output_dir=str(folder),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=recipe.batch_size,
        per_device_eval_batch_size=512,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        lr_scheduler_type="cosine",
        warmup_steps=int(recipe.warmup_share * steps),
        label_smoothing_factor=recipe.label_smoothing,
        eval_strategy="steps",
        eval_steps=every,
        logging_steps=every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    watch = Stopwatch(progress)
    trainer = ImageTrainer(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.test,
        compute_metrics=accuracy,
    )
    trainer.remove_callback(PrinterCallback)
    monitor = ConditioningMonitor(
        model, every=max(1, steps // recipe.measurements), batch=probe.to(trainer.args.device)
    )
    # The stopwatch comes first: what the monitor needs is not part of a step.
    trainer.add_callback(watch)
    trainer.add_callback(MonitorCallback(monitor))
    trainer.train()
    final = trainer.evaluate()
    return RunResult(
        arm=arm.name,
        seed=seed,
        metrics={"accuracy": final["eval_accuracy"], "loss": final["eval_loss"]},
        curve=learning_curve(trainer.state.log_history),
        seconds_per_step=statistics.median(watch.durations),
        peak_memory_mb=torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None,
        rows=monitor.rows,
        spectra=token_spectra(model, monitor.batch),
    )


def learning_curve(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Points of the Trainer's log with a step: training loss as ``train_loss``, test loss and accuracy.

    >>> learning_curve([{"step": 5, "loss": 2.0}, {"step": 5, "eval_loss": 1.0, "eval_accuracy": 50.0}])
    [{'step': 5, 'train_loss': 2.0, 'loss': 1.0, 'accuracy': 50.0}]
    """
    points: dict[float, dict[str, float]] = {}
    names = {"loss": "train_loss", "eval_loss": "loss", "eval_accuracy": "accuracy"}
    for entry in history:
        found = {new: entry[old] for old, new in names.items() if old in entry}
        if found:
            points.setdefault(entry["step"], {"step": entry["step"]}).update(found)
    return list(points.values())

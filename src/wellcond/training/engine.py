"""The Hugging Face Trainer for image classification, with what it lacks: whole checkpoints and a stop at NaN."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalPrediction

from wellcond.recipes import Recipe
from wellcond.recipes.ingredients import decay_groups
from wellcond.training.average import Average
from wellcond.training.checkpoints import UNFINISHED, publish, write_conditioning
from wellcond.training.nonfinite import NonFiniteLoss, bad_tensors, first_non_finite, is_finite
from wellcond.training.repeatable import Repeatable, RepeatedOrder, seeded

MIXING = 1
"""Keeps the random numbers of mixing apart from those of an image with the same numbers."""

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

Score = Callable[[dict[str, float]], None]
"""Called with one point of the learning curve."""


class ImageTrainer(Trainer):
    """The Trainer on a model that takes pixels and returns logits; nothing is wrapped, no key is renamed.

    Args:
        recipe: what the Trainer has no argument for is taken from it: parameter groups, schedule, mixing, repeated
            augmentation, the average of the weights.
        args, kwargs: the Trainer's.
    """

    def __init__(self, recipe: Recipe, *args: Any, **kwargs: Any) -> None:
        self.recipe = recipe
        super().__init__(*args, **kwargs)
        # compute_loss averages over its micro-batch, whatever the model's forward accepts.
        self.model_accepts_loss_kwargs = False
        self.average: Average | None = None
        if recipe.average_decay is not None:
            # The model is on its device by now, and not wrapped yet.
            plain = self.accelerator.unwrap_model(self.model)
            self.average = Average(plain, recipe.average_decay)
            self.add_callback(Averaging(self.average, plain))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        recipe = self.recipe
        if self.optimizer is None and recipe.exempt is not None:
            plain = self.accelerator.unwrap_model(self.model if model is None else model)
            self.optimizer = torch.optim.AdamW(
                decay_groups(plain, recipe.weight_decay, recipe.exempt), lr=recipe.learning_rate
            )
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        return optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        schedule = self.recipe.schedule
        optimizer = optimizer or self.optimizer
        if self.lr_scheduler is None and schedule is not None and optimizer is not None:
            peak, epochs = self.recipe.learning_rate, self.recipe.epochs

            def factor(step: int) -> float:
                return schedule.rate(step, steps=num_training_steps, epochs=epochs, peak=peak) / peak

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        scheduler: torch.optim.lr_scheduler.LRScheduler = super().create_scheduler(
            num_training_steps, optimizer
        )
        return scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        images = self.train_dataset if train_dataset is None else train_dataset
        if self.recipe.repeats > 1 and isinstance(images, Repeatable):
            return RepeatedOrder(images, self.recipe.repeats)
        return super()._get_train_sampler(train_dataset)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        # The Trainer's own setting would drop test images too.
        self.args.dataloader_drop_last = self.recipe.drop_last and is_training
        return super()._get_dataloader(
            dataset, description, batch_size, sampler_fn, is_training, dataloader_key
        )

    def evaluate_average(self) -> dict[str, float]:
        """Scores of the averaged weights, ``average_loss`` and ``average_accuracy``; empty without an average."""
        if self.average is None:
            return {}
        with self.average.applied_to(self.accelerator.unwrap_model(self.model)):
            scores = self.evaluate(metric_key_prefix="average")
        return {name: scores[name] for name in ("average_accuracy", "average_loss")}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        logits = model(inputs["pixel_values"])
        mixed = inputs["labels"].is_floating_point()
        loss = nn.functional.cross_entropy(
            logits,
            inputs["labels"],
            # Mixed labels are smoothed already.
            label_smoothing=0.0 if mixed or not model.training else self.recipe.label_smoothing,
        )
        return (loss, {"logits": logits}) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One forward and backward. Raises NonFiniteLoss, in every process, if the loss of one is not finite."""
        inputs = self._mixed(inputs)
        random_state = torch.get_rng_state()
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        # Every process must learn of it, or the others would step with the gradient of the bad one.
        bad = self.accelerator.reduce((~loss.isfinite()).float().reshape(1))
        if bad.item() > 0:
            if loss.isfinite():
                raise NonFiniteLoss(f"{self._stopped()} the loss of another process is not finite.")
            raise NonFiniteLoss(
                f"{self._stopped()} the loss is {loss.item()}. {self._culprit(inputs, random_state)}"
            )
        return loss

    def _mixed(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch after mixup and CutMix. Numbers depend on seed, step and process: a resume repeats them."""
        recipe = self.recipe
        if recipe.mixing is None:
            return inputs
        with seeded(self.args.seed, self.state.global_step, self.args.process_index, MIXING):
            pixels, labels = recipe.mixing.mix(
                inputs["pixel_values"],
                inputs["labels"],
                classes=recipe.classes,
                smoothing=recipe.label_smoothing,
            )
        return inputs | {"pixel_values": pixels, "labels": labels}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.average is not None:
            self.average.load(Path(resume_from_checkpoint))

    def take_up(self, checkpoint: Path) -> None:
        """The weights and the log of a checkpoint of the last step, after which nothing is left to train."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))

    def _culprit(self, inputs: dict[str, Tensor], random_state: Tensor) -> str:
        inputs = self._prepare_inputs(inputs)
        if not is_finite(inputs):
            return "The images themselves are not finite."
        plain = self.accelerator.unwrap_model(self.model)
        with torch.random.fork_rng():
            torch.set_rng_state(random_state)
            path = first_non_finite(plain, lambda: plain(inputs["pixel_values"]))
        weights = bad_tensors(plain.named_parameters())
        where = (
            f"The first output that is not finite is that of {path!r}."
            if path
            else "Every output is finite here."
        )
        return f"{where} Weights that are not finite: {', '.join(weights) or 'none'}."

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        # Under float16 the gradient scaler meets infinite gradients on purpose and skips such a step.
        if self.accelerator.scaler is None and not np.isfinite(float(norm)):
            gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
            names = ", ".join(bad_tensors(gradients)[:3])
            raise NonFiniteLoss(f"{self._stopped()} the gradient is not finite, first in {names}.")
        return norm

    def _stopped(self) -> str:
        step = self.state.global_step + 1
        return f"step {step} was not taken, the weights are those after step {step - 1}:"

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.args.output_dir or "") / UNFINISHED)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As the Trainer does, but under another name until all of it, of every process, is written."""
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir or "")
        staged = folder / UNFINISHED / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero():
            write_conditioning(self.accelerator.unwrap_model(self.model), staged)
            if self.average is not None:
                self.average.save(staged)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            publish(staged, folder)
        self.accelerator.wait_for_everyone()


class Averaging(TrainerCallback):
    """Takes the weights of a model after every optimizer step into an average."""

    def __init__(self, average: Average, model: nn.Module) -> None:
        self.average = average
        self.model = model

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.average.update(self.model)


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
        if self.progress is not None and state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps)


class Scores(TrainerCallback):
    """Passes every point of the learning curve on, once, in the first process."""

    def __init__(self, score: Score) -> None:
        self.score = score
        self.scored = -1

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and state.global_step > self.scored:
            self.scored = state.global_step
            self.score(learning_curve(state.log_history)[-1])


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Top-1 accuracy in %."""
    logits = (
        prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    )
    return {"accuracy": 100.0 * float(np.mean(np.argmax(logits, axis=-1) == prediction.label_ids))}


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

"""The Hugging Face Trainer on a recipe, with what it lacks: whole checkpoints and a stop at NaN."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import slice_tensors
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from wellcond.recipes import Recipe
from wellcond.recipes.ingredients import decay_groups
from wellcond.running import call_model
from wellcond.training.average import Average
from wellcond.training.checkpoints import UNFINISHED, publish, write_conditioning
from wellcond.training.growing import GrowingBatches
from wellcond.training.nonfinite import NonFiniteLoss, bad_tensors, first_non_finite, is_finite
from wellcond.training.repeatable import Repeatable, RepeatedOrder, seeded

PREPARATION = 1
"""Keeps the random numbers of a batch apart from those of a sample with the same numbers."""

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

Score = Callable[[dict[str, float]], None]
"""Called with one point of the learning curve."""


class RecipeTrainer(Trainer):
    """The Trainer on a recipe's model and task; nothing is wrapped, no key is renamed.

    Args:
        recipe: what the Trainer has no argument for is taken from it: the task, parameter groups, schedule, repeated
            augmentation, the average of the weights.
        sizes: samples of each batch, where batches grow; None: they do not.
        args, kwargs: the Trainer's.
    """

    def __init__(self, recipe: Recipe, *args: Any, sizes: Sequence[int] | None = None, **kwargs: Any) -> None:
        self.recipe = recipe
        self.sizes = sizes
        self.task = recipe.task
        super().__init__(*args, **kwargs)
        # compute_loss averages over its micro-batch, whatever the model's forward accepts.
        self.model_accepts_loss_kwargs = False
        self._prepared_step, self._micro_batch, self._batch_samples = -1, 0, 0
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
                decay_groups(plain, recipe.weight_decay, recipe.exempt),
                lr=recipe.learning_rate,
                betas=recipe.betas,
                eps=recipe.epsilon,
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
            # Where batches grow, a schedule goes by the budget, which is samples: steps become dearer.
            seen = range(num_training_steps + 1) if self.sizes is None else [0, *accumulate(self.sizes)]

            def factor(step: int) -> float:
                return schedule.rate(seen[step], steps=seen[-1], epochs=epochs, peak=peak) / peak

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        scheduler: torch.optim.lr_scheduler.LRScheduler = super().create_scheduler(
            num_training_steps, optimizer
        )
        return scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        samples = self.train_dataset if train_dataset is None else train_dataset
        if self.recipe.repeats > 1 and isinstance(samples, Repeatable):
            return RepeatedOrder(samples, self.recipe.repeats)
        return super()._get_train_sampler(train_dataset)

    def get_train_dataloader(self) -> Any:
        if self.sizes is None:
            return super().get_train_dataloader()
        # Not prepared by accelerate, which shares out batches of one size only: each process takes its own share.
        batches = GrowingBatches(
            len(self.train_dataset),  # type: ignore[arg-type]
            self.sizes,
            self.args.seed,
            process=self.args.process_index,
            processes=self.args.world_size,
        )
        return DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        # The Trainer's own setting would drop test samples too.
        self.args.dataloader_drop_last = self.recipe.drop_last and is_training
        return super()._get_dataloader(
            dataset, description, batch_size, sampler_fn, is_training, dataloader_key
        )

    def evaluate_average(self) -> dict[str, float]:
        """Scores of the averaged weights, their names after ``average_``; empty without an average."""
        if self.average is None:
            return {}
        with self.average.applied_to(self.accelerator.unwrap_model(self.model)):
            scores = self.evaluate(metric_key_prefix="average")
        return {name: value for name, value in scores.items() if is_score(name, "average_")}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        outputs = call_model(model, self.task.inputs(inputs, training=model.training))
        loss = self.task.loss(outputs, inputs, training=model.training)
        if model.training and self.current_gradient_accumulation_steps > 1:
            # The Trainer averages over micro-batches; the last one of an epoch may be smaller than the others.
            loss = loss * (
                samples_in(inputs) * self.current_gradient_accumulation_steps / self._batch_samples
            )
        return (loss, outputs) if return_outputs else loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Also counts the samples of the step, which `compute_loss` averages over."""
        micro_batches, items = super().get_batch_samples(*args, **kwargs)
        self._batch_samples = sum(samples_in(batch) for batch in micro_batches)
        return micro_batches, items

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The task's scores; no outputs are kept, only what its scorer needs of each sample."""
        model = self.accelerator.unwrap_model(self.model)
        training = model.training
        model.eval()
        scorer, count = self.task.scorer(), 0
        try:
            for unplaced in dataloader:
                batch = self._prepare_inputs(unplaced)
                with torch.no_grad(), self.compute_loss_context_manager():
                    outputs = call_model(model, self.task.inputs(batch, training=False))
                    scored = self.task.scored(outputs, batch)
                # The loader repeats samples where processes would not have equally many; this drops them again.
                scored = self.accelerator.gather_for_metrics(
                    scored, use_gather_object=isinstance(scored, list)
                )
                scorer.update(scored)
                count += len(scored) if isinstance(scored, list) else len(next(iter(scored.values())))
        finally:
            model.train(training)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in scorer.compute().items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=count)  # type: ignore[arg-type]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of a batch. Raises NonFiniteLoss, in every process, if the loss of one is not finite.

        A batch that has grown beyond a micro-batch goes through the model in several.
        """
        if self.sizes is None:
            return self._micro_step(model, inputs, num_items_in_batch)
        micro = self.args.per_device_train_batch_size
        self._batch_samples = samples_in(inputs)
        parts = [
            slice_tensors(inputs, slice(start, start + micro))
            for start in range(0, self._batch_samples, micro)
        ]
        self.current_gradient_accumulation_steps = len(parts)
        losses = []
        for i, part in enumerate(parts):
            # Processes add their gradients up once a step, not once a micro-batch.
            alone = self.accelerator.no_sync(model) if i < len(parts) - 1 else contextlib.nullcontext()
            with alone:
                losses.append(self._micro_step(model, part, num_items_in_batch))
        return torch.stack(losses).sum()

    def _micro_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        inputs = self._prepared(inputs)
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

    def _prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The batch after its random changes, which depend on seed, step, micro-batch and process alone."""
        step = self.state.global_step
        if self._prepared_step != step:
            self._prepared_step, self._micro_batch = step, 0
        numbers = [self.args.seed, step, self.args.process_index, PREPARATION]
        # The first one has no number of its own, so that runs without accumulation are what they always were.
        numbers += [self._micro_batch] if self._micro_batch else []
        self._micro_batch += 1
        with seeded(*numbers):
            return self.task.prepare(inputs)

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
            return "The data themselves are not finite."
        plain = self.accelerator.unwrap_model(self.model)
        with torch.random.fork_rng():
            torch.set_rng_state(random_state)
            path = first_non_finite(
                plain, lambda: call_model(plain, self.task.inputs(inputs, training=plain.training))
            )
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


def samples_in(batch: Mapping[str, Any]) -> int:
    """How many samples a batch has: rows of its first tensor, or entries of its first list, where they differ in size.

    >>> samples_in({"images": [torch.rand(3, 8, 9), torch.rand(3, 9, 8)]}), samples_in({"pixels": torch.rand(4, 3, 8)})
    (2, 4)
    """
    return len(next(iter(batch.values())))


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


def is_score(name: str, prefix: str) -> bool:
    """Whether a number of the Trainer's evaluation is a score, not a speed.

    >>> is_score("eval_accuracy", "eval_"), is_score("eval_runtime", "eval_"), is_score("epoch", "eval_")
    (True, False, False)
    """
    speeds = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    return name.startswith(prefix) and name.removeprefix(prefix) not in speeds


def learning_curve(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Points of the Trainer's log with a step: training loss as ``train_loss``, and scores of the test set.

    >>> learning_curve([{"step": 5, "loss": 2.0}, {"step": 5, "eval_loss": 1.0, "eval_accuracy": 50.0}])
    [{'step': 5, 'train_loss': 2.0, 'loss': 1.0, 'accuracy': 50.0}]
    """
    points: dict[float, dict[str, float]] = {}
    for entry in history:
        found = {"train_loss": entry["loss"]} if "loss" in entry else {}
        found |= {
            name.removeprefix("eval_"): value for name, value in entry.items() if is_score(name, "eval_")
        }
        if found:
            points.setdefault(entry["step"], {"step": entry["step"]}).update(found)
    return list(points.values())

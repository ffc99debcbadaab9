"""One run: one arm, one seed, trained by the Hugging Face Trainer."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.utils.data import Dataset, Subset
from transformers import PrinterCallback, TrainingArguments

from wellcond.data import Split, StreamedImages
from wellcond.monitor import ConditioningMonitor, Row
from wellcond.monitor.trainer import MonitorCallback
from wellcond.recipes import Recipe
from wellcond.running import undisturbed
from wellcond.tasks import Illustrated
from wellcond.training.arms import Arm
from wellcond.training.checkpoints import discard_unfinished, read_conditioning_, step_of
from wellcond.training.engine import (
    Progress,
    RecipeTrainer,
    Score,
    Scores,
    Stopwatch,
    is_score,
    learning_curve,
)
from wellcond.training.repeatable import Epochs, Repeatable, RepeatableStream, first_items
from wellcond.training.spectra import token_spectra
from wellcond.training.threads import threads_for

PROBED = 8
"""Test samples whose condition numbers are measured."""

CALIBRATED = 64
"""Training samples that an arm sees before the training, at most."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What one run leaves: a line of ``results.jsonl`` and its measurements.

    Attributes:
        arm, seed: which run.
        metrics: at the end of training, on the test set.
        curve: metrics during training, each with its ``step``.
        seconds_per_step: the median step, measurements and evaluations not counted; nan if a resumed run had
            no step left.
        peak_memory_mb: of the accelerator; None on a CPU.
        rows: the measurements.
        spectra: singular values of one test sample's tokens at the end, see `token_spectra`.
        examples: what the trained model makes of the first test samples, where the task can show it.
    """

    arm: str
    seed: int
    metrics: dict[str, float]
    curve: list[dict[str, float]]
    seconds_per_step: float
    peak_memory_mb: float | None
    rows: list[Row]
    spectra: dict[str, list[float] | None]
    examples: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def line(self) -> dict[str, Any]:
        """The fields of ``results.jsonl``."""
        fields = dataclasses.asdict(self)
        del fields["rows"], fields["spectra"], fields["examples"]
        return fields


@dataclasses.dataclass(frozen=True)
class Keeping:
    """What a run keeps while it goes on, so that another process can go on from there.

    Attributes:
        save_every: optimizer steps between checkpoints; the last step has one too. None: no checkpoints.
        resume: a checkpoint to go on from.
        rows: the measurements that were made before it.
        sink: given the rows of each measurement as soon as it is made.
        score: given each point of the learning curve.
    """

    save_every: int | None = None
    resume: Path | None = None
    rows: Sequence[Row] = ()
    sink: Callable[[list[Row]], None] | None = None
    score: Score | None = None


def total_steps(recipe: Recipe, samples: int, max_steps: int | None = None) -> int:
    """Optimizer steps of a run; the learning rate's schedule has this length.

    >>> from wellcond.recipes import RECIPES
    >>> recipe = dataclasses.replace(RECIPES["digits-vit"], epochs=16, batch_size=64)
    >>> total_steps(recipe, samples=1347), total_steps(recipe, samples=1347, max_steps=6)
    (352, 6)
    """
    steps = recipe.steps or max(1, round(recipe.epochs * steps_per_epoch(recipe, samples)))
    return steps if max_steps is None else min(steps, max_steps)


def started_processes() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def steps_per_epoch(recipe: Recipe, samples: int) -> int:
    """Optimizer steps that show so many samples once."""
    batch = process_batch(recipe, samples) * started_processes()
    return samples // batch if recipe.drop_last else -(-samples // batch)


def process_batch(recipe: Recipe, samples: int | None = None) -> int:
    """Samples per process and step, so that the batch of all processes is the recipe's.

    A recipe whose batches are always full gets a smaller one if there are fewer ``samples``, as in a smoke run.

    Raises ValueError if it cannot be divided, or there are fewer samples than a batch needs.
    """
    processes, multiple = started_processes(), recipe.task.batch_multiple
    if recipe.batch_size % processes:
        raise ValueError(
            f"{processes} processes cannot share a batch of {recipe.batch_size} samples equally; "
            f"start a number of processes that divides it"
        )
    share = recipe.batch_size // processes
    if share % multiple:
        raise ValueError(
            f"a batch must be a multiple of {multiple}, as samples are mixed, but each of {processes} processes has "
            f"{share} of a batch of {recipe.batch_size}; start fewer processes"
        )
    if samples is None or not recipe.drop_last or samples >= recipe.batch_size:
        return share
    fewer = samples // processes // multiple * multiple
    if fewer == 0:
        raise ValueError(
            f"{samples} samples are too few for {processes} processes, each of which needs {multiple}"
        )
    return fewer


def micro_batch(recipe: Recipe, share: int) -> int:
    """Samples that a process takes through the model at once, of its ``share`` of the batch.

    >>> from wellcond.recipes import RECIPES
    >>> recipe = dataclasses.replace(RECIPES["digits-vit"], micro_batch=16)
    >>> micro_batch(recipe, 64), micro_batch(recipe, 8)
    (16, 8)

    Raises ValueError if it does not divide the share.
    """
    micro = share if recipe.micro_batch is None else min(recipe.micro_batch, share)
    if micro < 1 or share % micro or micro % recipe.task.batch_multiple:
        raise ValueError(
            f"a micro-batch of {micro} does not divide the {share} samples of a process and step"
            + (
                f", or is no multiple of {recipe.task.batch_multiple}"
                if recipe.task.batch_multiple > 1
                else ""
            )
        )
    return micro


def thinned(samples: Dataset[Any], subset: int | None) -> Dataset[Any]:
    """``subset`` samples spread evenly over a data set, so that sorted classes are all there; None: all.

    A stream gives its first ones.

    >>> thinned(list(range(10)), 3).indices
    [0, 4, 9]
    """
    count = len(samples)  # type: ignore[arg-type]
    if subset is None or subset >= count:
        return samples
    if subset < 1:
        raise ValueError(f"a subset counts its samples from 1, got {subset}")
    if isinstance(samples, StreamedImages):
        return samples.take(subset)
    return Subset(samples, torch.linspace(0, count - 1, subset).long().tolist())


def train_arm(
    recipe: Recipe,
    data: Split,
    arm: Arm,
    seed: int,
    folder: Path,
    progress: Progress | None = None,
    *,
    max_steps: int | None = None,
    subset: int | None = None,
    keeping: Keeping = Keeping(),
) -> RunResult:
    """Train one arm with one seed; two arms with the same seed share initial weights and order of data.

    Args:
        recipe: the experiment.
        data: its samples, loaded once for all runs.
        arm: what is done to the fresh model.
        seed: of weights and data order.
        folder: for what the Trainer writes.
        progress: told after every step.
        max_steps: stop after so many steps; the schedule of the learning rate is that long too.
        subset: train and test on so many samples each.
        keeping: checkpoints and going on from one.

    Raises:
        ValueError: an arm does not fit the model, or processes do not divide the batch or shard the model.
        NonFiniteLoss: a loss or gradient is not finite; the last checkpoint is from before.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise ValueError(
            "sharded training (FSDP) is not supported here: start with torchrun, which copies the model to each process"
        )
    chosen = thinned(data.train, subset)
    training: Repeatable | RepeatableStream
    if isinstance(chosen, StreamedImages):
        training = RepeatableStream(chosen, seed, repeats=recipe.repeats)
    else:
        training = Repeatable(chosen, seed, draws=getattr(data.train, "draws", True))
    test = thinned(data.test, subset)
    torch.manual_seed(seed)
    model = recipe.model()
    if recipe.synchronise_norms and started_processes() > 1 and torch.accelerator.is_available():
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]

    def first_inputs(samples: Dataset[Any], count: int) -> Any:
        return recipe.task.inputs(recipe.task.collate(first_items(samples, count)), training=False)

    probe = first_inputs(test, PROBED)
    arm.apply_(model, first_inputs(training, CALIBRATED))
    if keeping.resume is not None:
        read_conditioning_(model, keeping.resume)

    # transformers asks libraries that report elsewhere unless it is told not to; nothing leaves this machine.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    steps = total_steps(recipe, len(training), max_steps)
    every = max(1, steps // recipe.evaluations)
    share = process_batch(recipe, len(training))
    micro = micro_batch(recipe, share)
    sizes = None
    if recipe.ramp is not None:
        unit = micro * started_processes()
        sizes = recipe.ramp.sizes(steps, batch_size=share * started_processes(), micro_batch=unit)
    on_cpus = started_processes() > 1 and not torch.accelerator.is_available()
    arguments = TrainingArguments(
        output_dir=str(folder),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=share // micro if sizes is None else 1,
        per_device_eval_batch_size=recipe.evaluation_batch,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        adam_epsilon=recipe.epsilon,
        lr_scheduler_type="cosine",
        warmup_steps=int(recipe.warmup_share * steps),
        eval_strategy="steps",
        eval_steps=every,
        logging_steps=every,
        save_strategy="no" if keeping.save_every is None else "steps",
        save_steps=keeping.save_every or steps,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=torch.cuda.is_available(),
        dataloader_num_workers=min(recipe.workers, os.cpu_count() or 1),
        bf16=recipe.mixed_precision and torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        # An infinite length keeps the Trainer's check that gradients are finite.
        max_grad_norm=math.inf if recipe.max_gradient_norm is None else recipe.max_gradient_norm,
        ddp_find_unused_parameters=False,
        # Without it several processes on CPUs would each train alone.
        use_cpu=on_cpus,
        ddp_backend="gloo" if on_cpus else None,
    )
    if arguments.world_size != started_processes():
        raise RuntimeError(
            f"{started_processes()} processes were started, but the Trainer sees {arguments.world_size}: "
            f"each would train alone and write over the others"
        )
    if arguments.process_index == 0:
        discard_unfinished(folder)
    watch = Stopwatch(progress)
    trainer = RecipeTrainer(
        recipe,
        sizes=sizes,
        model=model,
        args=arguments,
        data_collator=recipe.task.collate,
        train_dataset=training,
        eval_dataset=test,
        processing_class=data.tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    monitor = ConditioningMonitor(
        model,
        every=max(1, steps // recipe.measurements),
        batch=send_to_device(probe, trainer.args.device),
        sink=keeping.sink,
    )
    monitor.rows += keeping.rows
    # The stopwatch comes first: what the monitor needs is not part of a step.
    trainer.add_callback(watch)
    if sizes is None:
        trainer.add_callback(Epochs(training, steps_per_epoch(recipe, len(training))))
    trainer.add_callback(MonitorCallback(monitor))
    if keeping.score is not None:
        trainer.add_callback(Scores(keeping.score))
    with threads_for(model):
        if keeping.resume is not None and step_of(keeping.resume) >= steps:
            trainer.take_up(keeping.resume)  # the Trainer itself would make one step more
        else:
            trainer.train(resume_from_checkpoint=None if keeping.resume is None else str(keeping.resume))
        final = trainer.evaluate()
        scores = {
            name.removeprefix("eval_"): value for name, value in final.items() if is_score(name, "eval_")
        }
        scores |= trainer.evaluate_average()
        with undisturbed(model):
            scores |= recipe.task.final_scores(model, test)
            examples = recipe.task.examples(model, test) if isinstance(recipe.task, Illustrated) else []
    return RunResult(
        arm=arm.name,
        seed=seed,
        metrics=scores,
        curve=learning_curve(trainer.state.log_history),
        seconds_per_step=statistics.median(watch.durations) if watch.durations else float("nan"),
        peak_memory_mb=torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None,
        rows=monitor.rows,
        spectra=token_spectra(model, monitor.batch),
        examples=examples,
    )

"""What a recipe is: everything that two runs of an experiment have in common, in one typed place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from wellcond.data import Split
from wellcond.data.folder import Corrupt
from wellcond.recipes.ingredients import BatchRamp
from wellcond.tasks import ImageClassification, Task


@dataclasses.dataclass(frozen=True)
class Source:
    """Where data are read from, as a command gives it.

    Attributes:
        folder: of the data; None: the usual place, if the recipe knows one.
        hub: stream from the Hugging Face hub.
        corrupt: what to do about a training image that cannot be read, ``"fatal"`` or ``"skip"``.
    """

    folder: Path | None = None
    hub: bool = False
    corrupt: Corrupt = "fatal"

    def require_plain_folder(self) -> None:
        """ValueError if images come as a few whole files, which cannot be streamed nor skipped one by one."""
        if self.hub:
            raise ValueError("this recipe reads a local folder and streams nothing: leave --hub out")
        if self.corrupt != "fatal":
            raise ValueError("all images are in a few files, none can be skipped: leave --corrupt out")


class Rate(Protocol):
    """A schedule of the learning rate, a frozen dataclass."""

    def rate(self, step: int, *, steps: int, epochs: float, peak: float) -> float:
        """The learning rate of optimizer step ``step`` of ``steps``, counted from 0.

        Where batches grow, it is asked in samples: how many were seen before the step, of how many in all.
        """


@dataclasses.dataclass(frozen=True)
class Paper:
    """What the paper reports in %, without and with conditioning: top-1 accuracy, or box AP of a detector."""

    baseline: float
    conditioned: float


DIGIT_CLASSES = ImageClassification(classes=10)

WITHOUT_POSITIONS = ("baseline", "conditioned", "rescaled", "static", "scaled")
"""Arms for a model that adds no position parameter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment with a known transformer.

    Attributes:
        name, title: for commands and for people.
        model: builds a fresh model; its weights come from torch's random state.
        data: loads the samples from where they usually are.
        read: loads them from a `Source`; None: they ship with a package, and there is nothing to choose.
        task: how the model is called and scored, and what is minimised.
        epochs: the length of the training; its schedule counts in them.
        steps: the length in optimizer steps in place of epochs; None: epochs count.
        batch_size: samples per optimizer step, of all processes together.
        micro_batch: samples that one process takes through the model at once, gradients are summed up to the
            batch; None: all at once.
        ramp: batches begin with one micro-batch and grow to ``batch_size``; None: all are of that size.
        learning_rate, betas, epsilon, weight_decay: of AdamW.
        warmup_share: of the training; linear warm-up, then cosine decay to 0. Not used if there is a ``schedule``.
        evaluations: how often the test set is scored during training.
        measurements: how often condition numbers are measured.
        schedule: of the learning rate, in place of ``warmup_share``.
        exempt: names, with ``*``, of parameters without weight decay besides biases and those with one dimension.
            None: the Trainer's choice, biases and normalisation layers.
        average_decay: of an exponential moving average of the weights, scored at the end beside the model; None: none.
        max_gradient_norm: longer gradients are shortened to it; None: none are.
        repeats: how often a sample comes in a row, augmented anew each time (repeated augmentation); an epoch keeps
            its length.
        drop_last: leave out the last batch of an epoch if it is not full. Fewer samples than a batch make one batch.
        mixed_precision: bfloat16 autocast on accelerators that have it.
        synchronise_norms: batch normalisation over all processes.
        workers: processes that load samples.
        evaluation_batch: samples that are scored at once.
        arms: what ``wellcond compare`` trains unless it is told otherwise. The arm "positions" needs a model that adds
            a position parameter.
        pretrained: from the place of a model or its weights to the recipe that starts from it; None: the model starts
            from random weights.
        budget: for a training whose length is a budget, from its text, such as "24h", to the recipe of that length;
            None: the length is as it is.
        paper: what the paper reports.
        cost: what a run costs, for people.
    """

    name: str
    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], Split]
    read: Callable[[Source], Split] | None = None
    task: Task = DIGIT_CLASSES
    epochs: float = 1
    steps: int | None = None
    batch_size: int
    micro_batch: int | None = None
    ramp: BatchRamp | None = None
    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.05
    warmup_share: float = 0.05
    evaluations: int = 10
    measurements: int = 10
    schedule: Rate | None = None
    exempt: tuple[str, ...] | None = None
    average_decay: float | None = None
    max_gradient_norm: float | None = 1.0
    repeats: int = 1
    drop_last: bool = False
    mixed_precision: bool = False
    synchronise_norms: bool = False
    workers: int = 0
    evaluation_batch: int = 512
    arms: tuple[str, ...] = (*WITHOUT_POSITIONS, "positions")
    pretrained: Callable[[Path], Recipe] | None = None
    budget: Callable[[str], Recipe] | None = None
    paper: Paper | None = None
    cost: str = ""

    def from_source(self, source: Source) -> Recipe:
        """The recipe with its samples from there.

        Raises:
            ValueError: the recipe's samples ship with a package.
        """
        if source == Source():
            return self
        located = self
        if self.pretrained is not None:
            start = self.pretrained
            located = dataclasses.replace(self, pretrained=lambda place: start(place).from_source(source))
            if self.read is None:  # what it reads depends on the model that it starts from
                return located
        if self.read is None:
            raise ValueError(
                f"recipe {self.name!r} reads no folder, its data ship with a package: leave out --data-dir, --hub "
                f"and --corrupt"
            )
        read = self.read
        return dataclasses.replace(located, data=lambda: read(source))

    def from_pretrained(self, place: Path) -> Recipe:
        """The recipe on the model in a folder, or with the weights in a file.

        Raises:
            ValueError: the recipe starts from random weights.
            FileNotFoundError: the folder holds no model, or no tokenizer, or there is no such file.
        """
        if self.pretrained is None:
            raise ValueError(f"recipe {self.name!r} starts from random weights: leave --pretrained out")
        return self.pretrained(place)

    def from_budget(self, budget: str) -> Recipe:
        """The recipe with another budget.

        Raises:
            ValueError: it has none, or the text means none.
        """
        if self.budget is None:
            raise ValueError(
                f"recipe {self.name!r} has no budget: leave --budget out, --max-steps makes it shorter"
            )
        return self.budget(budget)

    @property
    def length(self) -> str:
        """For people.

        >>> from wellcond.recipes import RECIPES
        >>> RECIPES["digits-vit"].length
        '11 epochs'
        """
        if self.steps is not None:
            return f"{self.steps:,} steps"
        return "1 epoch" if self.epochs == 1 else f"{self.epochs:g} epochs"

    def config(self) -> dict[str, Any]:
        """What makes results comparable: the settings of the training; most only where they are not the default."""
        always = {"epochs", "batch_size", "learning_rate", "weight_decay", "warmup_share", "evaluations"}
        always |= {"measurements"}
        never = {
            "name",
            "title",
            "model",
            "data",
            "read",
            "paper",
            "cost",
            "workers",
            "arms",
            "evaluation_batch",
        }
        never |= {"pretrained", "budget"}
        settings: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in always or (field.name not in never and value != field.default):
                plain = dataclasses.is_dataclass(value) and not isinstance(value, type)
                settings[field.name] = dataclasses.asdict(value) if plain else value
        settings["task"] = {"kind": type(self.task).__name__, **settings.get("task", {})}
        return settings

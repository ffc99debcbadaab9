"""What a recipe is: everything that two runs of an experiment have in common, in one typed place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from wellcond.data import Split
from wellcond.data.folder import Corrupt
from wellcond.recipes.ingredients import Mixing, Schedule


@dataclasses.dataclass(frozen=True)
class Source:
    """Where images are read from, as a command gives it.

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


@dataclasses.dataclass(frozen=True)
class Paper:
    """Top-1 accuracy in % that the paper reports, without and with conditioning."""

    baseline: float
    conditioned: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Image classification with a known transformer.

    Attributes:
        name, title: for commands and for people.
        model: builds a fresh model that returns logits; its weights come from torch's random state.
        data: loads the images from where they usually are.
        read: loads them from a `Source`; None: they ship with a package, and there is nothing to choose.
        epochs, batch_size: the length of the training. The batch is that of all processes together.
        learning_rate, weight_decay: of AdamW.
        warmup_share: of the training; linear warm-up, then cosine decay to 0. Not used if there is a ``schedule``.
        label_smoothing: of the training loss; it is in the targets where images are mixed.
        evaluations: how often the test images are scored during training.
        measurements: how often condition numbers are measured.
        classes: outputs of the model.
        schedule: of the learning rate, in place of ``warmup_share``.
        exempt: names, with ``*``, of parameters without weight decay besides biases and those with one dimension.
            None: the Trainer's choice, biases and normalisation layers.
        mixing: mixup and CutMix.
        average_decay: of an exponential moving average of the weights, scored at the end beside the model; None: none.
        max_gradient_norm: longer gradients are shortened to it; None: none are.
        repeats: how often an image comes in a row, augmented anew each time (repeated augmentation); an epoch keeps
            its length.
        drop_last: leave out the last batch of an epoch if it is not full. Fewer images than a batch make one batch.
        mixed_precision: bfloat16 autocast on accelerators that have it.
        synchronise_norms: batch normalisation over all processes.
        workers: processes that load images.
        positions: whether the model adds a position parameter, which the arm "positions" needs.
        paper: what the paper reports.
        cost: what a run costs, for people.
    """

    name: str
    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], Split]
    read: Callable[[Source], Split] | None = None
    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.05
    warmup_share: float = 0.05
    label_smoothing: float = 0.0
    evaluations: int = 10
    measurements: int = 10
    classes: int = 10
    schedule: Schedule | None = None
    exempt: tuple[str, ...] | None = None
    mixing: Mixing | None = None
    average_decay: float | None = None
    max_gradient_norm: float | None = 1.0
    repeats: int = 1
    drop_last: bool = False
    mixed_precision: bool = False
    synchronise_norms: bool = False
    workers: int = 0
    positions: bool = True
    paper: Paper | None = None
    cost: str = ""

    def from_source(self, source: Source) -> Recipe:
        """The recipe with its images from there.

        Raises:
            ValueError: the recipe's images ship with a package.
        """
        if source == Source():
            return self
        if self.read is None:
            raise ValueError(
                f"recipe {self.name!r} reads no folder, its images ship with a package: leave out --data-dir, --hub "
                f"and --corrupt"
            )
        read = self.read
        return dataclasses.replace(self, data=lambda: read(source))

    def config(self) -> dict[str, Any]:
        """What makes results comparable: the settings of the training, those at their default left out if optional."""
        always = "epochs batch_size learning_rate weight_decay warmup_share label_smoothing evaluations measurements"
        never = "name title model data read paper cost workers positions"
        settings = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in always.split() or (field.name not in never.split() and value != field.default):
                plain = isinstance(value, (Schedule, Mixing))
                settings[field.name] = dataclasses.asdict(value) if plain else value
        return settings

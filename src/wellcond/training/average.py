"""An exponential moving average of the weights, kept beside the model and in its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

AVERAGE_FILE = "average.safetensors"


class Average:
    """Weights and buffers of a model averaged over optimizer steps, by `timm.utils.ModelEmaV3`.

    Args:
        model: on its device already; the average starts with its weights.
        decay: the share of the old average in the new one.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = Average(nn.init.zeros_(model.weight) is not None and model, decay=0.75)
    >>> _ = nn.init.ones_(model.weight)
    >>> average.update(model)
    >>> with average.applied_to(model):
    ...     model.weight.item()
    0.25
    >>> model.weight.item()
    1.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        from timm.utils.model_ema import ModelEmaV3

        self.average: Any = ModelEmaV3(model, decay=decay)

    def update(self, model: nn.Module) -> None:
        """Take the weights of one more optimizer step into the average."""
        self.average.update(model)

    def save(self, folder: Path) -> None:
        """Write the average into a checkpoint."""
        from safetensors.torch import save_model

        save_model(self.average.module, str(folder / AVERAGE_FILE))

    def load(self, folder: Path) -> None:
        """Read the average of a checkpoint. Raises FileNotFoundError if it has none."""
        from safetensors.torch import load_model

        path = folder / AVERAGE_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {AVERAGE_FILE}: it is of a run without an average")
        load_model(self.average.module, str(path), device=str(next(self.average.module.parameters()).device))

    @contextlib.contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Within it the model has the averaged weights and buffers; afterwards its own again."""
        own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        try:
            _copy(self.average.module.state_dict(), model)
            yield
        finally:
            _copy(own, model)


@torch.no_grad()
def _copy(source: dict[str, Tensor], model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        tensor.copy_(source[name])

"""Running a model once to look at it, and leaving it as it was."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, eager; afterwards training flags and random state are what they were."""
    training = {module: module.training for module in model.modules()}
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    eager = (
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo" in sys.modules
        else contextlib.nullcontext()
    )
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[d for d in devices if d is not None]), eager:
            yield
    finally:
        for module, flag in training.items():
            module.training = flag


def call_model(model: nn.Module, batch: Any) -> Any:
    """``model(**batch)`` for a mapping, ``model(*batch)`` for a tuple or list, ``model(batch)`` otherwise.

    >>> call_model(nn.Identity(), (3,))
    3
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)

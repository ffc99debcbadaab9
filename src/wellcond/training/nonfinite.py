"""A loss that is not finite: stop, and say where it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteLoss(FloatingPointError):
    """Training stopped before a loss, a gradient or a weight that is not finite could do harm."""


def is_finite(value: Any) -> bool:
    """Whether every floating-point tensor inside is finite.

    >>> is_finite({"x": torch.ones(2), "y": [torch.tensor([1, 2])]}), is_finite((torch.tensor(float("nan")),))
    (True, False)
    """
    return all(bool(tensor.isfinite().all()) for tensor in _tensors(value))


def first_non_finite(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """The path of the first module whose output is not finite when ``forward`` runs; None if all are finite.

    Modules inside are seen before those around them, so the path is the innermost one. Weights, gradients and
    random state stay as they are.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> _ = nn.init.constant_(model[1].weight, float("inf"))
    >>> first_non_finite(model, lambda: model(torch.ones(1, 2)))
    '1'
    """
    found: list[str] = []
    handles = []
    for path, module in model.named_modules():

        def look(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
            if not found and not is_finite(output):
                found.append(path or type(module).__name__)

        handles.append(module.register_forward_hook(look))
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def bad_tensors(named: Iterator[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors that are not finite.

    >>> bad_tensors(iter([("a", torch.ones(1)), ("b", torch.tensor([1.0, float("inf")]))]))
    ['b']
    """
    return [name for name, tensor in named if not is_finite(tensor)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)

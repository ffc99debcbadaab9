"""How many CPU threads a small model trains with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import nn

SMALL = 1_000_000
"""Parameters below which the layers of a model are too short to share out among threads."""


@contextlib.contextmanager
def threads_for(model: nn.Module) -> Iterator[None]:
    """One CPU thread for a model below `SMALL` parameters, unless ``OMP_NUM_THREADS`` chooses.

    Threads meet after every layer. In a small model that is every few microseconds, and when another program holds
    one of the cores all of them spin until it lets go: the demo took many times as long on a busy machine. One
    thread also adds up in the same order on every machine. Afterwards the number is what it was.

    >>> before = torch.get_num_threads()
    >>> with threads_for(nn.Linear(4, 4)):
    ...     pass
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

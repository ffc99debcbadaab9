"""Tokens spread over several processes (DTensor): a batch may be, a matrix may not.

The polar factor of a piece is not a piece of the polar factor: C of an 8×4 matrix and C of its two 4×4 halves
differ by more than half of their size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def is_distributed(x: object) -> bool:
    """Whether ``x`` is a DTensor, without importing torch.distributed for everybody."""
    return type(x).__name__ == "DTensor"


def needs_every_process(model: nn.Module) -> bool:
    """Whether a forward gathers weights from other processes (FSDP), so that all must run it or none.

    >>> needs_every_process(nn.Linear(2, 2))
    False
    """
    fully_sharded = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return fully_sharded or any(is_distributed(parameter) for parameter in model.parameters())


def on_local_batch(
    function: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]], x: Any, mask: Any | None
) -> list[Tensor]:
    """``function(x, mask)`` on this process's part of the batch; its results are spread as ``x`` is.

    Raises:
        ValueError: tokens or features are sharded, or ``x`` is a pending sum, or ``mask`` is spread differently.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for placement in x.placements:
        whole = isinstance(placement, Replicate)
        by_batch = isinstance(placement, Shard) and placement.dim % x.ndim < x.ndim - 2
        if not whole and not by_batch:
            raise ValueError(
                f"tokens of shape {tuple(x.shape)} are placed {x.placements}: a matrix of tokens (its last two axes) "
                f"must be whole on one process, because the correction of a shard is not a shard of the correction; "
                f"redistribute to Replicate() or to a Shard of a batch axis first"
            )
    if mask is not None and is_distributed(mask) and mask.placements != x.placements:
        raise ValueError(
            f"mask is placed {mask.placements}, tokens {x.placements}; redistribute the mask alike"
        )
    if mask is not None and not is_distributed(mask):
        raise ValueError("tokens are a DTensor and mask is not; distribute the mask as the tokens are")
    results = function(x.to_local(), None if mask is None else mask.to_local())
    return [
        DTensor.from_local(
            r, x.device_mesh, x.placements, run_check=False, shape=shape, stride=row_major(shape)
        )
        for r, shape in ((r, torch.Size((*x.shape[: x.ndim - 2], *r.shape[x.ndim - 2 :]))) for r in results)
    ]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))

"""Samples side by side on the cores of a CPU, one thread each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

SMALL_SAMPLE = 1 << 15
"""Samples with fewer entries than this are worked on together; larger ones one at a time, in cache."""
WORTH_THREADS = 10**8
"""Arithmetic of a batch from which starting threads, some milliseconds, is little beside it."""


def parts_of(x: Tensor) -> Iterator[slice]:
    """Samples done together. It depends on their shape alone, so that a sample's result does not depend on
    its neighbours, and on accelerators, which want everything at once, it is the whole batch."""
    step = max(1, SMALL_SAMPLE // max(1, x[0].numel())) if x.device.type == "cpu" else len(x)
    for start in range(0, len(x), step):
        yield slice(start, start + step)


def for_each(do: Callable[[slice], int], parts: list[slice], device: torch.device, flops: int) -> list[int]:
    """`do` on every part; on a CPU with several threads side by side, one thread each.

    LAPACK on one small matrix does not profit from threads, a batch does; and below `WORTH_THREADS` one thread
    does it all, because threads that wait for each other cost more than the work. The threads live for one call: a
    pool that outlived it would hang in a forked data loader. Each starts with torch's own number of threads
    and then turns to one for itself; the last line gives later threads of the process their default back.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(parts))
    if device.type != "cpu":
        return [do(part) for part in parts]
    if threads == 1 or workers == 1 or workers < threads // 2:
        with blas_threads(threads):
            return [do(part) for part in parts]

    def alone() -> None:
        torch.get_num_threads()  # the first call in a thread sets the process's default; only then may it change
        torch.set_num_threads(1)

    try:
        with blas_threads(1):
            if flops < WORTH_THREADS:
                torch.set_num_threads(1)
                return [do(part) for part in parts]
            with ThreadPoolExecutor(workers, initializer=alone) as pool:
                return list(pool.map(do, parts))
    finally:
        torch.set_num_threads(threads)


@functools.cache
def numpy_and_its_blas() -> tuple[Any, Any] | None:
    """numpy and a control of its OpenBLAS's threads, where numpy and threadpoolctl are installed (extra ``fast``)."""
    try:
        import numpy
        import threadpoolctl
    except ImportError:
        return None
    return numpy, threadpoolctl.ThreadpoolController().select(internal_api="openblas")


def blas_threads(count: int) -> contextlib.AbstractContextManager[Any]:
    """numpy's products take ``count`` threads inside."""
    found = numpy_and_its_blas()
    return contextlib.nullcontext() if found is None else found[1].limit(limits=count)

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
"""Samples with fewer entries than this are worked on together."""
SMALL_MATRICES = 1 << 18
"""Of larger ones as many as asked for, if every thread has its share and d×d of them have no more entries than this."""
WORTH_THREADS = 10**8
"""Arithmetic of a batch from which starting threads, some milliseconds, is little beside it."""


def large_sample(x: Tensor) -> bool:
    """Whether X ``(b, N, d)`` has samples on a CPU that are worth a call of their own."""
    return x.device.type == "cpu" and x.shape[-2] * x.shape[-1] >= SMALL_SAMPLE


def parts_of(x: Tensor, together: int = 1) -> Iterator[slice]:
    """Samples done together: small ones, and larger ones up to ``together``. On accelerators, which want everything at
    once, the whole batch. Work on them must not let one depend on its neighbours."""
    step = len(x)
    if x.device.type == "cpu":
        n, d = x.shape[-2:]
        share = -(-len(x) // max(2, torch.get_num_threads()))  # half at most, for the memory
        step = max(1, SMALL_SAMPLE // max(1, n * d), min(together, share, SMALL_MATRICES // max(1, d * d)))
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
